#include <gdnflow/compare.hpp>

#include "support/stage_driver.hpp"

#include <chrono>
#include <string>
#include <vector>

// The document form, the residual form, the fused walk and the token recurrence against fp64.

using namespace gdnflow;
using test::Form;
using test::Inputs;
using test::StageDriver;

namespace {

struct Bounds {
  double o = 1e-5;
  double state = 1e-5;
};

Problem problem(std::int32_t qk_heads, std::int32_t v_heads, std::int32_t dim) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.qk_dim = dim;
  p.v_dim = dim;
  p.activation = DType::f32;
  p.initial_state = true;
  return p;
}

void check_inputs(const Problem& p, const Inputs& in, Bounds bounds = {}) {
  const OracleResult expected = oracle_recurrent(p, in.views());
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver driver = test::make_driver(p, in);
    test::run_form(driver, form);
    const Comparison o = compare(driver["o"], expected.o);
    CHECK_MESSAGE(o.within(bounds.o), to_string(o, in.cu_seqlens));
    if (p.final_state) {
      const Comparison state = compare(driver["final_state"], expected.final_state);
      CHECK_MESSAGE(state.within(bounds.state), to_string(state));
    }
  }
}

void check(const Problem& p, const std::vector<std::int64_t>& lengths,
           Distribution distribution = Distribution::random_decay, Bounds bounds = {}) {
  CAPTURE(to_string(p));
  CAPTURE(to_string(distribution));
  CAPTURE(lengths);
  check_inputs(p, Inputs::draw(p, lengths, distribution, 11), bounds);
}

}  // namespace

TEST_CASE("all forms equal the recurrence at every length around a chunk's border")
{
  const Problem p = problem(1, 2, 64);
  for (const std::int64_t length :
       {1, 2, 15, 16, 17, 31, 57, 59, 61, 63, 64, 65, 75, 100, 127, 128, 129, 192, 500}) {
    check(p, {length});
  }
}

TEST_CASE("all forms equal the recurrence on packed sequences")
{
  const Problem p = problem(2, 4, 64);
  check(p, {15});
  check(p, {256, 244, 500});
  check(p, {15, 85, 200, 900, 800});
  check(p, {1, 99, 200, 900, 848});
  check(p, {0, 101, 202, 0, 0, 64, 1, 0});
  check(p, std::vector<std::int64_t>(50, 16));
  check(p, {0, 0, 0});
}

TEST_CASE("all forms equal the recurrence for every ratio of heads and both head maps")
{
  for (const auto& [qk_heads, v_heads] :
       {std::pair{1, 1}, {2, 4}, {2, 8}, {3, 3}, {4, 12}, {2, 16}, {3, 15}}) {
    for (const HeadMap map : {HeadMap::grouped, HeadMap::interleaved}) {
      Problem p = problem(qk_heads, v_heads, 32);
      p.head_map = map;
      check(p, {100, 65});
    }
  }
}

TEST_CASE("all forms equal the recurrence for any head dims and both state layouts")
{
  for (const auto& [qk_dim, v_dim] : {std::pair{1, 1},
                                      {7, 7},
                                      {32, 32},
                                      {96, 96},
                                      {128, 128},
                                      {256, 256},
                                      {64, 128},
                                      {128, 64},
                                      {5, 130},
                                      {1, 64}}) {
    for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
      Problem p = problem(1, 2, qk_dim);
      p.v_dim = v_dim;
      p.state_layout = layout;
      check(p, {130, 17});
    }
  }
}

TEST_CASE("all forms equal the recurrence on every distribution" * doctest::test_suite("long"))
{
  const Problem p = problem(2, 4, 128);
  for (const Distribution distribution : distributions()) {
    // Keys up to length 2 make the inverse grow, and rounding errors with it.
    const bool grows = distribution == Distribution::unnormalized;
    check(p, {300, 64, 129}, distribution, grows ? Bounds{1e-3, 1e-3} : Bounds{});
  }
}

TEST_CASE("errors of early tokens do not build up over a long sequence without decay" *
          doctest::test_suite("long"))
{
  check(problem(1, 1, 128), {4096}, Distribution::no_decay);
  check(problem(1, 2, 64), {2048, 1000}, Distribution::correlated);
}

TEST_CASE("dense tensors, a given scale, no initial state and no final state")
{
  Problem p = problem(2, 4, 64);
  p.cu_seqlens = false;
  check(p, {100, 100, 100});
  p.scale = 0.7F;
  p.initial_state = false;
  check(p, {130});
  p.final_state = false;
  check(p, {130, 130});
}

TEST_CASE("bf16 and fp16 activations and states cost their own rounding and no more")
{
  for (const DType type : {DType::bf16, DType::f16}) {
    Problem p = problem(2, 4, 64);
    p.activation = type;
    const double rounding = type == DType::bf16 ? 1.8e-3 : 2.3e-4;
    check(p, {200, 65}, Distribution::random_decay, {rounding, 1e-5});
    p.state = type;
    check(p, {200, 65}, Distribution::random_decay, {rounding, rounding});
    // A check that these bounds measure something: half of them is not met.
    const Inputs in = Inputs::draw(p, {200, 65}, Distribution::random_decay, 11);
    StageDriver driver = test::make_driver(p, in);
    test::run_form(driver, Form::residual);
    CHECK(!compare(driver["o"], oracle_recurrent(p, in.views()).o).within(rounding / 2));
  }
}

TEST_CASE("i64 lengths and an initial state of 1e4")
{
  Problem p = problem(1, 2, 64);
  p.index = DType::i64;
  Inputs in = Inputs::draw(p, {100, 65}, Distribution::correlated, 5);
  float* state = in.initial_state.as<float>();
  for (std::int64_t i = 0; i < in.initial_state.view().elements(); ++i) state[i] *= 1e4F;
  check_inputs(p, in);
}

TEST_CASE("beta of 0 and 1, zero keys and repeated keys")
{
  const Problem p = problem(1, 2, 64);
  const Inputs drawn = Inputs::draw(p, {150}, Distribution::no_decay, 3);
  const auto repeat_key = [&](Inputs& in, std::int64_t from, std::int64_t count) {
    float* k = in.k.as<float>();
    for (std::int64_t t = from + 1; t < from + count; ++t) {
      std::copy_n(k + from * p.qk_dim, p.qk_dim, k + t * p.qk_dim);
    }
  };
  for (const float beta : {0.0F, 1.0F}) {
    CAPTURE(beta);
    Inputs in = drawn;
    std::fill_n(in.beta.as<float>(), in.beta.view().elements(), beta);
    check_inputs(p, in);
    repeat_key(in, 20, 60);
    check_inputs(p, in);
  }
  Inputs in = drawn;
  std::fill_n(in.k.as<float>() + 30 * p.qk_dim, 50 * p.qk_dim, 0.0F);
  check_inputs(p, in);
}

TEST_CASE("all forms equal one another on strided views of one projection")
{
  const Problem p = problem(2, 4, 32);
  const std::vector<std::int64_t> lengths{70, 3, 64};
  const Inputs in = Inputs::draw(p, lengths, Distribution::random_decay, 9);
  const std::int64_t tokens = in.cu_seqlens.back();
  // Rows hold q, k, v side by side, then a gap.
  const std::int64_t qk_width = std::int64_t{p.qk_heads} * p.qk_dim;
  const std::int64_t v_width = std::int64_t{p.v_heads} * p.v_dim;
  const std::int64_t width = 2 * qk_width + v_width + 5;
  test::HostTensor fused(DType::f32, {tokens, width});
  test::HostTensor fused_o(DType::f32, {tokens, width});
  std::int64_t column = 0;
  const auto view_at = [&](const test::HostTensor& memory, const TensorView& like,
                           std::int64_t first_column) {
    TensorView view = like;
    view.data = memory.as<float>() + first_column;
    view.strides = {width, like.extents[2], 1};
    return view;
  };
  const auto place = [&](const TensorView& dense) {
    const TensorView view = view_at(fused, dense, column);
    const std::int64_t row = dense.extents[1] * dense.extents[2];
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(dense.as<float>() + t * row, row, view.as<float>() + t * width);
    }
    column += row;
    return view;
  };
  const TensorView q = place(in.q);
  const TensorView k = place(in.k);
  const TensorView v = place(in.v);
  const OracleResult expected = oracle_recurrent(p, in.views());
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver driver = test::make_driver(p, in);
    driver.add_view("q", q);
    driver.add_view("k", k);
    driver.add_view("v", v);
    const TensorView o = view_at(fused_o, in.v, 2 * qk_width);
    driver.add_view("o", o);
    test::run_form(driver, form);
    CHECK(compare(o, expected.o).within(1e-5));
    CHECK(compare(driver["final_state"], expected.final_state).within(1e-5));
    // Between the rows nothing was written.
    CHECK(std::all_of(fused_o.as<float>(), fused_o.as<float>() + 2 * qk_width,
                      [](float x) { return x == 0.0F; }));
  }
}

TEST_CASE("the same inputs give the same bits whatever shares the batch")
{
  const Problem p = problem(2, 4, 64);
  const Inputs batch = Inputs::draw(p, {130, 64, 77}, Distribution::random_decay, 21);
  const std::int64_t begin = batch.cu_seqlens[1];
  const std::int64_t end = batch.cu_seqlens[3];
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver whole = test::make_driver(p, batch);
    test::run_form(whole, form);
    // The first sequence is hidden by the lengths and shares the tensors only.
    StageDriver part = test::make_driver(p, batch);
    part.add_index("cu_seqlens", {begin, begin, batch.cu_seqlens[2], end});
    test::run_form(part, form);
    const std::int64_t row = std::int64_t{p.v_heads} * p.v_dim;
    CHECK(std::memcmp(whole["o"].as<float>() + begin * row, part["o"].as<float>() + begin * row,
                      static_cast<std::size_t>((end - begin) * row) * sizeof(float)) == 0);
  }
}

TEST_CASE("a prompt of 2048 tokens with 16/32 heads goes through the residual form in useful time" *
          doctest::test_suite("long"))
{
  Problem p = problem(16, 32, 128);
  p.activation = DType::bf16;
  p.initial_state = false;
  const Inputs in = Inputs::draw(p, {2048}, Distribution::random_decay, 1);
  StageDriver driver = test::make_driver(p, in);
  const auto begin = std::chrono::steady_clock::now();
  test::run_form(driver, Form::residual);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  MESSAGE("2048 tokens, 16/32 heads: ", seconds.count(), " s");
  // Two cores take well under a second; the bound leaves room for busy machines, and still catches
  // a quadratic or a serial path.
  CHECK(seconds.count() < 20.0);
}
