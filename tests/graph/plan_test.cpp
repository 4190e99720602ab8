#include <gdnflow/error.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>

#include "graph/tiny_stages.hpp"
#include "support/expect_error.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

/// Reachability by plain search, to check the planner by something that is not its own.
bool precedes(const Pipeline& pipeline, int first, int second) {
  for (const int p : pipeline.nodes()[second].predecessors) {
    if (p == first || precedes(pipeline, first, p)) return true;
  }
  return false;
}

std::vector<int> touching(const Pipeline& pipeline, const Placement& placement) {
  if (placement.node >= 0) return {placement.node};
  const Edge& edge = pipeline.edges()[placement.edge];
  std::vector<int> nodes{edge.writer};
  nodes.insert(nodes.end(), edge.modifiers.begin(), edge.modifiers.end());
  nodes.insert(nodes.end(), edge.readers.begin(), edge.readers.end());
  return nodes;
}

bool over_before(const Pipeline& pipeline, const Placement& a, const Placement& b) {
  for (const int first : touching(pipeline, a)) {
    for (const int second : touching(pipeline, b)) {
      if (!precedes(pipeline, first, second)) return false;
    }
  }
  return true;
}

/// Every rule of a plan; gives how many pairs share memory.
int check_plan(const Plan& plan) {
  const Pipeline& pipeline = plan.pipeline();
  int shared = 0;
  for (std::size_t i = 0; i < plan.placements().size(); ++i) {
    const Placement& a = plan.placements()[i];
    CAPTURE(a.name);
    CHECK(a.offset >= 0);
    CHECK(a.offset % Plan::alignment == 0);
    CHECK(a.offset + a.bytes <= plan.arena_bytes());
    for (std::size_t j = 0; j < i; ++j) {
      const Placement& b = plan.placements()[j];
      if (a.offset >= b.offset + b.bytes || b.offset >= a.offset + a.bytes) continue;
      ++shared;
      CAPTURE(b.name);
      const bool ordered = over_before(pipeline, a, b) || over_before(pipeline, b, a);
      CHECK(ordered);
    }
  }
  CHECK(plan.arena_bytes() <= plan.unshared_bytes());
  return shared;
}

/// A random DAG: every stage reads some earlier tensors, changes one in place now and then, writes
/// one of a random size, and may want scratch.
Pipeline random_pipeline(std::mt19937& random) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const int count = draw(1, 14);
  std::vector<Stage> stages;
  std::vector<std::vector<Extent>> shapes;
  for (int n = 0; n < count; ++n) {
    std::vector<Port> ports;
    std::vector<bool> used(static_cast<std::size_t>(n), false);
    for (int i = draw(0, 3); n > 0 && i > 0; --i) {
      const int from = draw(0, n - 1);
      if (used[from]) continue;
      used[from] = true;
      const Direction direction = draw(0, 7) == 0 ? Direction::inout : Direction::in;
      ports.push_back(tiny_port(fmt::format("t{}", from), direction, shapes[from]));
    }
    shapes.push_back({"T", draw(1, 9) * draw(1, 200)});
    ports.push_back(writes(fmt::format("t{}", n), shapes.back()));
    Stage stage = tiny_stage(fmt::format("s{}", n), std::move(ports));
    if (draw(0, 3) == 0) {
      stage.variants[0].scratch = [](const VariantQuery&) {
        return std::vector<ScratchSpec>{{"sums", 1000}, {"flags", 70}};
      };
    }
    stages.push_back(std::move(stage));
  }
  const Registry registry(stages);
  PipelineBuilder builder("random", registry, {}, {16, 1}, plain_host());
  for (const Stage& stage : stages) builder.add(stage.name);
  return builder.build();
}

Problem problem_of(std::int32_t heads) {
  Problem p;
  p.qk_heads = heads;
  p.v_heads = 2 * heads;
  return p;
}

}  // namespace

TEST_CASE("on random DAGs only buffers that are ordered in the DAG share memory")
{
  std::mt19937 random(20240607);
  int shared = 0;
  int smaller = 0;
  int built = 0;
  while (built < 400) {
    // A change in place by a node in front of another reader of the same tensor may close a cycle;
    // such a DAG is none.
    std::optional<Pipeline> pipeline;
    try {
      pipeline = random_pipeline(random);
    } catch (const Error& error) {
      REQUIRE(std::string(error.what()).find("cycle") != std::string::npos);
      continue;
    }
    ++built;
    const Plan plan(*pipeline);
    shared += check_plan(plan);
    smaller += plan.arena_bytes() < plan.unshared_bytes() ? 1 : 0;
    const Plan apart(*pipeline, {.reuse = false});
    CHECK(check_plan(apart) == 0);
    CHECK(apart.arena_bytes() == apart.unshared_bytes());
    CHECK(apart.unshared_bytes() == plan.unshared_bytes());
  }
  // The check above is worth something only where memory was shared.
  CHECK(shared > 400);
  CHECK(smaller > 200);
}

TEST_CASE("the recipes' plans obey the rules")
{
  const auto plan = [](const char* recipe) {
    return Plan(make_pipeline(recipe, problem_of(4), {1024, 4}, plain_host()));
  };
  // `wu` is done with A before the states begin; `residual_state` still reads it when it writes.
  CHECK(check_plan(plan("naive")) > 0);
  CHECK(plan("naive").arena_bytes() < plan("naive").unshared_bytes());
  check_plan(plan("residual"));
  check_plan(plan("fused"));
  check_plan(plan("recurrent"));
}

TEST_CASE("a chain needs room for two neighbours only")
{
  std::vector<Stage> stages{tiny_stage("first", {writes("t0", {"T", 64})})};
  for (int n = 1; n < 8; ++n) {
    stages.push_back(tiny_stage(fmt::format("s{}", n), {reads(fmt::format("t{}", n - 1), {"T", 64}),
                                                        writes(fmt::format("t{}", n), {"T", 64})}));
  }
  const Registry registry(stages);
  PipelineBuilder builder("chain", registry, {}, {16, 1}, plain_host());
  for (const Stage& stage : stages) builder.add(stage.name);
  const Plan plan(builder.build());
  constexpr std::int64_t one = 16 * 64 * 4;
  CHECK(plan.arena_bytes() == 2 * one);
  CHECK(plan.unshared_bytes() == 8 * one);
}

TEST_CASE("parallel branches never share")
{
  const Registry registry({tiny_stage("a", {reads("x"), writes("p")}),
                           tiny_stage("b", {reads("p"), writes("q")}),
                           tiny_stage("c", {reads("x"), writes("r")}),
                           tiny_stage("d", {reads("q"), reads("r"), writes("z")})});
  const Plan plan(PipelineBuilder("fork", registry, {}, {64, 1}, plain_host())
                      .inputs({"x"})
                      .outputs({"z"})
                      .add("a")
                      .add("b")
                      .add("c")
                      .add("d")
                      .build());
  CHECK(plan.arena_bytes() == 3 * 64 * 4);
}

TEST_CASE("a capacity of no tokens still gives every intermediate an address of its own")
{
  const Plan plan(make_pipeline("residual", problem_of(1), {0, 2}, plain_host()), {.reuse = false});
  std::vector<std::int64_t> offsets;
  for (const Placement& p : plan.placements()) offsets.push_back(p.offset);
  std::sort(offsets.begin(), offsets.end());
  CHECK(std::adjacent_find(offsets.begin(), offsets.end()) == offsets.end());
  CHECK(plan.arena_bytes() > 0);
}

TEST_CASE("a size that no memory holds is refused")
{
  const std::int64_t huge = std::int64_t{1} << 40;
  const Registry registry(
      {tiny_stage("a", {writes("p", {huge, huge})}), tiny_stage("b", {reads("p", {huge, huge})})});
  expect_error(ErrorCode::invalid_argument, {"plan p", "p", "2^62"}, [&] {
    Plan{PipelineBuilder("p", registry, {}, {1, 1}, plain_host()).add("a").add("b").build()};
  });
}
