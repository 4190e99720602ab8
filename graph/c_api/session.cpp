#include <gdnflow/session.hpp>

#include "border.hpp"
#include "options.hpp"
#include "problem.hpp"
#include "tensors.hpp"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

// Sessions: a serving loop's replays.

struct gdnflow_session {
  gdnflow::PrefillSession value;
  gdnflow::PrefillTensors tensors{};
};

namespace gdnflow::c_api {
namespace {

SessionOptions options_of(const gdnflow_session_options* options) {
  SessionOptions result;
  if (options == nullptr) return result;
  if (options->recipe != nullptr) set_recipe(result.prefill, options->recipe);
  if (options->variant_count > 0) (void)expect(options->variants, "options: variants");
  for (std::size_t i = 0; i < options->variant_count; ++i) {
    const gdnflow_variant& variant = options->variants[i];
    set_variant(result.prefill, variant.stage, &expect(variant.choice, "options: choice"));
  }
  result.graphs = options->eager == 0;
  result.programmatic = options->not_programmatic == 0;
  result.prefill.behind_callers = options->behind_callers != 0;
  return result;
}

/// As many as there is room for; how many there are takes the place of the room.
void give_capacities(std::span<const Capacity> from, gdnflow_capacity* to, std::size_t* count) {
  std::size_t& room = expect(count, "count");
  if (room > 0) (void)expect(to, "buckets");
  for (std::size_t i = 0; i < std::min(room, from.size()); ++i) {
    to[i] = {from[i].max_tokens, from[i].max_sequences};
  }
  room = from.size();
}

}  // namespace
}  // namespace gdnflow::c_api

using namespace gdnflow;
using namespace gdnflow::c_api;

extern "C" {

gdnflow_status gdnflow_capacity_ladder(gdnflow_capacity most, int64_t least_tokens, double factor,
                                       gdnflow_capacity* buckets, size_t* count) {
  return guarded([&] {
    give_capacities(capacity_ladder({most.tokens, most.sequences}, least_tokens, factor), buckets,
                    count);
  });
}

gdnflow_status gdnflow_session_create(const gdnflow_problem* problem,
                                      const gdnflow_capacity* buckets, size_t count,
                                      DLDevice device, const gdnflow_session_options* options,
                                      gdnflow_session** session) {
  return guarded([&] {
    gdnflow_session*& to = expect(session, "session");
    const Problem& p = expect(problem, "problem").value;
    if (count > 0) (void)expect(buckets, "buckets");
    std::vector<Capacity> capacities;
    for (std::size_t i = 0; i < count; ++i) {
      capacities.push_back({buckets[i].tokens, buckets[i].sequences});
    }
    to = new gdnflow_session{
        PrefillSession(p, std::move(capacities), device_of(device, "device"), options_of(options))};
  });
}

void gdnflow_session_destroy(gdnflow_session* session) { delete session; }

gdnflow_status gdnflow_session_bind(gdnflow_session* session, const char* name,
                                    const DLTensor* tensor) {
  return guarded([&] { bind(expect(session, "session").tensors, name, tensor); });
}

gdnflow_status gdnflow_session_buckets(const gdnflow_session* session, gdnflow_capacity* buckets,
                                       size_t* count) {
  return guarded(
      [&] { give_capacities(expect(session, "session").value.buckets(), buckets, count); });
}

gdnflow_status gdnflow_session_workspace_bytes(const gdnflow_session* session, int64_t* bytes) {
  return guarded([&] {
    std::int64_t& to = expect(bytes, "bytes");
    to = expect(session, "session").value.workspace_bytes();
  });
}

gdnflow_status gdnflow_session_workspace(gdnflow_session* session, void* workspace, int64_t bytes) {
  return guarded([&] { expect(session, "session").value.set_workspace(workspace, bytes); });
}

gdnflow_status gdnflow_session_prepare(gdnflow_session* session) {
  return guarded([&] {
    gdnflow_session& s = expect(session, "session");
    s.value.prepare(s.tensors);
  });
}

gdnflow_status gdnflow_session_run(gdnflow_session* session, int64_t tokens, int64_t sequences,
                                   void* stream, gdnflow_capacity* bucket) {
  return guarded([&] {
    gdnflow_session& s = expect(session, "session");
    const Capacity& served = s.value.run(s.tensors, tokens, sequences, static_cast<Stream>(stream));
    if (bucket != nullptr) *bucket = {served.max_tokens, served.max_sequences};
  });
}

gdnflow_status gdnflow_session_count(const gdnflow_session* session, gdnflow_session_stats* stats) {
  return guarded([&] {
    gdnflow_session_stats& to = expect(stats, "stats");
    const SessionStats from = expect(session, "session").value.stats();
    to = {from.calls,           from.hits,       from.captures, from.rebinds,
          from.workspace_bytes, from.graph_bytes};
  });
}

}  // extern "C"
