#include <gdnflow/error.hpp>

#include "executor_base.hpp"

#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

void run_node(const BoundPlan& bound, int node) {
  const BoundPlan::NodeWork& work = bound.work(node);
  for (const Step& step : work.steps) {
    std::get<HostCall>(step.work).function(bound.call(node, work));
  }
}

class HostExecutor final : public ExecutorBase {
 public:
  HostExecutor(Plan plan, ExecutorOptions options)
      : ExecutorBase(std::move(plan), std::move(options), DeviceType::host, "host") {}

  std::string_view kind() const noexcept override { return "host"; }

  void run(Stream /*stream*/) override {
    require_built();
    poison_on_host(bound_);
    run_on_host(bound_);
  }

  std::vector<NodeTime> profile(int repeats, Stream /*stream*/) override {
    require_built();
    require_repeats(repeats);
    poison_on_host(bound_);
    std::vector<NodeTime> times;
    for (const int node : bound_.order()) {
      if (!bound_.enabled(node)) continue;
      std::vector<double> samples;
      for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        run_node(bound_, node);
        const std::chrono::duration<double, std::milli> taken =
            std::chrono::steady_clock::now() - start;
        samples.push_back(taken.count());
      }
      times.push_back({bound_.pipeline().nodes()[node].name, median(samples)});
    }
    return times;
  }

 protected:
  void build_executable() override {
    check_host_steps(bound_);
    poison_on_host(bound_);
  }
};

}  // namespace

void check_host_steps(const BoundPlan& bound) {
  for (const int node : bound.order()) {
    for (const Step& step : bound.work(node).steps) {
      if (!std::holds_alternative<HostCall>(step.work)) {
        throw Error(ErrorCode::internal,
                    fmt::format("{}: step {}: expected a call on the host",
                                bound.pipeline().nodes()[node].name, step.name));
      }
    }
  }
}

void run_on_host(const BoundPlan& bound) {
  for (const int node : bound.order()) {
    if (bound.enabled(node)) run_node(bound, node);
  }
}

void poison_on_host(const BoundPlan& bound) {
  if (bound.plan().options().poison && bound.arena() != nullptr) {
    std::memset(bound.arena(), 0xff, static_cast<std::size_t>(bound.plan().arena_bytes()));
  }
}

std::unique_ptr<Executor> make_host_executor(Plan plan, ExecutorOptions options) {
  return std::make_unique<HostExecutor>(std::move(plan), std::move(options));
}

}  // namespace gdnflow
