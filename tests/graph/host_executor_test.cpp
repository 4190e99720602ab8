#include <gdnflow/compare.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>

#include "graph/tiny_stages.hpp"
#include "support/allocations.hpp"
#include "support/expect_error.hpp"
#include "support/externals.hpp"
#include "support/golden.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

// The recipes through the host executor against the fp64 oracle, and the executor's own rules.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

Problem small_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  p.qk_dim = 32;
  p.v_dim = 48;
  p.activation = DType::f32;
  return p;
}

Plan host_plan(std::string_view recipe, const Problem& problem, const Capacity& capacity,
               PlanOptions options = {}) {
  return Plan(make_pipeline(recipe, problem, capacity, device_info({})), options);
}

std::unique_ptr<Executor> built(std::string_view recipe, const Externals& externals,
                                PlanOptions options = {}) {
  auto executor =
      make_host_executor(host_plan(recipe, externals.problem(), externals.capacity(), options));
  executor->bind(externals.bindings());
  executor->build();
  return executor;
}

/// Output and states as the oracle has them, and rows that nobody owns as they were.
void check_against_oracle(const Externals& x, double most = 1e-5) {
  const OracleResult expected = oracle_recurrent(x.problem(), x.oracle_inputs());
  const std::span<const double> o = std::span(expected.o).first(x.owned_elements());
  const Comparison output = compare(x.owned_o(), o);
  CHECK_MESSAGE(output.within(most), "o: ", to_string(output, x.offsets()));
  if (x.problem().final_state) {
    const Comparison state = compare(x.tensors().at("final_state"), expected.final_state);
    CHECK_MESSAGE(state.within(most), "final_state: ", to_string(state));
  }
  CHECK(x.padding_of_o_is(x.problem().zero_padding ? 0x00 : 0xff));
}

std::vector<unsigned char> bytes_of(const HostTensor& tensor) {
  const auto* data = static_cast<const unsigned char*>(tensor.view().data);
  return {data, data + tensor.view().bytes()};
}

Bindings only(const Externals& x, std::initializer_list<std::string> names) {
  Bindings list;
  for (const std::string& name : names) list.emplace_back(name, x.tensors().at(name).view());
  return list;
}

constexpr std::array<std::string_view, 4> every_recipe{"naive", "residual", "fused", "recurrent"};

}  // namespace

TEST_CASE("every recipe gives the oracle's outputs and states")
{
  Problem p = small_problem();
  SUBCASE("as it is by default")
  {}
  SUBCASE("with an initial state, transposed states and 64-bit lengths")
  {
    p.initial_state = true;
    p.state_layout = StateLayout::vk;
    p.index = DType::i64;
  }
  SUBCASE("with raw gates, logits, norms and zeroed padding")
  {
    p.gate = GateForm::raw;
    p.beta = BetaForm::logit;
    p.qk_norm = true;
    p.zero_padding = true;
  }
  SUBCASE("with alpha, interleaved heads, a scale and no final state")
  {
    p.gate = GateForm::alpha;
    p.head_map = HeadMap::interleaved;
    p.scale = 0.5F;
    p.final_state = false;
  }
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    // One sequence less and some tokens fewer than there is room for.
    Externals x(p, {300, 5}, {0, 100, 1, 150});
    built(recipe, x)->run();
    check_against_oracle(x);
  }
}

TEST_CASE("the reference of another implementation is met")
{
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    const Golden golden = Golden::open("packed_gva");
    const OracleInputs& in = golden.inputs;
    // In bf16 the output would be rounded; numbers of bf16 are numbers of f32, so this is exact.
    Problem p = golden.problem;
    p.activation = DType::f32;
    const auto sequences = static_cast<std::int64_t>(in.cu_seqlens.size()) - 1;
    Externals x(p, {in.q.extents[0], sequences}, {in.q.extents[0]});
    for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
      std::vector<float> values(static_cast<std::size_t>(view.elements()));
      host::load(view, 0, view.elements(), values.data());
      std::memcpy(x[name].view().data, values.data(), values.size() * sizeof(float));
    }
    for (const auto& [name, view] : {std::pair{"g", in.g},
                                     {"beta", in.beta},
                                     {"initial_state", in.initial_state},
                                     {"cu_seqlens", golden.file.find("cu_seqlens")}}) {
      REQUIRE(view.bytes() == x[name].view().bytes());
      std::memcpy(x[name].view().data, view.data, static_cast<std::size_t>(view.bytes()));
    }
    built(recipe, x)->run();
    const Comparison o = compare(x["o"], golden.o());
    CHECK_MESSAGE(o.within(1e-5), "o: ", to_string(o));
    const Comparison state = compare(x["final_state"], golden.final_state());
    CHECK_MESSAGE(state.within(1e-5), "final_state: ", to_string(state));
  }
}

TEST_CASE("dense sequences need no lengths")
{
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    Problem p = small_problem();
    p.cu_seqlens = false;
    Externals x(p, {3 * 70, 3}, {70, 70, 70});
    built(recipe, x)->run();
    check_against_oracle(x);
  }
}

TEST_CASE("one built executor serves any lengths within its capacity")
{
  Problem p = small_problem();
  p.initial_state = true;
  const Capacity capacity{320, 4};
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    Externals first(p, capacity, {320}, Distribution::random_decay, 1);
    const auto executor = built(recipe, first, {.poison = true});
    executor->run();
    check_against_oracle(first);
    for (const std::vector<std::int64_t>& lengths :
         {std::vector<std::int64_t>{0, 0, 0, 0}, {1, 0, 63, 256}, {65, 65, 65}, {0, 129}}) {
      CAPTURE(lengths.size());
      Externals next(p, capacity, lengths, Distribution::mixed, 2);
      executor->bind(next.bindings());
      executor->run();
      check_against_oracle(next);
    }
  }
}

TEST_CASE("no tokens at all: the final states are the initial ones")
{
  Problem p = small_problem();
  p.initial_state = true;
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    Externals x(p, {0, 2}, {0, 0});
    built(recipe, x)->run();
    CHECK(bytes_of(x["final_state"]) == bytes_of(x["initial_state"]));
  }
}

TEST_CASE("reuse of memory and poison change no bit")
{
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    Externals x(small_problem(), {200, 2}, {130, 60});
    built(recipe, x, {.reuse = false})->run();
    const auto o = bytes_of(x["o"]);
    const auto state = bytes_of(x["final_state"]);
    for (const bool poison : {false, true}) {
      Externals y(small_problem(), {200, 2}, {130, 60});
      const auto executor = built(recipe, y, {.reuse = true, .poison = poison});
      executor->run();
      executor->run();
      CHECK(bytes_of(y["o"]) == o);
      CHECK(bytes_of(y["final_state"]) == state);
    }
  }
}

TEST_CASE("edges that are not named again keep their memory")
{
  Externals x(small_problem(), {100, 1}, {100});
  const auto executor = built("residual", x);
  executor->run();
  Externals y(small_problem(), {100, 1}, {100}, Distribution::random_decay, 2);
  executor->bind(only(y, {"q", "o"}));
  executor->run();
  Externals mixed(small_problem(), {100, 1}, {100});
  mixed["q"] = y["q"];
  mixed["o"] = y["o"];
  mixed["final_state"] = x["final_state"];
  check_against_oracle(mixed);
}

TEST_CASE("part of a pipeline runs on an arena that holds the rest")
{
  Externals x(small_problem(), {150, 2}, {100, 50});
  const Plan plan = host_plan("naive", small_problem(), x.capacity(), {.reuse = false});
  std::vector<std::byte> memory(static_cast<std::size_t>(plan.arena_bytes() + Plan::alignment));
  void* arena = memory.data();
  std::size_t space = memory.size();
  REQUIRE(std::align(Plan::alignment, static_cast<std::size_t>(plan.arena_bytes()), arena, space));
  const auto make = [&](std::vector<std::string> nodes) {
    auto executor = make_host_executor(plan, {arena, plan.arena_bytes(), std::move(nodes)});
    executor->bind(x.bindings());
    executor->build();
    return executor;
  };
  make({})->run();
  const auto expected = bytes_of(x["o"]);
  std::memset(x["o"].view().data, 0, static_cast<std::size_t>(x["o"].view().bytes()));
  const auto core = make({"wu", "chunk_state", "chunk_output"});
  core->run();
  CHECK(bytes_of(x["o"]) == expected);
  CHECK(core->profile(1).size() == 3);
}

TEST_CASE("part of a pipeline without what it takes is refused")
{
  const auto make = [](PlanOptions options, std::vector<std::string> nodes, bool with_arena) {
    alignas(256) static std::byte arena[1 << 20];
    const Plan plan = host_plan("residual", small_problem(), {16, 1}, options);
    REQUIRE(plan.arena_bytes() <= static_cast<std::int64_t>(sizeof arena));
    ExecutorOptions o;
    if (with_arena) {
      o.arena = arena;
      o.arena_bytes = sizeof arena;
    }
    o.nodes = std::move(nodes);
    make_host_executor(plan, o);
  };
  const PlanOptions apart{.reuse = false};
  CHECK_NOTHROW(make(apart, {"kkt_solve"}, true));
  expect_error(ErrorCode::invalid_argument, {"nodes", "arena"},
               [&] { make(apart, {"kkt_solve"}, false); });
  expect_error(ErrorCode::invalid_argument, {"nodes", "without reuse"},
               [&] { make({}, {"kkt_solve"}, true); });
  expect_error(ErrorCode::invalid_argument, {"nodes", "without poison"},
               [&] { make({.reuse = false, .poison = true}, {"kkt_solve"}, true); });
  expect_error(ErrorCode::invalid_argument, {"node", "kkt_solve", "'solve'"},
               [&] { make(apart, {"solve"}, true); });
}

TEST_CASE("an arena of the caller's must be large enough and aligned")
{
  const Plan plan = host_plan("residual", small_problem(), {16, 1});
  alignas(256) static std::byte arena[256];
  expect_error(ErrorCode::invalid_argument, {"arena", "bytes", "got 256"}, [&] {
    make_host_executor(plan, {arena, 256, {}});
  });
  expect_error(ErrorCode::invalid_argument, {"arena", "aligned to 256"}, [&] {
    make_host_executor(plan, {arena + 1, plan.arena_bytes(), {}});
  });
}

TEST_CASE("a tensor that does not fit is refused and changes nothing")
{
  Externals x(small_problem(), {100, 1}, {100});
  const auto executor = built("residual", x);
  const auto refused = [&](const std::string& name, const TensorView& view,
                           std::initializer_list<std::string_view> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] {
      // The one that fits comes first: it must not stay bound either.
      static Externals other(small_problem(), {100, 1}, {100}, Distribution::random_decay, 9);
      executor->bind({{"v", other["v"].view()}, {name, view}});
    });
  };
  TensorView q = x["q"];
  q.extents[0] = 99;
  refused("q", q, {"residual: q", "expected f32[100,2,32] host", "got f32[99,2,32] host"});
  q = x["q"];
  q.dtype = DType::bf16;
  refused("q", q, {"expected f32[100,2,32]", "got bf16[100,2,32]"});
  q = x["q"];
  q.rank = 2;
  refused("q", q, {"expected f32[100,2,32]", "got f32[100,2] strides [64,32]"});
  q.rank = 7;
  refused("q", q, {"expected f32[100,2,32]", "rank 7"});
  q = x["q"];
  q.device = {DeviceType::cuda, 0};
  refused("q", q, {"expected f32[100,2,32] host", "cuda:0"});
  q = x["q"];
  q.data = nullptr;
  refused("q", q, {"expected f32[100,2,32]", "null pointer"});
  q = x["q"];
  q.strides[2] = 2;
  refused("q", q, {"q", "contiguous last dimension", "strides [64,32,2]"});
  TensorView o = x["o"];
  o.strides[0] = 0;
  refused("o", o, {"o", "rows of their own", "strides [0,"});
  refused("qq", x["q"], {"expected one of [", "q, k, v", "'qq'"});
  refused("v", x["v"], {"v", "once", "twice"});
  executor->run();
  check_against_oracle(x);
}

TEST_CASE("strides of tokens and heads are free")
{
  const Problem p = small_problem();
  Externals x(p, {100, 1}, {100});
  // q and k in one tensor of twice the heads, as a fused projection leaves them.
  HostTensor fused(DType::f32, {100, 2 * p.qk_heads, p.qk_dim});
  Bindings bindings = x.bindings();
  for (const auto& [name, first_head] : {std::pair{"q", 0}, {"k", p.qk_heads}}) {
    TensorView view = x[name];
    view.data = fused.as<float>() + std::int64_t{first_head} * p.qk_dim;
    view.strides[0] = 2 * std::int64_t{p.qk_heads} * p.qk_dim;
    for (std::int64_t t = 0; t < 100; ++t) {
      const std::int64_t row = std::int64_t{p.qk_heads} * p.qk_dim;
      std::memcpy(view.as<float>() + t * view.strides[0], x[name].as<float>() + t * row,
                  static_cast<std::size_t>(row) * sizeof(float));
    }
    for (auto& [edge, tensor] : bindings) {
      if (edge == name) tensor = view;
    }
  }
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    const auto executor = make_host_executor(host_plan(recipe, p, x.capacity()));
    executor->bind(bindings);
    executor->build();
    executor->run();
    check_against_oracle(x);
  }
}

TEST_CASE("as many states as sequences, unless indices point into a pool")
{
  Problem p = small_problem();
  p.initial_state = true;
  Externals x(p, {64, 2}, {32, 32});
  const auto executor = make_host_executor(host_plan("residual", p, x.capacity()));
  const HostTensor one(DType::f32, {1, 4, 32, 48});
  expect_error(ErrorCode::invalid_argument,
               {"initial_state", "expected f32[2,4,32,48]", "got f32[1,4,32,48]"}, [&] {
                 executor->bind({{"initial_state", one.view()}});
               });

  p.state_indices = true;
  Externals pooled(p, {64, 2}, {32, 32});
  HostTensor pool(DType::f32, {7, 4, 32, 48});
  const std::size_t slot = 4 * 32 * 48 * sizeof(float);
  std::memcpy(pool.as<char>() + 5 * slot, pooled["initial_state"].as<char>(), slot);
  std::memcpy(pool.as<char>() + 2 * slot, pooled["initial_state"].as<char>() + slot, slot);
  HostTensor indices(DType::i32, {2});
  indices.as<std::int32_t>()[0] = 5;
  indices.as<std::int32_t>()[1] = 2;
  for (const std::string_view recipe : every_recipe) {
    CAPTURE(recipe);
    HostTensor states = pool;  // read and written in place
    Bindings bindings = pooled.bindings();
    for (auto& [name, tensor] : bindings) {
      if (name == "initial_state" || name == "final_state") tensor = states;
    }
    bindings.emplace_back("state_indices", indices.view());
    const auto in_place = make_host_executor(host_plan(recipe, p, pooled.capacity()));
    in_place->bind(bindings);
    in_place->build();
    in_place->run();
    std::memcpy(pooled["final_state"].as<char>(), states.as<char>() + 5 * slot, slot);
    std::memcpy(pooled["final_state"].as<char>() + slot, states.as<char>() + 2 * slot, slot);
    check_against_oracle(pooled);
    for (const int untouched : {0, 1, 3, 4, 6}) {
      CHECK(std::memcmp(states.as<char>() + untouched * slot, pool.as<char>() + untouched * slot,
                        slot) == 0);
    }
  }
}

TEST_CASE("one free symbol of a node means one number")
{
  const Registry registry(
      {tiny_stage("take", {reads("x", {"M"}), reads("y", {"M+1"}), writes("z", {"T"})})});
  const Pipeline pipeline = PipelineBuilder("p", registry, {}, {4, 1}, plain_host())
                                .inputs({"x", "y"})
                                .outputs({"z"})
                                .add("take")
                                .build();
  const auto executor = make_host_executor(Plan(pipeline));
  const HostTensor z(DType::f32, {4});
  const HostTensor five(DType::f32, {5});
  const HostTensor six(DType::f32, {6});
  executor->bind({{"x", five.view()}, {"y", six.view()}, {"z", z.view()}});
  executor->build();
  expect_error(ErrorCode::invalid_argument, {"y", "M+1 = 7", "as in x", "got f32[6]"}, [&] {
    executor->bind({{"x", six.view()}});
  });
}

TEST_CASE("what is missing or too early is said")
{
  Externals x(small_problem(), {100, 1}, {100});
  const auto executor = make_host_executor(host_plan("residual", small_problem(), x.capacity()));
  expect_error(ErrorCode::invalid_argument, {"residual", "build()"}, [&] { executor->run(); });
  expect_error(ErrorCode::invalid_argument, {"build()"}, [&] { executor->profile(1); });
  expect_error(ErrorCode::invalid_argument, {"A", "built"}, [&] { executor->intermediate("A"); });
  Bindings bindings = x.bindings();
  std::erase_if(bindings, [](const auto& b) { return b.first == "beta" || b.first == "o"; });
  executor->bind(bindings);
  expect_error(ErrorCode::invalid_pipeline, {"bound", "beta f32[100,4]", "o f32[100,4,48]"},
               [&] { executor->build(); });
  executor->bind(only(x, {"beta", "o"}));
  executor->build();
  executor->run();
  check_against_oracle(x);
  expect_error(ErrorCode::invalid_argument, {"intermediate", "A", "'B'"},
               [&] { executor->intermediate("B"); });
  expect_error(ErrorCode::invalid_argument, {"repeats", "got 0"}, [&] { executor->profile(0); });
}

TEST_CASE("intermediates can be read after a run without reuse")
{
  Externals x(small_problem(), {100, 1}, {100});
  const auto executor = built("residual", x, {.reuse = false, .poison = true});
  executor->run();
  const TensorView a = executor->intermediate("A");
  REQUIRE(to_string(a) == "f32[100,4,64] host");
  // The diagonal of a unit lower triangular inverse.
  for (std::int64_t t = 0; t < 100; ++t) CHECK(a.as<float>()[t * a.strides[0] + t % 64] == 1.0F);
}

TEST_CASE("an optional node is switched off and on")
{
  Problem p = small_problem();
  p.zero_padding = true;
  Externals x(p, {100, 1}, {60});
  const auto executor = built("residual", x);
  executor->set_enabled("zero_padding", false);
  executor->run();
  CHECK(x.padding_of_o_is(0xff));
  executor->set_enabled("zero_padding", true);
  executor->run();
  CHECK(x.padding_of_o_is(0x00));
  check_against_oracle(x);
  for (const char* name : {"chunk_output", "nothing"}) {
    expect_error(ErrorCode::invalid_argument, {"optional node", "[zero_padding]", name},
                 [&] { executor->set_enabled(name, false); });
  }
}

TEST_CASE("a profile names every node that runs")
{
  Externals x(small_problem(), {100, 1}, {100});
  const auto executor = built("fused", x);
  std::vector<std::string> names;
  for (const NodeTime& time : executor->profile(3)) {
    names.push_back(time.node);
    CHECK(time.median_ms >= 0);
  }
  CHECK(names ==
        std::vector<std::string>{"chunk_index", "chunk_cumsum", "kkt_solve", "fused_prefill"});
}

TEST_CASE("a run allocates nothing, nor does a rebinding of shapes seen before")
{
  const Registry registry({tiny_stage("a", {reads("x"), writes("y")}),
                           tiny_stage("b", {reads("y"), reads("x"), writes("z")})});
  const auto executor =
      make_host_executor(Plan(PipelineBuilder("p", registry, {}, {4, 1}, plain_host())
                                  .inputs({"x"})
                                  .outputs({"z"})
                                  .add("a")
                                  .add("b")
                                  .build(),
                              {.poison = true}));
  const HostTensor first(DType::f32, {4});
  const HostTensor second(DType::f32, {4});
  const Bindings one{{"x", first.view()}, {"z", first.view()}};
  const Bindings other{{"x", second.view()}, {"z", second.view()}};
  executor->bind(one);
  executor->build();
  executor->bind(other);
  executor->bind(one);
  const long before = allocations();
  executor->run();
  executor->run();
  executor->bind(other);
  executor->run();
  const long made = allocations() - before;
  CHECK(made == 0);
  CHECK(before > 0);  // the counter counts
}

TEST_CASE("executors of the wrong kind are refused")
{
  CHECK(make_executor(host_plan("residual", small_problem(), {16, 1}))->kind() == "host");
  const Plan plan = host_plan("residual", small_problem(), {16, 1});
  if (built_with_cuda()) {
    expect_error(ErrorCode::invalid_argument, {"eager executor", "plan for cuda", "host"},
                 [&] { make_eager_executor(plan); });
    expect_error(ErrorCode::invalid_argument, {"graph executor", "plan for cuda", "host"},
                 [&] { make_graph_executor(plan); });
  } else {
    expect_error(ErrorCode::unsupported, {"eager executor", "no CUDA"},
                 [&] { make_eager_executor(plan); });
    expect_error(ErrorCode::unsupported, {"graph executor", "no CUDA"},
                 [&] { make_graph_executor(plan); });
  }
}

TEST_CASE("what a variant does not accept is refused when it is bound")
{
  Stage stage = tiny_stage("copy", {reads("x"), writes("z")});
  stage.variants[0].accepts = [](const StageCall& call) {
    return call["x"].data == call["z"].data ? Support::no("x and z must differ") : Support::yes();
  };
  const Registry registry({stage});
  const auto executor =
      make_host_executor(Plan(PipelineBuilder("p", registry, {}, {4, 1}, plain_host())
                                  .inputs({"x"})
                                  .outputs({"z"})
                                  .add("copy")
                                  .build()));
  const HostTensor x(DType::f32, {4});
  const HostTensor z(DType::f32, {4});
  executor->bind({{"x", x.view()}, {"z", z.view()}});
  executor->build();
  expect_error(ErrorCode::unsupported, {"p: copy [host]", "x and z must differ"}, [&] {
    executor->bind({{"z", x.view()}});
  });
}

TEST_CASE("tensors may have fewer rows than the capacity where the executor is made for it")
{
  Problem p = small_problem();
  p.initial_state = true;
  p.zero_padding = true;
  p.gate = GateForm::raw;
  p.qk_norm = true;
  const Capacity capacity{300, 9};
  for (const std::string recipe : {"naive", "residual", "fused", "recurrent"}) {
    CAPTURE(recipe);
    const Plan plan(make_pipeline(recipe, p, capacity, device_info({})));
    const auto executor = make_host_executor(plan, {.fewer_rows = true});
    Externals x(p, {120, 3}, {70, 0, 40});
    executor->bind(x.bindings());
    executor->build();
    executor->run();
    const auto check = [&](const Externals& got) {
      const OracleResult expected = oracle_recurrent(p, got.oracle_inputs());
      CHECK(compare(got.owned_o(), std::span(expected.o).first(got.owned_elements())).within(1e-5));
      CHECK(compare(got.tensors().at("final_state"), expected.final_state).within(1e-5));
      CHECK(got.padding_of_o_is(0x00));
    };
    check(x);
    // Other numbers, more and less, and the capacity's own.
    std::vector<Externals> others;
    for (const Capacity& rows : {Capacity{300, 9}, Capacity{64, 1}, Capacity{299, 4}}) {
      const Externals& y = others.emplace_back(p, rows, std::vector<std::int64_t>{64},
                                               Distribution::random_decay, 3);
      executor->bind(y.bindings());
      executor->run();
      check(y);
    }
    // A refusal leaves the numbers as they were.
    Externals y(p, {120, 3}, {1, 2, 3});
    expect_error(ErrorCode::invalid_argument, {"k: expected 120 rows to go with q, got f32[299,"},
                 [&] {
                   executor->bind({{"q", y.tensors().at("q").view()}});
                 });
    expect_error(ErrorCode::invalid_argument, {"state: expected", "rows to go with"}, [&] {
      executor->bind({{"initial_state", y.tensors().at("initial_state").view()}});
    });
    Externals larger(p, {301, 9}, {1});
    expect_error(ErrorCode::invalid_argument, {"expected f32[300,", "or fewer rows, got f32[301,"},
                 [&] { executor->bind(larger.bindings()); });
    executor->run();
    check(others.back());
  }
  Problem dense = small_problem();
  dense.cu_seqlens = false;
  expect_error(ErrorCode::invalid_argument, {"expected a problem with cu_seqlens"}, [&] {
    make_host_executor(Plan(make_pipeline("naive", dense, {64, 1}, device_info({}))),
                       {.fewer_rows = true});
  });
}
