#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "graph/small_session.hpp"
#include "graph/tiny_stages.hpp"
#include "src/bound_plan.hpp"
#include "support/expect_error.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

// Which launches are marked as programmatic, without launching any: on devices that are not there,
// with tensors that are never looked into.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

DeviceInfo gpu_of(std::int32_t capability) {
  DeviceInfo info;
  info.device = {DeviceType::cuda, 0};
  info.name = "some GPU";
  info.capability = capability;
  info.multiprocessors = 132;
  info.shared_bytes_per_block = 227 * 1024;
  info.l2_bytes = std::int64_t{50} << 20;
  return info;
}

void some_kernel(int) {}

/// x -> y by two kernels that wait and one that does not.
Pipeline three_kernels(std::int32_t capability) {
  Variant variant;
  variant.id = "kernels";
  variant.description = "for tests";
  variant.target = DeviceType::cuda;
  variant.steps = [](const StageCall&, StepList& out) {
    const Step step = kernel_step("some", some_kernel, {}, {}, 0, 1);
    out.push_back(programmatic(step));
    out.push_back(step);
    out.push_back(programmatic(step));
  };
  const Stage stage{"some", "for tests", {reads("x"), writes("y")}, {variant}};
  return PipelineBuilder("some", Registry({stage}), {}, {4, 1}, gpu_of(capability))
      .inputs({"x"})
      .outputs({"y"})
      .add("some")
      .build();
}

/// A tensor at an address that is never read, of the extents that an edge has; of those that are
/// the caller's to choose, four.
TensorView somewhere(const Pipeline& pipeline, const Edge& edge) {
  std::vector<std::int64_t> extents;
  for (const Extent& extent : edge.extents) {
    extents.push_back(evaluate(extent, pipeline.problem(), pipeline.capacity()).value_or(4));
  }
  return TensorView::dense(reinterpret_cast<void*>(std::uintptr_t{1} << 20), edge.dtype, extents,
                           pipeline.device().device);
}

void bind_all(BoundPlan& bound) {
  Bindings bindings;
  for (const Edge& edge : bound.pipeline().edges()) {
    if (edge.kind == EdgeKind::intermediate) continue;
    bindings.emplace_back(edge.name, somewhere(bound.pipeline(), edge));
  }
  EdgeTensors tensors;
  bound.resolve(bindings, tensors);
  bound.propose(tensors, reinterpret_cast<void*>(std::uintptr_t{1} << 30));
  bound.commit();
}

std::vector<bool> marks(const BoundPlan& bound) {
  std::vector<bool> result;
  for (const int node : bound.order()) {
    for (const Step& step : bound.work(node).steps) {
      const auto* launch = std::get_if<KernelLaunch>(&step.work);
      result.push_back(launch != nullptr && launch->programmatic);
    }
  }
  return result;
}

}  // namespace

TEST_CASE("launches stay programmatic where the device has it, and nobody has switched it off")
{
  for (const std::int32_t capability : {80, 89, 90, 120}) {
    CAPTURE(capability);
    for (const bool on : {true, false}) {
      ExecutorOptions options;
      options.programmatic = on;
      BoundPlan bound(Plan(three_kernels(capability)), "test", options);
      bind_all(bound);
      const bool stays = on && capability >= 90;
      CHECK(marks(bound) == std::vector<bool>{stays, false, stays});
    }
  }
}

TEST_CASE("once a plan has given them up, none is programmatic, bound anew or not")
{
  BoundPlan bound(Plan(three_kernels(90)), "test", {});
  bind_all(bound);
  bound.forgo_programmatic();
  CHECK(marks(bound) == std::vector<bool>{false, false, false});
  EdgeTensors tensors;
  TensorView elsewhere = somewhere(bound.pipeline(), bound.pipeline().edges().front());
  elsewhere.data = reinterpret_cast<void*>(std::uintptr_t{1} << 21);
  bound.resolve({{bound.pipeline().edges().front().name, elsewhere}}, tensors);
  bound.propose(tensors);
  bound.commit();
  CHECK(marks(bound) == std::vector<bool>{false, false, false});
}

TEST_CASE("launches behind the caller's kernels are refused where programmatic ones are off")
{
  const Problem p = small_session_problem();
  ExecutorOptions options;
  options.programmatic = false;
  options.behind_callers = true;
  expect_error(
      ErrorCode::invalid_argument, {"residual: behind_callers: expected programmatic"}, [&] {
        make_host_executor(Plan(make_pipeline("residual", p, {64, 1}, device_info({}))), options);
      });
  expect_error(ErrorCode::invalid_argument,
               {"prefill session: behind_callers: expected programmatic"}, [&] {
                 PrefillSession(p, {{64, 1}}, Device{},
                                {.prefill = {.behind_callers = true}, .programmatic = false});
               });
  PrefillSession(p, {{64, 1}}, Device{}, {.prefill = {.behind_callers = true}});
}

#if GDNFLOW_WITH_CUDA
TEST_CASE("what a pass begins with can wait, in every recipe and on every branch")
{
  Problem plain;
  Problem full;
  full.gate = GateForm::raw;
  full.beta = BetaForm::logit;
  full.qk_norm = true;
  full.zero_padding = true;
  full.checkpoint_interval = 64;
  const DeviceInfo device = gpu_of(90);
  int looked_at = 0;
  for (const Problem& p : {plain, full}) {
    for (const Capacity& capacity : {Capacity{512, 4}, Capacity{512, 5000}}) {
      for (const Recipe& recipe : recipes()) {
        // Steps of the kernels for sm_90a alone ask the driver for tensor maps; of recipes with
        // them in front there are tests on a GPU.
        if (recipe.id == "one-pass" || recipe.id == "auto") continue;
        if (!can_make_pipeline(recipe.id, p, capacity, device)) continue;
        CAPTURE(recipe.id);
        Pipeline pipeline = make_pipeline(recipe.id, p, capacity, device);
        ExecutorOptions options;
        for (const Node& node : pipeline.nodes()) {
          if (node.predecessors.empty()) options.nodes.push_back(node.name);
        }
        REQUIRE_FALSE(options.nodes.empty());
        BoundPlan bound(Plan(std::move(pipeline)), "test", options);
        bind_all(bound);
        for (const int node : bound.order()) {
          const StepList& steps = bound.work(node).steps;
          CAPTURE(bound.pipeline().nodes()[node].name);
          REQUIRE_FALSE(steps.empty());
          const auto* launch = std::get_if<KernelLaunch>(&steps.front().work);
          REQUIRE(launch != nullptr);
          CHECK(launch->programmatic);
          ++looked_at;
        }
      }
    }
  }
  CHECK(looked_at >= 4 * 6);
}
#endif
