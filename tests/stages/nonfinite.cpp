#include <gdnflow/compare.hpp>

#include "support/stage_driver.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

// NaN, infinities and extreme gates: what they reach and what they must not.

using namespace gdnflow;
using test::Form;
using test::HostTensor;
using test::Inputs;
using test::StageDriver;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
const float quiet_nan = std::nanf("");

Problem small_problem() {
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  p.qk_dim = 16;
  p.v_dim = 24;
  p.activation = DType::f32;
  p.initial_state = true;
  return p;
}

bool finite(const float* data, std::int64_t count) {
  return std::all_of(data, data + count, [](float x) { return std::isfinite(x); });
}

bool same_bits(const float* a, const float* b, std::int64_t count) {
  return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

void check_against_oracle(const Problem& p, const Inputs& in, double bound) {
  const OracleResult expected = oracle_recurrent(p, in.views());
  REQUIRE(
      std::all_of(expected.o.begin(), expected.o.end(), [](double x) { return std::isfinite(x); }));
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver driver = test::make_driver(p, in);
    test::run_form(driver, form);
    const Comparison o = compare(driver["o"], expected.o);
    CHECK_MESSAGE(o.within(bound), to_string(o, in.cu_seqlens));
    const Comparison state = compare(driver["final_state"], expected.final_state);
    CHECK_MESSAGE(state.within(bound), to_string(state));
  }
}

}  // namespace

TEST_CASE("what is not finite stays in its sequence and behind its chunk's start")
{
  const Problem p = small_problem();
  const Inputs clean = Inputs::draw(p, {100, 200, 70}, Distribution::random_decay, 31);
  const std::int64_t token = 100 + 64 + 20;  // in the second chunk of the second sequence
  const std::int64_t chunk_start = 100 + 64;
  const std::int64_t row = std::int64_t{p.v_heads} * p.v_dim;
  const std::int64_t state_row = std::int64_t{p.v_heads} * p.qk_dim * p.v_dim;
  for (const char* poisoned : {"q", "k", "v", "g", "beta"}) {
    for (const float value : {quiet_nan, infinity}) {
      CAPTURE(poisoned);
      CAPTURE(value);
      Inputs in = clean;
      HostTensor& tensor = poisoned == std::string("q")   ? in.q
                           : poisoned == std::string("k") ? in.k
                           : poisoned == std::string("v") ? in.v
                           : poisoned == std::string("g") ? in.g
                                                          : in.beta;
      // Every head of the token, so that later rows and states are poisoned whole.
      std::fill_n(tensor.as<float>() + token * tensor.view().strides[0], tensor.view().strides[0],
                  value);
      const OracleResult expected = oracle_recurrent(p, in.views());
      for (const Form form : test::forms) {
        CAPTURE(test::to_string(form));
        StageDriver driver = test::make_driver(p, in);
        test::run_form(driver, form);
        StageDriver reference = test::make_driver(p, clean);
        test::run_form(reference, form);
        const float* o = driver["o"].as<float>();
        const float* reference_o = reference["o"].as<float>();
        CHECK(same_bits(o, reference_o, chunk_start * row));
        CHECK(same_bits(o + 300 * row, reference_o + 300 * row, 70 * row));
        const float* state = driver["final_state"].as<float>();
        const float* reference_state = reference["final_state"].as<float>();
        CHECK(same_bits(state, reference_state, state_row));
        CHECK(same_bits(state + 2 * state_row, reference_state + 2 * state_row, state_row));
        // From the token on nothing that the recurrence makes non-finite looks finite.
        std::int64_t hidden = 0;
        for (std::int64_t i = token * row; i < 300 * row; ++i) {
          if (!std::isfinite(expected.o[static_cast<std::size_t>(i)]) && std::isfinite(o[i])) {
            ++hidden;
          }
        }
        for (std::int64_t i = state_row; i < 2 * state_row; ++i) {
          if (!std::isfinite(expected.final_state[static_cast<std::size_t>(i)]) &&
              std::isfinite(state[i])) {
            ++hidden;
          }
        }
        CHECK(hidden == 0);
      }
    }
  }
}

TEST_CASE("the recurrent path has NaN exactly where the definition has it")
{
  const Problem p = small_problem();
  const Inputs clean = Inputs::draw(p, {200}, Distribution::random_decay, 32);
  for (const char* poisoned : {"q", "k", "v", "beta"}) {
    CAPTURE(poisoned);
    Inputs in = clean;
    HostTensor& tensor = poisoned == std::string("q")   ? in.q
                         : poisoned == std::string("k") ? in.k
                         : poisoned == std::string("v") ? in.v
                                                        : in.beta;
    tensor.as<float>()[75 * tensor.view().strides[0]] = quiet_nan;  // one element of one head
    const OracleResult expected = oracle_recurrent(p, in.views());
    StageDriver driver = test::make_driver(p, in);
    test::run_form(driver, Form::one_pass);
    const auto same_places = [](const TensorView& got, const std::vector<double>& want) {
      for (std::size_t i = 0; i < want.size(); ++i) {
        if (std::isnan(got.as<float>()[i]) != std::isnan(want[i])) return false;
      }
      return true;
    };
    CHECK(same_places(driver["o"], expected.o));
    CHECK(same_places(driver["final_state"], expected.final_state));
  }
}

TEST_CASE("rows that no sequence owns are neither read nor written")
{
  Problem p = small_problem();
  const Inputs drawn = Inputs::draw(p, {70, 65, 40}, Distribution::random_decay, 33);
  const std::int64_t owned = 70 + 65;
  const std::int64_t row = std::int64_t{p.v_heads} * p.v_dim;
  Inputs in = drawn;
  for (HostTensor* tensor : {&in.q, &in.k, &in.v, &in.g, &in.beta}) {
    const std::int64_t stride = tensor->view().strides[0];
    std::fill_n(tensor->as<float>() + owned * stride, 40 * stride, quiet_nan);
  }
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver whole = test::make_driver(p, drawn);
    test::run_form(whole, form);
    StageDriver driver = test::make_driver(p, in);
    driver.add_index("cu_seqlens", {0, 70, owned, owned});
    driver.add_poisoned("o", DType::f32, {owned + 40, p.v_heads, p.v_dim});
    test::run_form(driver, form);
    const float* o = driver["o"].as<float>();
    CHECK(same_bits(o, whole["o"].as<float>(), owned * row));
    CHECK(std::all_of(o + owned * row, o + (owned + 40) * row,
                      [](float x) { return std::isnan(x); }));
    CHECK(finite(driver["final_state"].as<float>(), driver["final_state"].elements()));

    driver.run("zero_padding");
    CHECK(same_bits(o, whole["o"].as<float>(), owned * row));
    CHECK(std::all_of(o + owned * row, o + (owned + 40) * row, [](float x) { return x == 0.0F; }));
  }
}

TEST_CASE("g = -inf resets the state exactly, however often")
{
  const Problem p = small_problem();
  for (const std::int64_t apart : {1, 2, 7, 64, 97}) {
    CAPTURE(apart);
    Inputs in = Inputs::draw(p, {150, 64}, Distribution::random_decay, 34);
    float* g = in.g.as<float>();
    for (std::int64_t t = 0; t < 214; t += apart) g[t * 2] = g[t * 2 + 1] = -infinity;
    // The sum over a chunk grows by 104 with each reset, and its rounding with it.
    check_against_oracle(p, in, apart < 32 ? 2e-4 : 1e-5);
  }
}

TEST_CASE("huge and strong decays agree with the recurrence")
{
  const Problem p = small_problem();
  check_against_oracle(p, Inputs::draw(p, {200}, Distribution::huge, 35), 1e-5);
  check_against_oracle(p, Inputs::draw(p, {200}, Distribution::strong, 35), 2e-5);
  // One huge token among weak ones must not blur its neighbours.
  Inputs in = Inputs::draw(p, {200}, Distribution::random_decay, 35);
  in.g.as<float>()[2 * 10] = -1e5F;
  check_against_oracle(p, in, 1e-5);
}

TEST_CASE("g above zero grows the state and is not clamped")
{
  const Problem p = small_problem();
  Inputs in = Inputs::draw(p, {190}, Distribution::random_decay, 36);
  float* g = in.g.as<float>();
  for (std::int64_t i = 0; i < in.g.view().elements(); ++i) g[i] = i % 3 == 0 ? 0.3F : -0.05F;
  check_against_oracle(p, in, 1e-4);
}
