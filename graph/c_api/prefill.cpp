#include <gdnflow/cache.hpp>
#include <gdnflow/prefill.hpp>

#include "border.hpp"
#include "options.hpp"
#include "prefill_tensors.hpp"
#include "problem.hpp"
#include "tensors.hpp"

#include <cstdint>

#include <fmt/format.h>

// A forward pass in one call, and by graphs that are kept.

struct gdnflow_prefill {
  gdnflow::Problem problem;
  gdnflow::PrefillTensors tensors;
  gdnflow::PrefillOptions options;
  std::int64_t sequences = 1;
};
struct gdnflow_graphs {
  gdnflow::GraphCache value;
};

namespace gdnflow::c_api {
namespace {

Bindings bindings_of(const PrefillTensors& tensors) {
  Bindings bindings;
  for (const TensorName& name : tensor_names) {
    const TensorView& view = tensors.*name.member;
    if (view.rank > 0) bindings.emplace_back(name.edge, view);
  }
  return bindings;
}

}  // namespace
}  // namespace gdnflow::c_api

using namespace gdnflow;
using namespace gdnflow::c_api;

extern "C" {

gdnflow_status gdnflow_prefill_create(const gdnflow_problem* problem, gdnflow_prefill** prefill) {
  return guarded([&] {
    gdnflow_prefill*& to = expect(prefill, "prefill");
    const Problem& p = expect(problem, "problem").value;
    validate(p);
    to = new gdnflow_prefill{p, {}, {}, 1};
  });
}

void gdnflow_prefill_destroy(gdnflow_prefill* prefill) { delete prefill; }

gdnflow_status gdnflow_prefill_bind(gdnflow_prefill* prefill, const char* name,
                                    const DLTensor* tensor) {
  return guarded([&] { bind(expect(prefill, "prefill").tensors, name, tensor); });
}

gdnflow_status gdnflow_prefill_recipe(gdnflow_prefill* prefill, const char* recipe) {
  return guarded([&] { set_recipe(expect(prefill, "prefill").options, recipe); });
}

gdnflow_status gdnflow_prefill_variant(gdnflow_prefill* prefill, const char* stage,
                                       const char* choice) {
  return guarded([&] { set_variant(expect(prefill, "prefill").options, stage, choice); });
}

gdnflow_status gdnflow_prefill_behind_callers(gdnflow_prefill* prefill, int32_t on) {
  return guarded([&] { expect(prefill, "prefill").options.behind_callers = on != 0; });
}

gdnflow_status gdnflow_prefill_sequences(gdnflow_prefill* prefill, int64_t sequences) {
  return guarded([&] {
    gdnflow_prefill& to = expect(prefill, "prefill");
    if (sequences < 1) refuse(fmt::format("sequences: expected at least 1, got {}", sequences));
    to.sequences = sequences;
  });
}

gdnflow_status gdnflow_prefill_workspace_bytes(const gdnflow_prefill* prefill, int64_t* bytes) {
  return guarded([&] {
    std::int64_t& to = expect(bytes, "bytes");
    const gdnflow_prefill& from = expect(prefill, "prefill");
    const Capacity capacity = prefill_capacity(from.problem, from.tensors, from.sequences);
    to = prefill_workspace_bytes(from.problem, capacity, from.tensors.q.device, from.options);
  });
}

gdnflow_status gdnflow_prefill_run(const gdnflow_prefill* prefill, void* workspace,
                                   int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const gdnflow_prefill& from = expect(prefill, "prefill");
    gdnflow::prefill(from.problem, from.tensors, workspace, workspace_bytes,
                     static_cast<Stream>(stream), from.options, from.sequences);
  });
}

gdnflow_status gdnflow_graphs_create(size_t most, gdnflow_graphs** graphs) {
  return guarded([&] {
    gdnflow_graphs*& to = expect(graphs, "graphs");
    to = new gdnflow_graphs{GraphCache(most)};
  });
}

void gdnflow_graphs_destroy(gdnflow_graphs* graphs) { delete graphs; }

gdnflow_status gdnflow_graphs_run(gdnflow_graphs* graphs, const gdnflow_prefill* prefill,
                                  void* stream) {
  return guarded([&] {
    GraphCache& cache = expect(graphs, "graphs").value;
    const gdnflow_prefill& from = expect(prefill, "prefill");
    const GraphKey key{from.options.recipe,
                       from.problem,
                       prefill_capacity(from.problem, from.tensors, from.sequences),
                       from.options.overrides,
                       from.tensors.q.device,
                       from.options.behind_callers};
    cache.get(key, bindings_of(from.tensors))->run(static_cast<Stream>(stream));
  });
}

gdnflow_status gdnflow_graphs_count(const gdnflow_graphs* graphs, gdnflow_graphs_stats* stats) {
  return guarded([&] {
    gdnflow_graphs_stats& to = expect(stats, "stats");
    const GraphCacheStats from = expect(graphs, "graphs").value.stats();
    to = {from.hits, from.misses, from.evictions, static_cast<std::uint64_t>(from.entries),
          from.arena_bytes};
  });
}

}  // extern "C"
