#include <gdnflow/compare.hpp>
#include <gdnflow/oracle.hpp>

#include "support/expect_error.hpp"
#include "support/golden.hpp"
#include "support/tensor.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::expect_error;
using gdnflow::test::HostTensor;
using gdnflow::test::Inputs;

namespace {

Problem problem(std::int32_t qk_heads, std::int32_t v_heads, std::int32_t qk_dim,
                std::int32_t v_dim) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.qk_dim = qk_dim;
  p.v_dim = v_dim;
  return p;
}

double relative_rms(const std::vector<double>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1);
}

void check_agree(const Problem& p, const OracleInputs& inputs, double most = 1e-12) {
  const OracleResult recurrent = oracle_recurrent(p, inputs);
  const OracleResult chunked = oracle_chunked(p, inputs);
  CHECK(relative_rms(chunked.o, recurrent.o) < most);
  CHECK(relative_rms(chunked.final_state, recurrent.final_state) < most);
}

}  // namespace

TEST_CASE("one token does what the formula says")
{
  Problem p = problem(1, 1, 2, 2);
  p.scale = 2.0F;
  p.initial_state = true;
  const HostTensor q(DType::f32, {1, 1, 2}), k(DType::f32, {1, 1, 2}), v(DType::f32, {1, 1, 2}),
      g(DType::f32, {1, 1}), beta(DType::f32, {1, 1}), s(DType::f32, {1, 1, 2, 2});
  const auto set = [](const HostTensor& t, std::vector<float> values) {
    std::copy(values.begin(), values.end(), t.as<float>());
  };
  set(q, {1, 3});
  set(k, {2, 1});
  set(v, {5, 7});
  set(g, {static_cast<float>(std::log(0.5))});
  set(beta, {0.25F});
  set(s, {1, 2, 3, 4});
  const OracleInputs in{q, k, v, g, beta, s, {0, 1}};
  // alpha S = [.5 1; 1.5 2], k^T of it = [2.5 4], beta (v - that) = [.625 .75],
  // S = alpha S + k (.) = [1.75 2.5; 2.125 2.75], q^T S = [8.125 10.75].
  const double exact = std::exp(static_cast<double>(g.as<float>()[0])) / 0.5;
  const OracleResult out = oracle_recurrent(p, in);
  CHECK(out.o[0] == doctest::Approx(16.25).epsilon(1e-6));
  CHECK(out.o[1] == doctest::Approx(21.5).epsilon(1e-6));
  CHECK(out.final_state[0] == doctest::Approx(1.75 * exact).epsilon(1e-6));
  CHECK(out.final_state[1] == doctest::Approx(2.5).epsilon(1e-6));
  CHECK(out.final_state[2] == doctest::Approx(2.125).epsilon(1e-6));
  CHECK(out.final_state[3] == doctest::Approx(2.75).epsilon(1e-6));
}

TEST_CASE("the chunked derivation equals the recurrence on every distribution")
{
  Problem p = problem(2, 4, 32, 24);
  p.initial_state = true;
  for (const Distribution d : distributions()) {
    CAPTURE(to_string(d));
    // Without unit keys a token can grow the state and M's inverse, and rounding with it.
    const double most = d == Distribution::unnormalized ? 1e-9 : 1e-12;
    check_agree(p, Inputs::draw(p, {200, 0, 63}, d, 11).views(), most);
  }
}

TEST_CASE("the two agree over head pairs, dims, layouts, maps and types")
{
  const std::vector<std::pair<std::int32_t, std::int32_t>> heads{
      {1, 1}, {2, 4}, {2, 8}, {3, 3}, {4, 12}};
  std::uint64_t seed = 0;
  for (const auto& [qk_heads, v_heads] : heads) {
    for (const auto& [qk_dim, v_dim] :
         std::vector<std::pair<std::int32_t, std::int32_t>>{{16, 16}, {8, 20}, {1, 3}}) {
      for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
        Problem p = problem(qk_heads, v_heads, qk_dim, v_dim);
        p.state_layout = layout;
        p.initial_state = seed % 2 == 0;
        p.head_map = seed % 3 == 0 ? HeadMap::interleaved : HeadMap::grouped;
        p.activation = seed % 2 == 0 ? DType::f16 : DType::f32;
        p.qk_norm = seed % 4 == 1;
        CAPTURE(to_string(p));
        check_agree(p, Inputs::draw(p, {70, 1, 130}, Distribution::mixed, ++seed).views());
      }
    }
  }
}

TEST_CASE("the two agree at every length about a chunk's border")
{
  Problem p = problem(1, 2, 16, 16);
  p.initial_state = true;
  for (const std::int64_t length :
       {0, 1, 2, 15, 16, 17, 31, 57, 59, 61, 63, 64, 65, 75, 100, 127, 128, 129, 192, 500}) {
    CAPTURE(length);
    check_agree(p, Inputs::draw(p, {length}, Distribution::correlated, 5).views());
  }
}

TEST_CASE("packed sequences are those sequences alone")
{
  Problem p = problem(2, 4, 16, 16);
  p.initial_state = true;
  const Inputs all = Inputs::draw(p, {0, 15, 100, 0, 64, 0}, Distribution::random_decay, 3);
  const OracleResult packed = oracle_recurrent(p, all.views());
  const std::int64_t row = 4 * 16, state = 4 * 16 * 16;
  for (std::size_t n = 0; n + 1 < all.cu_seqlens.size(); ++n) {
    OracleInputs one = all.views();
    const std::int64_t first = all.cu_seqlens[n];
    const std::int64_t length = all.cu_seqlens[n + 1] - first;
    for (TensorView* view : {&one.q, &one.k, &one.v, &one.g, &one.beta}) {
      view->data = view->as<char>() +
                   first * view->strides[0] * static_cast<std::int64_t>(size_of(view->dtype));
      view->extents[0] = length;
    }
    one.initial_state.data = one.initial_state.as<float>() + static_cast<std::int64_t>(n) * state;
    one.initial_state.extents[0] = 1;
    one.cu_seqlens = {0, length};
    const OracleResult alone = oracle_recurrent(p, one);
    CHECK(std::equal(alone.o.begin(), alone.o.end(), packed.o.begin() + first * row));
    CHECK(std::equal(alone.final_state.begin(), alone.final_state.end(),
                     packed.final_state.begin() + static_cast<std::int64_t>(n) * state));
    if (length == 0) {
      for (std::int64_t i = 0; i < state; ++i) {
        REQUIRE(alone.final_state[i] == one.initial_state.as<float>()[i]);
      }
    }
  }
}

TEST_CASE("rows that no sequence owns are zero")
{
  const Problem p = problem(1, 1, 8, 8);
  const Inputs in = Inputs::draw(p, {30}, Distribution::random_decay, 3);
  for (const auto oracle : {oracle_recurrent, oracle_chunked}) {
    OracleInputs views = in.views();
    views.cu_seqlens = {4, 10, 20};
    const OracleResult out = oracle(p, views);
    for (std::int64_t t = 0; t < 30; ++t) {
      bool zero = true;
      for (std::int64_t i = 0; i < 8; ++i) zero = zero && out.o[t * 8 + i] == 0;
      CHECK(zero == (t < 4 || t >= 20));
    }
  }
}

TEST_CASE("strided inputs are read in place")
{
  const Problem p = problem(2, 2, 8, 8);
  const Inputs in = Inputs::draw(p, {90}, Distribution::random_decay, 9);
  // q, k and v side by side in one row, as a fused projection leaves them.
  const HostTensor fused(DType::bf16, {90, 6, 8});
  OracleInputs views = in.views();
  const TensorView* parts[] = {&in.q.view(), &in.k.view(), &in.v.view()};
  TensorView* targets[] = {&views.q, &views.k, &views.v};
  for (std::int64_t part = 0; part < 3; ++part) {
    for (std::int64_t t = 0; t < 90; ++t) {
      std::copy_n(parts[part]->as<std::uint16_t>() + t * 16, 16,
                  fused.as<std::uint16_t>() + t * 48 + part * 16);
    }
    targets[part]->data = fused.as<std::uint16_t>() + part * 16;
    targets[part]->strides[0] = 48;
  }
  CHECK(oracle_recurrent(p, views).o == oracle_recurrent(p, in.views()).o);
  CHECK(oracle_chunked(p, views).o == oracle_chunked(p, in.views()).o);
}

TEST_CASE("the layout of a state is where it is stored and nothing else")
{
  Problem p = problem(1, 2, 6, 10);
  p.initial_state = true;
  const Inputs in = Inputs::draw(p, {40, 30}, Distribution::random_decay, 2);
  const OracleResult kv = oracle_recurrent(p, in.views());
  p.state_layout = StateLayout::vk;
  const HostTensor transposed(DType::f32, {2, 2, 10, 6});
  for (std::int64_t m = 0; m < 4; ++m) {
    for (std::int64_t r = 0; r < 6; ++r) {
      for (std::int64_t c = 0; c < 10; ++c) {
        transposed.as<float>()[m * 60 + c * 6 + r] =
            in.initial_state.as<float>()[m * 60 + r * 10 + c];
      }
    }
  }
  OracleInputs views = in.views();
  views.initial_state = transposed;
  const OracleResult vk = oracle_recurrent(p, views);
  CHECK(vk.o == kv.o);
  for (std::int64_t m = 0; m < 4; ++m) {
    for (std::int64_t r = 0; r < 6; ++r) {
      for (std::int64_t c = 0; c < 10; ++c) {
        REQUIRE(vk.final_state[m * 60 + c * 6 + r] == kv.final_state[m * 60 + r * 10 + c]);
      }
    }
  }
}

TEST_CASE("a reset forgets everything before it, exactly")
{
  Problem p = problem(1, 1, 8, 8);
  p.initial_state = true;
  const Inputs in = Inputs::draw(p, {100}, Distribution::random_decay, 4);
  in.g.as<float>()[70] = -std::numeric_limits<float>::infinity();
  Inputs other = in;
  fill_input(InputKind::initial_state, Distribution::random_decay, 99, other.initial_state);
  for (const auto oracle : {oracle_recurrent, oracle_chunked}) {
    const OracleResult a = oracle(p, in.views());
    const OracleResult b = oracle(p, other.views());
    for (const double x : a.o) REQUIRE(std::isfinite(x));
    CHECK(std::equal(a.o.begin() + 70 * 8, a.o.end(), b.o.begin() + 70 * 8));
    CHECK_FALSE(std::equal(a.o.begin(), a.o.begin() + 70 * 8, b.o.begin()));
    CHECK(a.final_state == b.final_state);
  }
}

TEST_CASE("edge values of beta, keys and gates: both agree")
{
  Problem p = problem(1, 2, 16, 16);
  p.initial_state = true;
  const auto with = [&](auto change) {
    const Inputs in = Inputs::draw(p, {150}, Distribution::random_decay, 8);
    change(in);
    check_agree(p, in.views());
  };
  const auto fill = [](const HostTensor& t, float value) {
    std::fill_n(t.as<float>(), t.view().elements(), value);
  };
  p.activation = DType::f32;
  with([&](const Inputs& in) { fill(in.beta, 0.0F); });
  with([&](const Inputs& in) { fill(in.beta, 1.0F); });
  with([&](const Inputs& in) { fill(in.k, 0.0F); });
  with([&](const Inputs& in) { fill(in.k, 0.25F); });  // every key the same unit vector
  with([&](const Inputs& in) { fill(in.g, 0.05F); });  // a model that grows
  with([&](const Inputs& in) {
    for (std::int64_t i = 0; i < in.initial_state.view().elements(); ++i) {
      in.initial_state.as<float>()[i] *= 1e4F;
    }
  });
}

TEST_CASE("poison stays in its sequence and reaches no earlier token of it")
{
  const Problem p = problem(1, 1, 8, 8);
  const Inputs clean = Inputs::draw(p, {50, 50}, Distribution::random_decay, 6);
  Inputs poisoned = clean;
  poisoned.g.as<float>()[75] = std::numeric_limits<float>::quiet_NaN();
  const OracleResult a = oracle_recurrent(p, clean.views());
  const OracleResult b = oracle_recurrent(p, poisoned.views());
  CHECK(std::equal(a.o.begin(), a.o.begin() + 75 * 8, b.o.begin()));
  for (std::int64_t i = 75 * 8; i < 100 * 8; ++i) REQUIRE(std::isnan(b.o[i]));
  CHECK(std::equal(a.final_state.begin(), a.final_state.begin() + 64, b.final_state.begin()));
}

TEST_CASE("both oracles agree with another implementation's fp32 results")
{
  for (const std::string_view name : test::golden_names) {
    CAPTURE(name);
    const auto golden = test::Golden::open(name);
    for (const auto oracle : {oracle_recurrent, oracle_chunked}) {
      const OracleResult out = oracle(golden.problem, golden.inputs);
      const Comparison o = compare(golden.o(), out.o);
      const Comparison state = compare(golden.final_state(), out.final_state);
      INFO("o: ", to_string(o, golden.inputs.cu_seqlens), "; state: ", to_string(state));
      CHECK(o.within(1e-6));
      CHECK(state.within(1e-6));
    }
  }
}

TEST_CASE("inputs that do not fit the problem are refused by name")
{
  Problem p = problem(1, 2, 8, 8);
  p.initial_state = true;
  const Inputs good = Inputs::draw(p, {20}, Distribution::random_decay, 1);
  const auto refused = [&](std::initializer_list<std::string_view> parts, auto change) {
    OracleInputs in = good.views();
    change(in);
    expect_error(ErrorCode::invalid_argument, parts, [&] { oracle_recurrent(p, in); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { oracle_chunked(p, in); });
  };
  refused({"q", "[20,1,8]", "[20,1,7]"}, [](OracleInputs& in) { in.q.extents[2] = 7; });
  refused({"k", "[20,1,8]"}, [](OracleInputs& in) { in.k.extents[0] = 19; });
  refused({"v", "[20,2,8]"}, [](OracleInputs& in) { in.v = in.k; });
  refused({"g", "[20,2]"}, [](OracleInputs& in) { in.g.rank = 1; });
  refused({"g", "f32", "bf16"}, [](OracleInputs& in) { in.g.dtype = DType::bf16; });
  refused({"beta", "no data"}, [](OracleInputs& in) { in.beta.data = nullptr; });
  refused({"v", "i32"}, [](OracleInputs& in) { in.v.dtype = DType::i32; });
  refused({"k", "contiguous"}, [](OracleInputs& in) { in.k.strides[2] = 2; });
  refused({"q", "host", "cuda:0"}, [](OracleInputs& in) { in.q.device = {DeviceType::cuda, 0}; });
  refused({"beta", "host", "cuda:0"}, [](OracleInputs& in) {
    in.beta.device = {DeviceType::cuda, 0};
  });
  refused({"initial_state", "[2,2,8,8]"}, [](OracleInputs& in) { in.cu_seqlens = {0, 5, 20}; });
  refused({"cu_seqlens", "N+1"}, [](OracleInputs& in) { in.cu_seqlens.clear(); });
  refused({"cu_seqlens", "21"}, [](OracleInputs& in) { in.cu_seqlens = {0, 21}; });
  refused({"cu_seqlens", "-1"}, [](OracleInputs& in) { in.cu_seqlens = {-1, 20}; });
  refused({"cu_seqlens", "3 after 5"}, [](OracleInputs& in) { in.cu_seqlens = {0, 5, 3}; });
  expect_error(ErrorCode::invalid_argument, {"v_heads"}, [&] {
    Problem wrong = p;
    wrong.v_heads = 0;
    oracle_recurrent(wrong, good.views());
  });
}
