#include "executor_base.hpp"

#include <gdnflow/error.hpp>

#if GDNFLOW_WITH_CUDA
#include "launch.hpp"
#endif

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {

Executor::~Executor() = default;

namespace {

void check_options(const Plan& plan, const ExecutorOptions& options, DeviceType target,
                   std::string_view kind) {
  const Pipeline& pipeline = plan.pipeline();
  const auto refuse = [&](const std::string& message) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}: {}", pipeline.id(), message));
  };
  if (pipeline.device().device.type != target) {
    refuse(fmt::format("{} executor: expected a plan for {}, got one for {}", kind,
                       to_string(target), to_string(pipeline.device().device)));
  }
  if (options.arena != nullptr) {
    if (options.arena_bytes < plan.arena_bytes()) {
      refuse(fmt::format("arena: expected at least {} bytes, got {}", plan.arena_bytes(),
                         options.arena_bytes));
    }
    if (reinterpret_cast<std::uintptr_t>(options.arena) % Plan::alignment != 0) {
      refuse(fmt::format("arena: expected an address aligned to {} bytes, got {}", +Plan::alignment,
                         fmt::ptr(options.arena)));
    }
  }
  if (options.behind_callers && !options.programmatic) {
    refuse("behind_callers: expected programmatic launches with it, got them switched off");
  }
  if (options.nodes.empty()) return;
  // What the nodes left out would have written must be there, and must stay.
  if (options.arena == nullptr) refuse("nodes: expected an arena of the caller's with them");
  if (plan.options().reuse) refuse("nodes: expected a plan without reuse with them");
  if (plan.options().poison) refuse("nodes: expected a plan without poison with them");
}

}  // namespace

ExecutorBase::ExecutorBase(Plan plan, ExecutorOptions options, DeviceType target,
                           std::string_view kind)
    : bound_((check_options(plan, options, target, kind), plan), plan.pipeline().id(), options),
      options_(std::move(options)) {}

void ExecutorBase::bind(const Bindings& bindings) {
  bound_.resolve(bindings, resolved_);
  bound_.propose(resolved_);
  if (built_) update_executable();
  bound_.commit();
}

void ExecutorBase::build() {
  if (built_) return;
  void* arena = options_.arena;
  const std::int64_t bytes = plan().arena_bytes();
  if (arena == nullptr && bytes > 0) {
    // Unbound tensors are found before memory is asked for, which may be large.
    bound_.check_all_bound();
    if (!memory_) memory_ = allocate_arena(plan(), bytes);
    arena = memory_.get();
  }
  bound_.propose({}, arena);
  bound_.commit();
  build_executable();
  built_ = true;
}

void ExecutorBase::set_enabled(std::string_view name, bool enabled) {
  const int node = bound_.find_optional(name);
  if (built_) switch_node(node, enabled);
  bound_.set_enabled(node, enabled);
}

TensorView ExecutorBase::intermediate(std::string_view edge) const {
  return bound_.intermediate(edge);
}

void ExecutorBase::require_built() const {
  if (!built_) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: expected build() before run()", plan().pipeline().id()));
  }
}

void ExecutorBase::require_repeats(int repeats) const {
  if (repeats < 1) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}: repeats: expected at least 1, got {}",
                                                         plan().pipeline().id(), repeats));
  }
}

ArenaMemory allocate_arena(const Plan& plan, std::int64_t bytes) {
#if GDNFLOW_WITH_CUDA
  if (plan.pipeline().device().device.type == DeviceType::cuda) {
    return allocate_on_device(plan, bytes);
  }
#endif
  constexpr std::align_val_t alignment{Plan::alignment};
  try {
    return {::operator new(static_cast<std::size_t>(bytes), alignment),
            [](void* memory) { ::operator delete(memory, alignment); }};
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: no memory for an arena of {} bytes", plan.pipeline().id(), bytes));
  }
}

double median(std::vector<double>& samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t middle = samples.size() / 2;
  return samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
}

std::unique_ptr<Executor> make_executor(Plan plan, ExecutorOptions options) {
  return plan.pipeline().device().device.type == DeviceType::host
             ? make_host_executor(std::move(plan), std::move(options))
             : make_eager_executor(std::move(plan), std::move(options));
}

}  // namespace gdnflow
