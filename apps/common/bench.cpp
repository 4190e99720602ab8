#include "common/bench.hpp"

#include <gdnflow/gdnflow.hpp>

#include "common/trace.hpp"

#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

Accuracy accuracy_of(const Comparison& comparison, std::span<const std::int64_t> cu_seqlens) {
  const Comparison measures = for_report(comparison);
  return {measures.relative_rms, measures.max_abs, comparison.over_tolerance,
          to_string(comparison, cu_seqlens)};
}

}  // namespace

Bench::Bench(std::string_view case_name, const Workload& workload, const Reference& reference,
             const DeviceInfo& info, Distribution distribution, const BenchOptions& options)
    : case_name_(case_name),
      workload_(workload),
      reference_(reference),
      info_(info),
      stream_(workload.device),
      bounds_(bounds_for(workload.problem, distribution == Distribution::correlated)),
      // The element-wise pass mark is for inputs of the benchmark's scale.
      elementwise_(distribution == Distribution::random_decay ||
                   distribution == Distribution::mixed),
      options_(options) {
  if (options.cold) flush_.emplace(info);
}

PipelineResult Bench::measure(const Variation& variation) const {
  PipelineResult result;
  result.id = variation.pipeline;
  result.options = variation.options;
  result.as_given = variation.as_given;
  std::optional<TraceRange> range;
  if (options_.trace) range.emplace(fmt::format("{}, {}", case_name_, result.label()));
  const Pipeline pipeline = make_pipeline(variation.pipeline, workload_.problem, workload_.capacity,
                                          info_, variation.overrides);
  if (options_.hot) result.hot.emplace();
  if (options_.cold) result.cold.emplace();
  measure_forward(Plan(pipeline), result);
  measure_parts(Plan(pipeline, {.reuse = false, .poison = false}), result);
  return result;
}

std::unique_ptr<Executor> Bench::replayed(Plan plan, ExecutorOptions options) const {
  return workload_.device.type == DeviceType::cuda
             ? make_graph_executor(std::move(plan), std::move(options))
             : make_host_executor(std::move(plan), std::move(options));
}

void Bench::start(Executor& executor) const {
  executor.bind(workload_.bindings());
  executor.build();
  workload_.poison_outputs();
  executor.run(stream_.get());
  synchronize(workload_.device, stream_.get());
}

std::optional<double> Bench::hot_median(Executor& executor) const {
  if (!options_.hot) return std::nullopt;
  return apps::measure([&] { executor.run(stream_.get()); }, workload_.device, stream_.get(),
                       options_.seconds)
      .median_ms;
}

std::optional<double> Bench::cold_median(Executor& executor) const {
  if (!flush_) return std::nullopt;
  return measure_behind([&] { flush_->enqueue(stream_.get()); },
                        [&] { executor.run(stream_.get()); }, workload_.device, stream_.get(),
                        options_.seconds)
      .median_ms;
}

bool Bench::is_right(const Comparison& o, const Comparison& state) const {
  const bool elements = !elementwise_ || (o.over_tolerance == 0 && state.over_tolerance == 0);
  return o.within(bounds_.o) && state.within(bounds_.state) && elements;
}

// The whole pass, as it would be used.
void Bench::measure_forward(Plan plan, PipelineResult& result) const {
  result.arena_bytes = plan.arena_bytes();
  const std::unique_ptr<Executor> whole = replayed(std::move(plan));
  start(*whole);
  const Comparison o = reference_.o(workload_.view("o"));
  const Comparison state = reference_.final_state(workload_.view("final_state"));
  result.o = accuracy_of(o, workload_.cu_seqlens);
  result.state = accuracy_of(state, {});
  result.right = is_right(o, state);
  if (result.hot) result.hot->forward_ms = *hot_median(*whole);
  if (result.cold) result.cold->forward_ms = *cold_median(*whole);
}

// The core nodes by themselves, and each node by itself. A pass over the whole pipeline leaves
// every intermediate in an arena without reuse, which the executors of some of its nodes share.
void Bench::measure_parts(const Plan& plan, PipelineResult& result) const {
  const Memory arena(workload_.device, plan.arena_bytes());
  ExecutorOptions options;
  options.arena = arena.data();
  options.arena_bytes = arena.bytes();
  const std::unique_ptr<Executor> all = make_executor(plan, options);
  start(*all);
  if (options_.trace) trace_stages(plan, options);
  for (const Node& node : plan.pipeline().nodes()) {
    if (node.core) options.nodes.push_back(node.name);
  }
  if (!options.nodes.empty()) {
    const std::unique_ptr<Executor> core = replayed(plan, options);
    start(*core);
    result.right = result.right && is_right(reference_.o(workload_.view("o")),
                                            reference_.final_state(workload_.view("final_state")));
    if (result.hot) result.hot->core_ms = hot_median(*core);
    if (result.cold) result.cold->core_ms = cold_median(*core);
  }
  constexpr int host_repeats = 3;
  constexpr int gpu_repeats = 20;
  const int repeats = workload_.device.type == DeviceType::host ? host_repeats : gpu_repeats;
  for (const NodeTime& time : all->profile(repeats, stream_.get())) {
    result.stages.push_back({time.node, time.median_ms});
  }
}

// One more pass, launched stage by stage, with each stage's launches in a range of its name: in the
// replays of a graph a profiler sees one launch.
void Bench::trace_stages(const Plan& plan, ExecutorOptions options) const {
  std::vector<std::pair<std::string, std::unique_ptr<Executor>>> stages;
  for (const int index : plan.pipeline().order()) {
    const Node& node = plan.pipeline().nodes()[static_cast<std::size_t>(index)];
    options.nodes = {node.name};
    stages.emplace_back(node.name, make_executor(plan, options));
    stages.back().second->bind(workload_.bindings());
    stages.back().second->build();
  }
  const TraceRange pass("stage by stage");
  for (const auto& [name, stage] : stages) {
    const TraceRange range(name);
    stage->run(stream_.get());
  }
  synchronize(workload_.device, stream_.get());
}

}  // namespace gdnflow::apps
