#include <gdnflow/cache.hpp>
#include <gdnflow/compare.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/prefill.hpp>
#include <gdnflow/recipes.hpp>

#include "gpu/callers_graph.hpp"
#include "gpu/device_externals.hpp"
#include "support/allocations.hpp"
#include "support/expect_error.hpp"
#include "support/gpu.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

// The eager and the graph executor: the same bits from both, replay, rebinding, capture, and what
// they refuse.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

Problem small_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  p.initial_state = true;
  return p;
}

/// With all of the optional stages in front and behind.
Problem full_problem() {
  Problem p = small_problem();
  p.gate = GateForm::raw;
  p.beta = BetaForm::logit;
  p.qk_norm = true;
  p.zero_padding = true;
  return p;
}

std::vector<std::string> runnable(const Problem& problem, const Capacity& capacity) {
  std::vector<std::string> ids;
  for (const Recipe& recipe : recipes()) {
    if (is_excluded(recipe.id)) continue;
    if (can_make_pipeline(recipe.id, problem, capacity, device_info(gpu))) {
      ids.emplace_back(recipe.id);
    }
  }
  REQUIRE_FALSE(ids.empty());
  return ids;
}

Plan gpu_plan(std::string_view recipe, const Externals& x, PlanOptions options = {}) {
  return Plan(make_pipeline(recipe, x.problem(), x.capacity(), device_info(gpu)), options);
}

using Factory = std::unique_ptr<Executor> (*)(Plan, ExecutorOptions);

std::unique_ptr<Executor> built(Factory make, Plan plan, const Bindings& bindings) {
  auto executor = make(std::move(plan), {});
  executor->bind(bindings);
  executor->build();
  return executor;
}

void check_against_oracle(DeviceExternals& device) {
  const Externals& x = device.download();
  const OracleResult expected = oracle_recurrent(x.problem(), x.oracle_inputs());
  const Comparison o = compare(x.owned_o(), std::span(expected.o).first(x.owned_elements()));
  CHECK_MESSAGE(o.within(5e-3), "o: ", to_string(o, x.offsets()));
  const Comparison state = compare(x.tensors().at("final_state"), expected.final_state);
  CHECK_MESSAGE(state.within(5e-3), "final_state: ", to_string(state));
  CHECK(x.padding_of_o_is(x.problem().zero_padding ? 0x00 : 0xff));
}

// A stage without kernels: a memset and copies between intermediates, as library steps.
struct CopyParams {
  void* to;
  const void* from;
  std::size_t bytes;
};
void enqueue_copy(const void* params, Stream stream) {
  CopyParams p;
  std::memcpy(&p, params, sizeof p);
  (void)cudaMemcpyAsync(p.to, p.from, p.bytes, cudaMemcpyDeviceToDevice, stream);
}
Step copy_step(const TensorView& to, const TensorView& from) {
  const CopyParams params{to.data, from.data, static_cast<std::size_t>(to.bytes())};
  return {"copy", Enqueue{enqueue_copy, ParamBlob::of(params)}};
}

Port f32_port(std::string name, Direction direction) {
  return {std::move(name), direction, TypeRule::f32, {"T"}, false, Padding::untouched};
}

Stage cuda_stage(std::string name, std::vector<Port> ports,
                 void (*steps)(const StageCall&, StepList&)) {
  Variant variant;
  variant.id = "copies";
  variant.description = "for tests";
  variant.target = DeviceType::cuda;
  variant.steps = steps;
  return {std::move(name), "for tests", std::move(ports), {variant}};
}

std::vector<float> floats(const DeviceTensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.view().elements()));
  TensorView host = tensor.view();
  host.data = values.data();
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  tensor.download(host);
  return values;
}

}  // namespace

TEST_CASE("eager, graph and replay give the same bits, with poison, without reuse")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Problem& p : {small_problem(), full_problem()}) {
    const Externals host(p, {400, 5}, {100, 0, 1, 250});
    for (const std::string& recipe : runnable(p, host.capacity())) {
      CAPTURE(recipe);
      DeviceExternals x(host);
      built(make_eager_executor, gpu_plan(recipe, host), x.bindings())->run();
      check_against_oracle(x);
      const auto expected = x.bits();
      for (const PlanOptions options : {PlanOptions{}, PlanOptions{.reuse = false, .poison = true},
                                        PlanOptions{.reuse = true, .poison = true}}) {
        for (const Factory make : {make_eager_executor, make_graph_executor}) {
          const auto executor = built(make, gpu_plan(recipe, host, options), x.bindings());
          CAPTURE(executor->kind());
          for (int replay = 0; replay < 3; ++replay) {
            x.overwrite(host);
            executor->run();
            CHECK(x.bits() == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("one graph serves any lengths within its capacity")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = small_problem();
  const Capacity capacity{640, 4};
  for (const std::string& recipe : runnable(p, capacity)) {
    CAPTURE(recipe);
    DeviceExternals x(Externals(p, capacity, {640}));
    const auto graph = built(
        make_graph_executor,
        Plan(make_pipeline(recipe, p, capacity, device_info(gpu)), {.reuse = true, .poison = true}),
        x.bindings());
    for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{640},
                                                     {0, 0, 0, 0},
                                                     {1, 0, 63, 256},
                                                     {65, 65, 65},
                                                     {0, 129},
                                                     {160, 160, 160, 160}}) {
      CAPTURE(lengths.size());
      x.overwrite(Externals(p, capacity, lengths, Distribution::mixed, 3));
      graph->run();
      check_against_oracle(x);
    }
  }
}

TEST_CASE("all pointers are rebound without building anew, and a refusal changes nothing")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = full_problem();
  const Capacity capacity{300, 3};
  for (const std::string& recipe : runnable(p, capacity)) {
    CAPTURE(recipe);
    DeviceExternals x(Externals(p, capacity, {100, 200}, Distribution::random_decay, 1));
    DeviceExternals y(Externals(p, capacity, {0, 33, 267}, Distribution::random_decay, 2));
    for (const Factory make : {make_eager_executor, make_graph_executor}) {
      const auto executor =
          built(make, Plan(make_pipeline(recipe, p, capacity, device_info(gpu))), x.bindings());
      CAPTURE(executor->kind());
      executor->run();
      check_against_oracle(x);
      executor->bind(y.bindings());
      executor->run();
      check_against_oracle(y);
      executor->bind({{"q", x.view("q")}, {"k", x.view("k")}});
      executor->bind({{"q", y.view("q")}, {"k", y.view("k")}});
      TensorView wrong = x.view("v");
      wrong.extents[0] = 299;
      expect_error(ErrorCode::invalid_argument, {"v", "expected bf16[300,4,128] cuda:0"}, [&] {
        executor->bind({{"q", x.view("q")}, {"v", wrong}});
      });
      executor->run();
      check_against_oracle(y);
    }
  }
}

TEST_CASE("no tokens: nothing but the final states")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = full_problem();
  const Externals host(p, {0, 3}, {0, 0, 0});
  for (const std::string& recipe : runnable(p, host.capacity())) {
    CAPTURE(recipe);
    for (const Factory make : {make_eager_executor, make_graph_executor}) {
      DeviceExternals x(host);
      built(make, gpu_plan(recipe, host), x.bindings())->run();
      check_against_oracle(x);
    }
  }
}

TEST_CASE("a run is captured into a graph of the caller's, branches kept apart")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = full_problem();
  const Externals host(p, {200, 2}, {120, 60});
  for (const std::string& recipe : runnable(p, host.capacity())) {
    CAPTURE(recipe);
    DeviceExternals x(host);
    const auto eager = built(make_eager_executor, gpu_plan(recipe, host), x.bindings());
    eager->run();
    const auto expected = x.bits();
    const auto graph = built(make_graph_executor, gpu_plan(recipe, host), x.bindings());
    const CallersGraph by_eager([&](cudaStream_t stream) { eager->run(stream); });
    const CallersGraph by_graph([&](cudaStream_t stream) {
      graph->run(stream);
      graph->run(stream);  // one behind the other
    });
    for (const CallersGraph* callers : {&by_eager, &by_graph}) {
      x.overwrite(host);
      callers->launch();
      CHECK(x.bits() == expected);
    }
    CHECK(by_eager.roots() == 1);
    // Gates, norms and the chunk table, where there are stages for them, wait for nothing.
    const Plan plan = gpu_plan(recipe, host);
    const auto nodes = plan.pipeline().nodes();
    const auto first = std::count_if(nodes.begin(), nodes.end(), [](const Node& node) {
      return node.stage.name == "gate" || node.stage.name == "qk_norm" ||
             node.stage.name == "chunk_index";
    });
    CHECK(by_graph.roots() == static_cast<std::size_t>(std::max<std::ptrdiff_t>(first, 1)));
    // A node that is switched off is left out.
    graph->set_enabled("zero_padding", false);
    const CallersGraph without([&](cudaStream_t stream) { graph->run(stream); });
    CHECK(2 * without.nodes() < by_graph.nodes());
  }
}

TEST_CASE("programmatic launches can be switched off, for the same bits")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = full_problem();
  const Externals host(p, {200, 2}, {120, 60});
  const Support support = can_make_pipeline("one-pass", p, host.capacity(), device_info(gpu));
  if (!support) return;
  DeviceExternals x(host);
  std::vector<unsigned char> expected;
  for (const bool programmatic : {true, false}) {
    CAPTURE(programmatic);
    for (const Factory make : {make_eager_executor, make_graph_executor}) {
      ExecutorOptions options;
      options.programmatic = programmatic;
      const auto executor = make(gpu_plan("one-pass", host), options);
      executor->bind(x.bindings());
      executor->build();
      x.overwrite(host);
      executor->run();
      if (expected.empty()) expected = x.bits();
      CHECK(x.bits() == expected);
      const CallersGraph callers([&](cudaStream_t stream) { executor->run(stream); });
      CHECK((callers.programmatic_edges() > 0) == programmatic);
    }
  }
}

TEST_CASE("an optional node is switched in the built graph")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = full_problem();
  const Externals host(p, {200, 2}, {120, 30});
  for (const Factory make : {make_eager_executor, make_graph_executor}) {
    DeviceExternals x(host);
    const auto executor = make(gpu_plan("residual", host), {});
    executor->bind(x.bindings());
    executor->set_enabled("zero_padding", false);
    executor->build();
    executor->run();
    CHECK(x.download().padding_of_o_is(0xff));
    executor->set_enabled("zero_padding", true);
    executor->run();
    CHECK(x.download().padding_of_o_is(0x00));
    x.overwrite(host);
    executor->set_enabled("zero_padding", false);
    executor->run();
    CHECK(x.download().padding_of_o_is(0xff));
    expect_error(ErrorCode::invalid_argument, {"optional node", "'kkt_solve'"},
                 [&] { executor->set_enabled("kkt_solve", false); });
  }
}

TEST_CASE("two executors on two streams at once")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = small_problem();
  const Capacity capacity{1024, 2};
  for (const Factory make : {make_eager_executor, make_graph_executor}) {
    DeviceExternals x(Externals(p, capacity, {1000, 24}, Distribution::random_decay, 1));
    DeviceExternals y(Externals(p, capacity, {3, 1021}, Distribution::random_decay, 2));
    const auto plan = [&] {
      return Plan(make_pipeline("residual", p, capacity, device_info(gpu)));
    };
    const auto first = built(make, plan(), x.bindings());
    const auto second = built(make, plan(), y.bindings());
    const TestStream one;
    const TestStream two;
    for (int i = 0; i < 20; ++i) {
      first->run(one);
      second->run(two);
    }
    check_against_oracle(x);
    check_against_oracle(y);
  }
}

TEST_CASE("a run allocates nothing, on the host or on the device")
{
  GDNFLOW_REQUIRE_GPU();
  const Externals host(full_problem(), {300, 3}, {100, 200});
  for (const Factory make : {make_eager_executor, make_graph_executor}) {
    DeviceExternals x(host);
    const auto executor = built(make, gpu_plan("residual", host), x.bindings());
    CAPTURE(executor->kind());
    const TestStream stream;
    std::size_t free_before = 0;
    std::size_t free_after = 0;
    std::size_t total = 0;
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cudaMemGetInfo(&free_before, &total) == cudaSuccess);
    const long before = allocations();
    for (int i = 0; i < 10; ++i) executor->run(stream);
    const long made = allocations() - before;
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cudaMemGetInfo(&free_after, &total) == cudaSuccess);
    CHECK(made == 0);
    CHECK(free_after == free_before);
  }
}

TEST_CASE("library steps between intermediates are captured in their place")
{
  GDNFLOW_REQUIRE_GPU();
  // clear -> shift -> out. Copies to and from external tensors are memsets here, which the graph
  // can rebind; library steps touch intermediates.
  const Registry registry({
      cuda_stage("clear", {f32_port("a", Direction::out)},
                 [](const StageCall& call, StepList& steps) {
                   steps.push_back({"clear", Memset{call["a"].data, 0x3f,
                                                    static_cast<std::size_t>(call["a"].bytes())}});
                 }),
      cuda_stage("copy", {f32_port("a", Direction::in), f32_port("b", Direction::out)},
                 [](const StageCall& call, StepList& steps) {
                   steps.push_back(copy_step(call["b"], call["a"]));
                   steps.push_back(copy_step(call["b"], call["a"]));
                 }),
      cuda_stage("half", {f32_port("b", Direction::in), f32_port("z", Direction::out)},
                 [](const StageCall& call, StepList& steps) {
                   const auto half = static_cast<std::size_t>(call["z"].bytes()) / 2;
                   steps.push_back({"first", Memset{call["z"].data, 0x00, half}});
                   steps.push_back({"second", Memset{call["z"].as<char>() + half, 0x40, half}});
                 }),
  });
  const auto plan = [&](PlanOptions options) {
    return Plan(PipelineBuilder("copies", registry, {}, {8, 1}, device_info(gpu))
                    .outputs({"z"})
                    .add("clear")
                    .add("copy")
                    .add("half")
                    .build(),
                options);
  };
  for (const Factory make : {make_eager_executor, make_graph_executor}) {
    const DeviceTensor z(DType::f32, {8});
    const DeviceTensor other(DType::f32, {8});
    const auto executor = built(make, plan({.reuse = false, .poison = true}), {{"z", z.view()}});
    CAPTURE(executor->kind());
    executor->run();
    const std::vector<float> expected = floats(z);
    CHECK(expected[0] == 0.0F);
    CHECK(expected[7] != 0.0F);
    std::vector<float> b(8);
    REQUIRE(cudaMemcpy(b.data(), executor->intermediate("b").data, 32, cudaMemcpyDeviceToHost) ==
            cudaSuccess);
    for (const float value : b) CHECK(value == doctest::Approx(0.7470588));  // bytes of 0x3f
    executor->bind({{"z", other.view()}});
    executor->run();
    CHECK(floats(other) == expected);
  }
}

TEST_CASE("a library step on an external tensor cannot be rebound in a graph, and says so")
{
  GDNFLOW_REQUIRE_GPU();
  const Registry registry(
      {cuda_stage("copy", {f32_port("x", Direction::in), f32_port("z", Direction::out)},
                  [](const StageCall& call, StepList& steps) {
                    steps.push_back({"clear", Memset{call["z"].data, 0x00, 4}});
                    steps.push_back(copy_step(call["z"], call["x"]));
                  })});
  const Plan plan(PipelineBuilder("copies", registry, {}, {4, 1}, device_info(gpu))
                      .inputs({"x"})
                      .outputs({"z"})
                      .add("copy")
                      .build());
  HostTensor numbers(DType::f32, {4});
  for (int i = 0; i < 4; ++i) numbers.as<float>()[i] = static_cast<float>(i + 1);
  const DeviceTensor x(numbers.view());
  const DeviceTensor z(DType::f32, {4});
  const DeviceTensor other(DType::f32, {4});
  const std::vector<float> expected{1, 2, 3, 4};
  const auto graph = built(make_graph_executor, plan, {{"x", x.view()}, {"z", z.view()}});
  expect_error(ErrorCode::unsupported, {"copies: copy, step copy", "rebound"}, [&] {
    graph->bind({{"z", other.view()}});
  });
  graph->run();
  CHECK(floats(z) == expected);
  const auto eager = built(make_eager_executor, plan, {{"x", x.view()}, {"z", z.view()}});
  eager->bind({{"z", other.view()}});
  eager->run();
  CHECK(floats(other) == expected);
}

TEST_CASE("the eager executor times its nodes, the graph executor says that it cannot")
{
  GDNFLOW_REQUIRE_GPU();
  const Externals host(small_problem(), {300, 3}, {100, 200});
  DeviceExternals x(host);
  const auto eager = built(make_eager_executor, gpu_plan("naive", host), x.bindings());
  const std::vector<NodeTime> times = eager->profile(5);
  CHECK(times.size() == 6);
  for (const NodeTime& time : times) CHECK(time.median_ms > 0);
  const auto graph = built(make_graph_executor, gpu_plan("naive", host), x.bindings());
  expect_error(ErrorCode::unsupported, {"timed"}, [&] { graph->profile(5); });
}

TEST_CASE("the core of a pipeline runs on an arena that holds the rest")
{
  GDNFLOW_REQUIRE_GPU();
  const Externals host(small_problem(), {300, 3}, {100, 200});
  for (const Factory make : {make_eager_executor, make_graph_executor}) {
    DeviceExternals x(host);
    const Plan plan = gpu_plan("residual", host, {.reuse = false});
    const DeviceTensor arena(DType::u8, {plan.arena_bytes()});
    const auto on_arena = [&](std::vector<std::string> nodes) {
      auto executor = make(plan, {arena.view().data, plan.arena_bytes(), std::move(nodes)});
      executor->bind(x.bindings());
      executor->build();
      return executor;
    };
    on_arena({})->run();
    const auto expected = x.bits();
    const auto core = on_arena({"residual_state", "chunk_output"});
    x.overwrite(host);
    core->run();
    CHECK(x.bits() == expected);
  }
}

TEST_CASE("the graph cache replays one graph for many batches")
{
  GDNFLOW_REQUIRE_GPU();
  GraphCache cache(2);
  const Problem p = small_problem();
  const Capacity capacity{256, 2};
  const GraphKey key{"residual", p, capacity, {}, gpu};
  DeviceExternals x(Externals(p, capacity, {256}, Distribution::random_decay, 1));
  DeviceExternals y(Externals(p, capacity, {1, 200}, Distribution::random_decay, 2));
  const auto first = cache.get(key, x.bindings());
  CHECK(first->kind() == "graph");
  first->run();
  check_against_oracle(x);
  const auto second = cache.get(key, y.bindings());
  CHECK(second == first);
  second->run();
  check_against_oracle(y);
  CHECK(cache.stats().hits == 1);
  CHECK(cache.stats().misses == 1);
}

TEST_CASE("one call on a stream, and inside a capture of the caller's")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = small_problem();
  const Externals host(p, {320, 3}, {64, 0, 250});
  DeviceExternals x(host);
  PrefillTensors t;
  t.q = x.view("q");
  t.k = x.view("k");
  t.v = x.view("v");
  t.g = x.view("g");
  t.beta = x.view("beta");
  t.cu_seqlens = x.view("cu_seqlens");
  t.initial_state = x.view("initial_state");
  t.final_state = x.view("final_state");
  t.o = x.view("o");
  for (const std::string& recipe : runnable(p, host.capacity())) {
    CAPTURE(recipe);
    const PrefillOptions options{.recipe = recipe};
    const std::int64_t bytes = prefill_workspace_bytes(p, host.capacity(), gpu, options);
    const DeviceTensor workspace(DType::u8, {bytes});
    const auto call = [&](cudaStream_t stream) {
      prefill(p, t, workspace.view().data, bytes, stream, options);
    };
    // The first call on a shape loads kernels, and may do so inside a capture.
    x.overwrite(host);
    const CallersGraph graph(call);
    graph.launch();
    check_against_oracle(x);
    const auto expected = x.bits();
    x.overwrite(host);
    const TestStream stream;
    call(stream);
    CHECK(x.bits() == expected);
  }
  TensorView on_host = t.k;
  on_host.device = {};
  t.k = on_host;
  const std::int64_t bytes = prefill_workspace_bytes(p, host.capacity(), gpu);
  const DeviceTensor workspace(DType::u8, {bytes});
  expect_error(ErrorCode::invalid_argument,
               {"prefill: k: expected bf16[320,2,128] cuda:0", "got bf16[320,2,128] host"},
               [&] { prefill(p, t, workspace.view().data, bytes); });
}
