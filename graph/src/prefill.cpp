#include <gdnflow/error.hpp>
#include <gdnflow/prefill.hpp>

#include "bound_plan.hpp"
#include "prefill_tensors.hpp"
#include "workspace.hpp"

#if GDNFLOW_WITH_CUDA
#include "launch.hpp"
#endif

#include <algorithm>
#include <cstdint>
#include <list>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, "prefill: " + message);
}

struct Key {
  Problem problem;
  Capacity capacity;
  Device device;
  PrefillOptions options;

  bool matches(const Problem& p, const Capacity& c, Device d, const PrefillOptions& o) const {
    return capacity == c && device == d && problem == p && options.recipe == o.recipe &&
           options.overrides == o.overrides;
  }
};

/// A plan that this thread has used, with what it was last bound to.
struct Entry {
  Key key;
  BoundPlan bound;
  TensorEdges edges;
  EdgeTensors tensors{};
  bool prepared = false;  ///< kernels are loaded

  Entry(Key k, Plan plan)
      : key(std::move(k)),
        bound(std::move(plan), "prefill", {}),
        edges(tensor_edges(bound.pipeline())) {}
};

Pipeline make_prefill_pipeline(const Problem& problem, const Capacity& capacity, Device device,
                               const PrefillOptions& options) {
  validate(problem, capacity);
  return make_pipeline(options.recipe, problem, capacity, device_info(device), options.overrides);
}

/// The plans that this thread used last, the latest in front.
Entry& find_entry(const Problem& problem, const Capacity& capacity, Device device,
                  const PrefillOptions& options) {
  constexpr std::size_t most_entries = 16;
  thread_local std::list<Entry> entries;
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) {
    return entry.key.matches(problem, capacity, device, options);
  });
  if (found != entries.end()) {
    entries.splice(entries.begin(), entries, found);
  } else {
    entries.emplace_front(Key{problem, capacity, device, options},
                          Plan(make_prefill_pipeline(problem, capacity, device, options)));
    if (entries.size() > most_entries) entries.pop_back();
  }
  return entries.front();
}

void collect_tensors(Entry& entry, const PrefillTensors& tensors) {
  check_presence(entry.bound.pipeline(), entry.edges, tensors, "prefill");
  entry.tensors.clear();
  for (std::size_t i = 0; i < entry.edges.size(); ++i) {
    if (entry.edges[i] < 0) continue;
    entry.tensors.emplace_back(entry.edges[i], tensors.*tensor_names[i].member);
  }
}

/// The arena within the caller's workspace.
void* arena_in(const Plan& plan, void* workspace, std::int64_t bytes) {
  if (const std::string wrong = workspace_refusal(plan.arena_bytes(), workspace, bytes);
      !wrong.empty()) {
    refuse(wrong);
  }
  return plan.arena_bytes() == 0 ? nullptr : aligned_arena(workspace);
}

/// Runs what is bound; the first call on a shape also loads its kernels.
void run(Entry& entry, [[maybe_unused]] Stream stream, [[maybe_unused]] bool behind_callers) {
  if (entry.key.device.type == DeviceType::host) {
    if (!entry.prepared) check_host_steps(entry.bound);
    entry.prepared = true;
    run_on_host(entry.bound);
    return;
  }
#if GDNFLOW_WITH_CUDA
  const cuda::DeviceGuard guard(entry.key.device.index);
  if (!entry.prepared) prepare_kernels(entry.bound);
  entry.prepared = true;
  enqueue(entry.bound, stream, behind_callers);
#else
  throw Error(ErrorCode::internal, "prefill: a CUDA plan in a build without CUDA");
#endif
}

}  // namespace

Capacity prefill_capacity(const Problem& problem, const PrefillTensors& tensors,
                          std::int64_t sequences) {
  const auto expect = [](const TensorView& tensor, std::string_view name, std::int32_t rank,
                         std::string_view shape) {
    if (tensor.rank == rank) return;
    refuse(fmt::format("{}: expected {}, got {}", name, shape, describe(tensor)));
  };
  expect(tensors.q, "q", 3, "[T,Hqk,Dk]");
  Capacity capacity;
  capacity.max_tokens = tensors.q.extents[0];
  capacity.max_sequences = sequences;
  if (problem.cu_seqlens) {
    expect(tensors.cu_seqlens, "cu_seqlens", 1, "[N+1]");
    capacity.max_sequences = tensors.cu_seqlens.extents[0] - 1;
    if (capacity.max_sequences < 1) {
      refuse(fmt::format("cu_seqlens: expected [N+1] with at least 1 sequence, got {}",
                         to_string(tensors.cu_seqlens)));
    }
  }
  return capacity;
}

std::int64_t prefill_workspace_bytes(const Problem& problem, const Capacity& capacity,
                                     Device device, const PrefillOptions& options) {
  return workspace_bytes_for(
      find_entry(problem, capacity, device, options).bound.plan().arena_bytes());
}

void prefill(const Problem& problem, const PrefillTensors& tensors, void* workspace,
             std::int64_t workspace_bytes, Stream stream, const PrefillOptions& options,
             std::int64_t sequences) {
  const Capacity capacity = prefill_capacity(problem, tensors, sequences);
  Entry& entry = find_entry(problem, capacity, tensors.q.device, options);
  collect_tensors(entry, tensors);
  void* const arena = arena_in(entry.bound.plan(), workspace, workspace_bytes);
  // An arena is "new" only where its address differs, so a repeated call recomputes nothing.
  entry.bound.propose(entry.tensors, arena);
  entry.bound.commit();
  run(entry, stream, options.behind_callers);
}

}  // namespace gdnflow
