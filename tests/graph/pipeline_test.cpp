#include <gdnflow/error.hpp>
#include <gdnflow/pipeline.hpp>

#include "graph/tiny_stages.hpp"
#include "support/expect_error.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

// What PipelineBuilder accepts, refuses and concludes.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

Problem small_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  return p;
}

/// A builder over stages made for one test; it keeps the registry alive.
struct Bench {
  Registry registry;
  Problem problem = small_problem();
  Capacity capacity{8, 2};

  explicit Bench(std::vector<Stage> stages) : registry(std::move(stages)) {}

  PipelineBuilder builder(std::string id = "p") const {
    return PipelineBuilder(std::move(id), registry, problem, capacity, plain_host());
  }
};

std::vector<std::string> order_of(const Pipeline& pipeline) {
  std::vector<std::string> names;
  for (const int n : pipeline.order()) names.push_back(pipeline.nodes()[n].name);
  return names;
}

const Edge& edge(const Pipeline& pipeline, std::string_view name) {
  REQUIRE(pipeline.edge_index(name) >= 0);
  return pipeline.edges()[pipeline.edge_index(name)];
}

StageUse named(std::string name, std::map<std::string, std::string> connect = {}) {
  StageUse use;
  use.name = std::move(name);
  use.connect = std::move(connect);
  return use;
}

}  // namespace

TEST_CASE("stages join by the names of their ports, in whatever order they are added")
{
  const Bench bench({tiny_stage("make", {reads("x"), writes("y")}),
                     tiny_stage("take", {reads("y"), writes("z")})});
  const Pipeline p = bench.builder().inputs({"x"}).outputs({"z"}).add("take").add("make").build();
  CHECK(order_of(p) == std::vector<std::string>{"make", "take"});
  CHECK(edge(p, "x").kind == EdgeKind::input);
  CHECK(edge(p, "y").kind == EdgeKind::intermediate);
  CHECK(edge(p, "z").kind == EdgeKind::output);
  CHECK(edge(p, "y").writer == p.node_index("make"));
  CHECK(edge(p, "y").readers == std::vector<int>{p.node_index("take")});
  CHECK(p.nodes()[p.node_index("take")].predecessors == std::vector<int>{p.node_index("make")});
  CHECK(p.edge_index("nothing") == -1);
  CHECK(p.node_index("nothing") == -1);
}

TEST_CASE("connect renames, and one stage may stand twice under two names")
{
  const Bench bench({tiny_stage("step", {reads("in"), writes("out")})});
  const Pipeline p = bench.builder()
                         .inputs({"x"})
                         .outputs({"z"})
                         .add("step", named("first", {{"in", "x"}, {"out", "y"}}))
                         .add("step", named("second", {{"in", "y"}, {"out", "z"}}))
                         .build();
  CHECK(order_of(p) == std::vector<std::string>{"first", "second"});
  CHECK(edge(p, "z").writer == p.node_index("second"));
}

TEST_CASE("changes in place stand behind the writer and before every reader, in the order added")
{
  const Bench bench({tiny_stage("make", {writes("y")}), tiny_stage("change", {changes("y")}),
                     tiny_stage("take", {reads("y"), writes("z")})});
  const Pipeline p = bench.builder()
                         .outputs({"z"})
                         .add("take")
                         .add("change", named("one"))
                         .add("change", named("two"))
                         .add("make")
                         .build();
  CHECK(order_of(p) == std::vector<std::string>{"make", "one", "two", "take"});
  CHECK(edge(p, "y").modifiers == std::vector<int>{p.node_index("one"), p.node_index("two")});
  CHECK(p.nodes()[p.node_index("take")].predecessors == std::vector<int>{p.node_index("two")});
}

TEST_CASE("an input may be changed in place")
{
  const Bench bench(
      {tiny_stage("take", {reads("x"), writes("z")}), tiny_stage("change", {changes("x")})});
  const Pipeline p = bench.builder().inputs({"x"}).outputs({"z"}).add("take").add("change").build();
  CHECK(order_of(p) == std::vector<std::string>{"change", "take"});
}

TEST_CASE("an optional port joins an edge that is there, and none otherwise")
{
  const Bench bench({tiny_stage("make", {writes("y"), optionally(writes("extra"))}),
                     tiny_stage("take", {optionally(reads("x")), optionally(reads("y")),
                                         optionally(reads("nobody")), writes("z")})});
  const auto connected = [](const Pipeline& p, std::string_view node, std::string_view port) {
    const Node& n = p.nodes()[p.node_index(node)];
    return n.edges[n.stage.port_index(port)] >= 0;
  };
  const Pipeline p = bench.builder().inputs({"x"}).outputs({"z"}).add("make").add("take").build();
  CHECK(connected(p, "take", "x"));
  CHECK(connected(p, "take", "y"));
  CHECK_FALSE(connected(p, "take", "nobody"));
  CHECK_FALSE(connected(p, "make", "extra"));

  const Pipeline q = bench.builder()
                         .outputs({"z", "extra"})
                         .add("make")
                         .add("take", named("", {{"y", ""}}))
                         .build();
  CHECK(connected(q, "make", "extra"));
  CHECK_FALSE(connected(q, "take", "y"));
}

TEST_CASE("a name that is not known is refused with those that are")
{
  const Bench bench({tiny_stage("make", {writes("y")})});
  expect_error(ErrorCode::invalid_pipeline, {"pipeline p", "'mkae'", "registry"},
               [&] { bench.builder().outputs({"y"}).add("mkae").build(); });
  expect_error(ErrorCode::invalid_pipeline, {"make", "no port 'why'", "[y]"}, [&] {
    bench.builder().outputs({"y"}).add("make", named("", {{"why", "y"}})).build();
  });
  expect_error(ErrorCode::invalid_pipeline, {"two nodes", "'make'"},
               [&] { bench.builder().outputs({"y"}).add("make").add("make").build(); });
  expect_error(ErrorCode::invalid_pipeline, {"no stages"}, [&] { bench.builder().build(); });
}

TEST_CASE("external names stand once and are used")
{
  const Bench bench({tiny_stage("copy", {reads("x"), writes("y")})});
  const auto build = [&](std::vector<std::string> in, std::vector<std::string> out) {
    bench.builder().inputs(std::move(in)).outputs(std::move(out)).add("copy").build();
  };
  expect_error(ErrorCode::invalid_pipeline, {"input 'x'", "once"}, [&] {
    build({"x", "x"}, {"y"});
  });
  expect_error(ErrorCode::invalid_pipeline, {"output 'x'", "once"}, [&] {
    build({"x"}, {"y", "x"});
  });
  expect_error(ErrorCode::invalid_pipeline, {"input 'w'", "no stage has a port"}, [&] {
    build({"x", "w"}, {"y"});
  });
  expect_error(ErrorCode::invalid_pipeline, {"output 'z'", "no stage writes"}, [&] {
    build({"x"}, {"y", "z"});
  });
  expect_error(ErrorCode::invalid_pipeline, {"has no name"}, [&] { build({"x", ""}, {"y"}); });
}

TEST_CASE("an edge has one writer")
{
  const Bench bench({tiny_stage("a", {writes("y")}), tiny_stage("b", {writes("y")}),
                     tiny_stage("c", {reads("missing"), writes("z")})});
  expect_error(ErrorCode::invalid_pipeline, {"edge 'y'", "one writer", "a", "b.y"},
               [&] { bench.builder().outputs({"y"}).add("a").add("b").build(); });
  expect_error(ErrorCode::invalid_pipeline, {"edge 'y'", "an input", "no writer", "a"},
               [&] { bench.builder().inputs({"y"}).add("a").build(); });
  expect_error(ErrorCode::invalid_pipeline, {"c.missing", "edge 'missing'", "no writer"},
               [&] { bench.builder().outputs({"z"}).add("c").build(); });
  expect_error(ErrorCode::invalid_pipeline, {"a.y", "required port"}, [&] {
    bench.builder().add("a", named("", {{"y", ""}})).build();
  });
}

TEST_CASE("an output that stages only change has no writer")
{
  const Bench bench({tiny_stage("change", {changes("y")})});
  expect_error(ErrorCode::invalid_pipeline, {"output 'y'", "no stage writes"},
               [&] { bench.builder().outputs({"y"}).add("change").build(); });
  expect_error(ErrorCode::invalid_pipeline, {"change.y", "no writer"},
               [&] { bench.builder().add("change").build(); });
}

TEST_CASE("types match between writer and reader")
{
  const Bench bench({tiny_stage("make", {writes("y", {"T"}, TypeRule::i32)}),
                     tiny_stage("take", {reads("y", {"T"}, TypeRule::f32), writes("z")})});
  expect_error(ErrorCode::invalid_pipeline,
               {"take.y", "expected f32", "got i32", "edge 'y'", "make.y"},
               [&] { bench.builder().outputs({"z"}).add("make").add("take").build(); });
}

TEST_CASE("a host variant reads any floating type where a port takes activations or working values")
{
  for (const TypeRule rule : {TypeRule::activation, TypeRule::working}) {
    const Bench bench({tiny_stage("make", {writes("y", {"T"}, TypeRule::f32)}),
                       tiny_stage("take", {reads("y", {"T"}, rule), writes("z")})});
    CHECK_NOTHROW(bench.builder().outputs({"z"}).add("make").add("take").build());
  }
  const Bench integers(
      {tiny_stage("make", {writes("y", {"T"}, TypeRule::i32)}),
       tiny_stage("take", {reads("y", {"T"}, TypeRule::activation), writes("z")})});
  expect_error(ErrorCode::invalid_pipeline, {"take.y", "expected bf16", "got i32"},
               [&] { integers.builder().outputs({"z"}).add("make").add("take").build(); });
  // A tensor changed in place is written too, so its type must be the one that is there.
  const Bench in_place({tiny_stage("make", {writes("y", {"T"}, TypeRule::f32)}),
                        tiny_stage("change", {changes("y", {"T"}, TypeRule::activation)})});
  expect_error(ErrorCode::invalid_pipeline, {"change.y", "expected bf16", "got f32"},
               [&] { in_place.builder().outputs({"y"}).add("make").add("change").build(); });
}

TEST_CASE("extents are compared by value")
{
  const auto bench = [](std::vector<Extent> made, std::vector<Extent> taken) {
    return Bench({tiny_stage("make", {writes("y", std::move(made))}),
                  tiny_stage("take", {reads("y", std::move(taken)), writes("z")})});
  };
  const auto build = [](const Bench& b) {
    b.builder().outputs({"z"}).add("make").add("take").build();
  };
  CHECK_NOTHROW(build(bench({"T", "C"}, {8, 64})));
  expect_error(ErrorCode::invalid_pipeline,
               {"take.y", "expected [8,4]", "got [8,2]", "edge 'y'", "make.y"}, [&] {
                 build(bench({"T", "Hqk"}, {"T", "Hv"}));
               });
  expect_error(ErrorCode::invalid_pipeline, {"take.y", "expected [8]", "got [8,2]"}, [&] {
    build(bench({"T", "Hqk"}, {"T"}));
  });
}

TEST_CASE("a free extent may stand on external tensors only, and takes a value that a user demands")
{
  const Bench bench({tiny_stage("make", {reads("x", {"M"}), writes("y", {"M"})}),
                     tiny_stage("take", {reads("y", {"M"}), writes("z")}),
                     tiny_stage("demand", {reads("x", {"N+1"}), writes("w")})});
  expect_error(ErrorCode::invalid_pipeline, {"make.y", "edge 'y'", "extent M"}, [&] {
    bench.builder().inputs({"x"}).outputs({"z"}).add("make").add("take").build();
  });
  const Pipeline p =
      bench.builder().inputs({"x"}).outputs({"y", "w"}).add("make").add("demand").build();
  CHECK(edge(p, "x").extents == std::vector<Extent>{"N+1"});
  CHECK(edge(p, "y").extents == std::vector<Extent>{"M"});
}

TEST_CASE("a cycle is refused with the nodes on it")
{
  const Bench bench(
      {tiny_stage("free", {writes("x")}), tiny_stage("a", {reads("x"), reads("r"), writes("p")}),
       tiny_stage("b", {reads("p"), writes("q")}), tiny_stage("c", {reads("q"), writes("r")}),
       tiny_stage("behind", {reads("r"), writes("z")})});
  const auto build = [&] {
    bench.builder().outputs({"z"}).add("behind").add("free").add("a").add("b").add("c").build();
  };
  expect_error(ErrorCode::invalid_pipeline, {"cycle: ", "a -> b", "b -> c", "c -> a"}, [&] {
    try {
      build();
    } catch (const Error& error) {
      const std::string text = error.what();
      CHECK(text.find("free") == std::string::npos);
      CHECK(text.find("behind") == std::string::npos);
      // Whichever node the walk enters at, the round is printed whole.
      std::string round = text.substr(text.find("cycle: ") + 7);
      throw Error(error.code(), text + " -> " + round);
    }
  });
}

TEST_CASE("a node that reads what it writes or changes is a cycle by itself")
{
  const Bench bench({tiny_stage("loop", {reads("y"), writes("y2")}),
                     tiny_stage("both", {reads("x"), changes("y")})});
  expect_error(ErrorCode::invalid_pipeline, {"cycle: loop -> loop"}, [&] {
    bench.builder().outputs({"y"}).add("loop", named("", {{"y2", "y"}})).build();
  });
  expect_error(ErrorCode::invalid_pipeline, {"cycle: both -> both"}, [&] {
    bench.builder().inputs({"y"}).add("both", named("", {{"x", "y"}})).build();
  });
}

TEST_CASE("a node that can be switched off changes tensors in place only")
{
  const Bench bench({tiny_stage("make", {writes("y")}), tiny_stage("change", {changes("y")})});
  StageUse optional;
  optional.optional = true;
  const Pipeline p = bench.builder().outputs({"y"}).add("make").add("change", optional).build();
  CHECK(p.nodes()[p.node_index("change")].optional);
  expect_error(ErrorCode::invalid_pipeline, {"make.y", "switched off"},
               [&] { bench.builder().outputs({"y"}).add("make", optional).build(); });
}

TEST_CASE("the first variant of the list that can serve is taken")
{
  Stage stage = tiny_stage("make", {writes("y")});
  Variant picky = idle_variant("picky");
  picky.supports = [](const VariantQuery& query) {
    return query.problem.qk_dim == 64 ? Support::yes() : Support::no("takes d_k = 64 only");
  };
  stage.variants = {idle_variant("gpu", DeviceType::cuda), picky, idle_variant("plain")};
  Bench bench({stage});
  const auto chosen = [&] {
    return bench.builder().outputs({"y"}).add("make").build().nodes()[0].chosen().id;
  };
  CHECK(chosen() == "plain");
  bench.problem.qk_dim = 64;
  CHECK(chosen() == "picky");
}

TEST_CASE("where no variant can serve, each one says why")
{
  Stage stage = tiny_stage("make", {writes("y")});
  Variant picky = idle_variant("picky");
  picky.supports = [](const VariantQuery&) { return Support::no("takes d_k = 64 only"); };
  stage.variants = {idle_variant("gpu", DeviceType::cuda), picky};
  const Bench bench({stage});
  expect_error(ErrorCode::unsupported,
               {"pipeline p: make", "gpu: runs on cuda", "picky: takes d_k = 64 only"},
               [&] { bench.builder().outputs({"y"}).add("make").build(); });
}

TEST_CASE("a chosen variant is taken, or refused with its reason")
{
  Stage stage = tiny_stage("make", {writes("y")});
  Variant tiled = idle_variant("tiled");
  tiled.options = {{"tile", "columns of a tile", 64, {64, 128}}};
  stage.variants = {idle_variant("plain"), tiled, idle_variant("gpu", DeviceType::cuda)};
  const Bench bench({stage});
  const auto build = [&](const char* choice) {
    StageUse use;
    use.variant = parse_variant_choice(choice);
    return bench.builder().outputs({"y"}).add("make", use).build();
  };
  const Pipeline p = build("tiled:tile=128");
  CHECK(p.nodes()[0].chosen().id == "tiled");
  CHECK(option_or(p.nodes()[0].options, "tile", 0) == 128);
  expect_error(ErrorCode::unsupported, {"make", "tiled:tile=96", "[64, 128]", "got 96"},
               [&] { build("tiled:tile=96"); });
  expect_error(ErrorCode::unsupported, {"make", "gpu", "runs on cuda"}, [&] { build("gpu"); });
  expect_error(ErrorCode::invalid_pipeline, {"make", "[plain, tiled, gpu]", "'none'"},
               [&] { build("none"); });
}

TEST_CASE(
    "a pipeline has every external tensor that its problem asks for, or says that it does without")
{
  Problem p = small_problem();
  p.initial_state = true;
  const auto builder = [&](std::vector<std::string> inputs, StageUse use = {}) {
    inputs.insert(inputs.end(), {"q", "k", "v", "g", "beta"});
    return PipelineBuilder("mine", builtin_stages(), p, {8, 2}, plain_host())
        .inputs(std::move(inputs))
        .outputs({"o", "final_state"})
        .add("one_pass", std::move(use));
  };
  (void)builder({"cu_seqlens", "initial_state"}).build();
  expect_error(ErrorCode::invalid_pipeline, {"mine", "one_pass", "cu_seqlens", "expected an input"},
               [&] { (void)builder({"initial_state"}).build(); });
  expect_error(ErrorCode::invalid_pipeline, {"one_pass", "initial_state", "expected an input"},
               [&] { (void)builder({"cu_seqlens"}).build(); });
  (void)builder({"cu_seqlens"}, named("", {{"initial_state", ""}})).build();
}

TEST_CASE("a bad problem or capacity is refused first")
{
  Bench bench({tiny_stage("make", {writes("y")})});
  bench.problem.v_heads = 3;
  expect_error(ErrorCode::invalid_argument, {"v_heads"},
               [&] { bench.builder().outputs({"y"}).add("make").build(); });
  bench.problem = small_problem();
  bench.capacity.max_sequences = 0;
  expect_error(ErrorCode::invalid_argument, {"max_sequences"},
               [&] { bench.builder().outputs({"y"}).add("make").build(); });
}
