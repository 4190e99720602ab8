#include <gdnflow/compare.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>

#include "gpu/device_externals.hpp"
#include "support/gpu.hpp"

#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

// register-state and one-pass cut the sequences of few heads where their past has faded. What it
// must not do is change a result: against the fp64 recurrence and against the same kernel without
// cuts, where the past fades, where it does not, where the bound alone would be fooled, in place,
// and run to run.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

// The pipelines that cut, each with the stage whose variant of the same name does.
struct Cutter {
  std::string recipe, stage;
  std::int64_t value_tile;
};
std::string to_string(const Cutter& cutter) {
  return fmt::format("{}, value tile {}", cutter.recipe, cutter.value_tile);
}
const Cutter cutters[] = {{"register-state", "fused_prefill", 64},
                          {"one-pass", "one_pass", 64},
                          {"one-pass", "one_pass", 128}};

Plan plan_of(const Cutter& cutter, const Externals& x, std::int64_t segments) {
  const VariantOverrides overrides{
      {cutter.stage, {cutter.recipe, {{"value_tile", cutter.value_tile}, {"segments", segments}}}}};
  return Plan(make_pipeline(cutter.recipe, x.problem(), x.capacity(), device_info(gpu), overrides));
}

bool runs_here() {
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  return static_cast<bool>(can_make_pipeline("register-state", p, {64, 1}, device_info(gpu)));
}

/// Outputs of a run on fresh copies.
Externals run(const Cutter& cutter, const Externals& x, std::int64_t segments) {
  DeviceExternals device(x);
  auto executor = make_graph_executor(plan_of(cutter, x, segments));
  executor->bind(device.bindings());
  executor->build();
  const TestStream stream;
  executor->run(stream);
  return device.download();
}

void check(const Comparison& o, const Comparison& final_state, double most, const std::string& what,
           const Externals& got) {
  CHECK_MESSAGE(o.within(most), what, ": o: ", to_string(o, got.offsets()));
  CHECK_MESSAGE(final_state.within(most), what, ": final_state: ", to_string(final_state));
}

void check(const Externals& got, const OracleResult& expected, double most,
           const std::string& what) {
  check(compare(got.owned_o(), std::span(expected.o).first(got.owned_elements())),
        compare(got.tensors().at("final_state").view(), expected.final_state), most, what, got);
}

void check(const Externals& got, const Externals& expected, double most, const std::string& what) {
  check(
      compare(got.owned_o(), expected.owned_o()),
      compare(got.tensors().at("final_state").view(), expected.tensors().at("final_state").view()),
      most, what, got);
}

bool same_bits(const Externals& a, const Externals& b) {
  for (const char* name : {"o", "final_state"}) {
    const TensorView& x = a.tensors().at(name).view();
    const TensorView& y = b.tensors().at(name).view();
    if (std::memcmp(x.data, y.data, static_cast<std::size_t>(x.bytes())) != 0) return false;
  }
  return true;
}

Problem problem_of(std::int32_t qk_heads, std::int32_t v_heads, bool initial_state) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.initial_state = initial_state;
  return p;
}

Externals externals_of(const Problem& problem, const std::vector<std::int64_t>& lengths,
                       Distribution distribution) {
  return Externals(problem, {offsets_of(lengths).back() + 5, std::ssize(lengths) + 1}, lengths,
                   distribution);
}

// Each must agree with the recurrence as any kernel does. What is cut off lies below fp32's
// resolution; yet it turns over a rounding to 16 bits here and there, and what that changes is
// remembered for as long as the state remembers. So runs with and without cuts agree to less than
// what rounding costs either (3.4e-3), and exactly where decay is strong. Where the past does not
// fade, whole heads compute the states between pieces in another way, with roundings of its own.
void check_all_ways(const Externals& x, const std::string& text, bool fades = true) {
  const OracleResult recurrence = oracle_recurrent(x.problem(), x.oracle_inputs());
  for (const Cutter& cutter : cutters) {
    const std::string what = to_string(cutter) + ", " + text;
    const Externals cut = run(cutter, x, 1);
    check(cut, recurrence, 5e-3, what + ", recurrence");
    const Externals whole = run(cutter, x, 0);
    check(cut, whole, fades || cutter.value_tile == 64 ? 1.5e-3 : 5e-3, what + ", uncut");
    CHECK_MESSAGE(same_bits(cut, run(cutter, x, 1)), what, ": two runs differ");
  }
}

}  // namespace

TEST_CASE("segments change no result, whatever the gates are and wherever sequences end")
{
  GDNFLOW_REQUIRE_GPU();
  if (!runs_here()) return;
  const std::vector<std::vector<std::int64_t>> all_lengths{
      {2048}, {1025}, {40, 1400, 0, 700}, {64, 64, 1984}, {3000, 1}};
  for (const auto& lengths : all_lengths) {
    for (const Distribution distribution :
         {Distribution::random_decay, Distribution::mixed, Distribution::no_decay,
          Distribution::quarter_frozen, Distribution::model, Distribution::strong,
          Distribution::hard_reset}) {
      const bool fades = distribution == Distribution::random_decay ||
                         distribution == Distribution::strong ||
                         distribution == Distribution::hard_reset;
      check_all_ways(
          externals_of(problem_of(2, 4, true), lengths, distribution),
          fmt::format("lengths {}, {}", fmt::join(lengths, "+"), to_string(distribution)), fades);
    }
  }
}

TEST_CASE("segments of one head, of many and without an initial state")
{
  GDNFLOW_REQUIRE_GPU();
  if (!runs_here()) return;
  for (const auto& [qk, v] : {std::pair{1, 1}, {2, 8}, {4, 16}, {11, 33}, {16, 64}}) {
    for (const bool initial_state : {false, true}) {
      check_all_ways(
          externals_of(problem_of(qk, v, initial_state), {1600, 150}, Distribution::random_decay),
          fmt::format("{}/{} heads", qk, v));
    }
  }
}

TEST_CASE("empty sequences between others, many heads each")
{
  GDNFLOW_REQUIRE_GPU();
  if (!runs_here()) return;
  // More heads than a block of whole heads has places for jobs, so that nothing may wait for what
  // lies behind them.
  std::vector<std::int64_t> one(300, 16);
  one[149] = 0;
  std::vector<std::int64_t> alternating(200, 64);
  for (std::size_t i = 1; i < alternating.size(); i += 2) alternating[i] = 0;
  for (const auto& lengths : {one, alternating, {3072, 0, 5000}}) {
    check_all_ways(externals_of(problem_of(2, 8, true), lengths, Distribution::random_decay),
                   fmt::format("{} sequences, some empty", lengths.size()));
  }
}

TEST_CASE("gates that fade in one place and not in another")
{
  GDNFLOW_REQUIRE_GPU();
  if (!runs_here()) return;
  const Problem problem = problem_of(2, 8, true);
  // One sequence, whose heads half heads look at before they cut; and so many that they do not.
  const std::vector<std::vector<std::int64_t>> all_lengths{{12000}, {9500, 400, 400, 400, 400}};
  for (const auto& lengths : all_lengths) {
    Externals x = externals_of(problem, lengths, Distribution::no_decay);
    for (const std::int64_t token : {3000, 3001, 9100}) {
      for (std::int64_t head = 0; head < problem.v_heads; head += 3) {
        x.set_log_decay(token, head, -40.0F);
      }
    }
    check_all_ways(x, fmt::format("{} sequences, resets here and there", lengths.size()), false);
  }
}

TEST_CASE("heads whose past does not fade, each in many pieces")
{
  GDNFLOW_REQUIRE_GPU();
  if (!runs_here()) return;
  // The last with 8 heads: too many for half heads to look at before they cut.
  const std::vector<std::vector<std::int64_t>> all_lengths{
      {9000}, {2500, 0, 3001, 64, 200}, {2500, 0, 3001, 64, 200, 300, 300, 1, 300}};
  for (const auto& lengths : all_lengths) {
    for (const auto& [qk, v] : {std::pair{1, 1}, {2, 8}}) {
      for (const Distribution distribution :
           {Distribution::no_decay, Distribution::quarter_frozen}) {
        check_all_ways(externals_of(problem_of(qk, v, true), lengths, distribution),
                       fmt::format("lengths {}, {}/{} heads, {}", fmt::join(lengths, "+"), qk, v,
                                   to_string(distribution)),
                       false);
      }
    }
  }
}

TEST_CASE("heads that are alike are cut alike, each into as many shares")
{
  GDNFLOW_REQUIRE_GPU();
  if (!runs_here()) return;
  struct Shape {
    std::int32_t qk, v;
    std::vector<std::int64_t> lengths;
  };
  const Shape shapes[] = {{8, 32, {8192}}, {8, 32, {2048, 2048}}, {16, 64, {2000}}};
  for (const Shape& shape : shapes) {
    for (const Distribution distribution :
         {Distribution::random_decay, Distribution::no_decay, Distribution::quarter_frozen}) {
      // No sequence is empty, then.
      const Capacity full{offsets_of(shape.lengths).back(), std::ssize(shape.lengths)};
      check_all_ways(
          Externals(problem_of(shape.qk, shape.v, true), full, shape.lengths, distribution),
          fmt::format("lengths {}, {}/{} heads, {}", fmt::join(shape.lengths, "+"), shape.qk,
                      shape.v, to_string(distribution)),
          distribution == Distribution::random_decay);
    }
  }
}

TEST_CASE("a state that the bound alone would cut off is carried on")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem problem = problem_of(2, 4, true);
  if (!runs_here()) return;
  for (const float factor : {1e4F, 1e15F, std::numeric_limits<float>::infinity()}) {
    Externals x = externals_of(problem, {2048}, Distribution::random_decay);
    scale<float>(x["initial_state"], factor);
    for (const Cutter& cutter : cutters) {
      const Externals cut = run(cutter, x, 1);
      const Externals whole = run(cutter, x, 0);
      check(cut, whole, 1e-4, fmt::format("{}, initial state x {}", to_string(cutter), factor));
    }
  }
}

TEST_CASE("keys that let the state grow are not cut where it does")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem problem = problem_of(2, 4, true);
  if (!runs_here()) return;
  Externals x = externals_of(problem, {2048}, Distribution::random_decay);
  // |k| = 1.7: a token whose beta is near one nearly doubles what lies along its key.
  scale<__nv_bfloat16>(x["k"], 1.7F);
  for (const Cutter& cutter : cutters) {
    const Externals cut = run(cutter, x, 1);
    const Externals whole = run(cutter, x, 0);
    check(cut, whole, 1e-3, to_string(cutter) + ", |k| = 1.7");
  }
}

TEST_CASE("states in place are read by every segment before they are replaced")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem problem = problem_of(1, 2, true);
  if (!runs_here()) return;
  for (const Cutter& cutter : cutters) {
    // Cut, computed again, and linked.
    for (const auto& [factor, distribution] : {std::pair{1.0F, Distribution::random_decay},
                                               {1e15F, Distribution::random_decay},
                                               {1.0F, Distribution::no_decay}}) {
      Externals x = externals_of(problem, {4096, 500}, distribution);
      scale<float>(x["initial_state"], factor);
      const Externals apart = run(cutter, x, 1);
      DeviceExternals device(x);
      Bindings bindings = device.bindings();
      for (auto& [name, view] : bindings) {
        if (name == "final_state") view = device.view("initial_state");
      }
      auto executor = make_graph_executor(plan_of(cutter, x, 1));
      executor->bind(bindings);
      executor->build();
      const TestStream stream;
      executor->run(stream);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
      std::vector<unsigned char> bits(
          static_cast<std::size_t>(device.view("initial_state").bytes()));
      REQUIRE(cudaMemcpy(bits.data(), device.view("initial_state").data, bits.size(),
                         cudaMemcpyDeviceToHost) == cudaSuccess);
      const TensorView& expected = apart.tensors().at("final_state").view();
      CHECK(std::memcmp(bits.data(), expected.data, bits.size()) == 0);
    }
  }
}
