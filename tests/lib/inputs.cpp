#include <gdnflow/inputs.hpp>

#include "host/convert.hpp"
#include "support/expect_error.hpp"
#include "support/tensor.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::expect_error;
using gdnflow::test::HostTensor;

namespace {

std::vector<double> filled(InputKind kind, Distribution distribution,
                           std::vector<std::int64_t> extents, DType type = DType::f32,
                           std::uint64_t seed = 1) {
  const HostTensor t(type, std::move(extents));
  fill_input(kind, distribution, seed, t);
  std::vector<double> values(static_cast<std::size_t>(t.view().elements()));
  host::load(t.view(), 0, t.view().elements(), values.data());
  return values;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x;
  return sum / static_cast<double>(values.size());
}

double row_norm(const std::vector<double>& values, std::int64_t row, std::int64_t dim) {
  double squares = 0;
  for (std::int64_t i = row * dim; i < (row + 1) * dim; ++i) squares += values[i] * values[i];
  return std::sqrt(squares);
}

}  // namespace

TEST_CASE("every distribution's name parses back")
{
  CHECK(distributions().size() == 10);
  for (const Distribution d : distributions()) CHECK(parse_distribution(to_string(d)) == d);
  CHECK_FALSE(parse_distribution("random").has_value());
}

TEST_CASE("numbers depend on seed, kind and index alone: a longer tensor begins as a shorter one")
{
  for (const Distribution d : distributions()) {
    CAPTURE(to_string(d));
    for (const InputKind kind : {InputKind::q, InputKind::k, InputKind::v}) {
      const auto longer = filled(kind, d, {37, 2, 7});
      const auto shorter = filled(kind, d, {5, 2, 7});
      CHECK(std::equal(shorter.begin(), shorter.end(), longer.begin()));
    }
    const auto longer = filled(InputKind::g, d, {3000, 3});
    const auto shorter = filled(InputKind::g, d, {5, 3});
    CHECK(std::equal(shorter.begin(), shorter.end(), longer.begin()));
  }
  CHECK(filled(InputKind::v, Distribution::random_decay, {4, 2, 8}, DType::f32, 1) !=
        filled(InputKind::v, Distribution::random_decay, {4, 2, 8}, DType::f32, 2));
  CHECK(filled(InputKind::q, Distribution::random_decay, {4, 2, 8}) !=
        filled(InputKind::k, Distribution::random_decay, {4, 2, 8}));
}

TEST_CASE("narrow types hold the fp32 numbers rounded")
{
  for (const DType type : {DType::bf16, DType::f16}) {
    const auto wide = filled(InputKind::q, Distribution::correlated, {11, 2, 33});
    const auto narrow = filled(InputKind::q, Distribution::correlated, {11, 2, 33}, type);
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const HostTensor one(type, {1});
      host::store(one, 0, 1, &wide[i]);
      double rounded = 0;
      host::load(one.view(), 0, 1, &rounded);
      CHECK(narrow[i] == rounded);
    }
  }
}

TEST_CASE("q and k have unit rows, correlated ones a common direction")
{
  for (const std::int64_t dim : {1, 3, 64, 128}) {
    for (const Distribution d : {Distribution::random_decay, Distribution::correlated}) {
      const auto k = filled(InputKind::k, d, {20, 3, dim});
      for (std::int64_t row = 0; row < 60; ++row) {
        CHECK(row_norm(k, row, dim) == doctest::Approx(1).epsilon(1e-6));
      }
    }
  }
  const auto cosine = [](Distribution d) {
    const auto k = filled(InputKind::k, d, {100, 1, 128});
    double sum = 0;
    for (int row = 0; row + 1 < 100; row += 2) {
      for (int i = 0; i < 128; ++i) sum += k[row * 128 + i] * k[(row + 1) * 128 + i];
    }
    return sum / 50;
  };
  CHECK(std::abs(cosine(Distribution::random_decay)) < 0.06);
  CHECK(cosine(Distribution::correlated) > 0.4);
}

TEST_CASE("un-normalised keys have lengths from 0 to 2, queries of 1")
{
  const auto k = filled(InputKind::k, Distribution::unnormalized, {500, 2, 16});
  const auto q = filled(InputKind::q, Distribution::unnormalized, {500, 2, 16});
  double sum = 0, least = 2, most = 0;
  for (std::int64_t row = 0; row < 1000; ++row) {
    const double norm = row_norm(k, row, 16);
    sum += norm;
    least = std::min(least, norm);
    most = std::max(most, norm);
    CHECK(row_norm(q, row, 16) == doctest::Approx(1).epsilon(1e-6));
  }
  CHECK(std::abs(sum / 1000 - 1) < 0.1);
  CHECK(least < 0.05);
  CHECK(most > 1.95);
  CHECK(most < 2.0001);
}

TEST_CASE("q and k to be normalised have lengths from 2^-4 to 2^4, each row its own")
{
  const auto q = filled(InputKind::raw_q, Distribution::random_decay, {500, 2, 16});
  const auto k = filled(InputKind::raw_k, Distribution::random_decay, {500, 2, 16});
  const auto unit = filled(InputKind::k, Distribution::random_decay, {500, 2, 16});
  double sum = 0, least = 0, most = 0, product = 0;
  for (std::int64_t row = 0; row < 1000; ++row) {
    const double of_q = std::log2(row_norm(q, row, 16));
    const double of_k = std::log2(row_norm(k, row, 16));
    sum += of_k;
    product += of_q * of_k;
    least = std::min(least, of_k);
    most = std::max(most, of_k);
    CHECK(k[row * 16] == doctest::Approx(unit[row * 16] * std::exp2(of_k)).epsilon(1e-5));
  }
  CHECK(std::abs(sum / 1000) < 0.3);
  CHECK(std::abs(product / 1000) < 0.6);
  CHECK((least < -3.9 && least >= -4.0001));
  CHECK((most > 3.9 && most <= 4.0001));
}

TEST_CASE("beta is the sigmoid of a normal number")
{
  const auto beta = filled(InputKind::beta, Distribution::strong, {5000, 4});
  for (const double b : beta) REQUIRE((b > 0 && b < 1));
  CHECK(std::abs(mean(beta) - 0.5) < 0.01);
  double squares = 0;
  for (const double b : beta) squares += (b - 0.5) * (b - 0.5);
  CHECK(std::abs(squares / 20000 - 0.0433) < 0.003);  // the logit-normal's variance
}

TEST_CASE("the decay is as each distribution says")
{
  constexpr std::int64_t tokens = 4000;
  constexpr std::int64_t heads = 8;
  const auto gates = [](Distribution d) { return filled(InputKind::g, d, {tokens, heads}); };
  const auto usual = gates(Distribution::random_decay);
  for (const double g : usual) REQUIRE((g < 0 && g > -0.5));
  CHECK(std::abs(mean(usual) + 0.8060 / 16) < 0.001);  // E log sigmoid(N(0,1)) = -0.8060

  for (const double g : gates(Distribution::no_decay)) REQUIRE(g == 0);

  const auto mixed = gates(Distribution::mixed);
  const auto frozen = gates(Distribution::quarter_frozen);
  const auto reset = gates(Distribution::hard_reset);
  std::int64_t resets = 0;
  for (std::int64_t i = 0; i < tokens * heads; ++i) {
    REQUIRE(mixed[i] == (i / heads % 2 == 0 ? 0 : usual[i]));
    REQUIRE(frozen[i] == (i % heads % 4 == 0 ? 0 : usual[i]));
    if (reset[i] == -std::numeric_limits<double>::infinity()) {
      ++resets;
    } else {
      REQUIRE(reset[i] == usual[i]);
    }
  }
  CHECK(std::abs(static_cast<double>(resets) - tokens * heads / 97.0) < 5 * 18.2);

  for (const double g : gates(Distribution::strong)) REQUIRE((g >= -20 && g <= -1e-4F));
  CHECK(std::abs(mean(gates(Distribution::strong)) + 10) < 0.2);

  double logs = 0;
  for (const double g : gates(Distribution::huge)) {
    REQUIRE((g <= -999.9 && g >= -1.0001e6));
    logs += std::log10(-g);
  }
  CHECK(std::abs(logs / (tokens * heads) - 4.5) < 0.03);

  const auto model = gates(Distribution::model);
  double first = 0, last = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    first += model[t * heads];
    last += model[t * heads + heads - 1];
    for (std::int64_t h = 1; h < heads; ++h) REQUIRE(model[t * heads + h] < 0);
  }
  CHECK(first == 0);
  CHECK(std::abs(last / tokens + 16 * 1.3363) < 0.5);  // E softplus(N(1, 1/4)) = 1.3363
}

TEST_CASE("initial states and values are standard normal")
{
  const auto state = filled(InputKind::initial_state, Distribution::random_decay, {2, 3, 40, 50});
  const auto v = filled(InputKind::v, Distribution::no_decay, {100, 3, 40});
  for (const auto* values : {&state, &v}) {
    CHECK(std::abs(mean(*values)) < 0.05);
    double squares = 0;
    for (const double x : *values) squares += x * x;
    CHECK(std::abs(squares / static_cast<double>(values->size()) - 1) < 0.07);
  }
}

TEST_CASE("a uniform fill covers its interval")
{
  const HostTensor t(DType::f32, {100, 30});
  fill_uniform(5, -2.0F, 6.0F, t);
  double sum = 0;
  float least = 6, most = -2;
  for (int i = 0; i < 3000; ++i) {
    const float x = t.as<float>()[i];
    sum += x;
    least = std::min(least, x);
    most = std::max(most, x);
  }
  CHECK(least >= -2.0F);
  CHECK(least < -1.9F);
  CHECK(most < 6.0F);
  CHECK(most > 5.9F);
  CHECK(std::abs(sum / 3000 - 2) < 0.25);
}

TEST_CASE("tensors that an input does not fit are refused")
{
  const auto refused = [](std::initializer_list<std::string_view> parts, InputKind kind,
                          const TensorView& view) {
    expect_error(ErrorCode::invalid_argument, parts,
                 [&] { fill_input(kind, Distribution::mixed, 1, view); });
  };
  const HostTensor three(DType::bf16, {2, 2, 2});
  const HostTensor two(DType::f32, {2, 2});
  refused({"q", "[T, Hqk, Dk]", "f32[2,2]"}, InputKind::q, two);
  refused({"g", "[T, Hv]"}, InputKind::g, three);
  refused({"beta", "f32"}, InputKind::beta, HostTensor(DType::bf16, {2, 2}));
  refused({"initial_state", "4 dimensions"}, InputKind::initial_state, three);
  refused({"f32, bf16 or f16", "i32"}, InputKind::v, HostTensor(DType::i32, {2, 2, 2}));
  TensorView sparse = three;
  sparse.strides[0] = 8;
  refused({"dense"}, InputKind::v, sparse);
  TensorView missing = three;
  missing.data = nullptr;
  refused({"data"}, InputKind::v, missing);
  expect_error(ErrorCode::invalid_argument, {"low < high"},
               [&] { fill_uniform(1, 1.0F, 1.0F, two); });
  if (!built_with_cuda()) {
    TensorView elsewhere = three;
    elsewhere.device = {DeviceType::cuda, 0};
    expect_error(ErrorCode::unsupported, {"no CUDA"},
                 [&] { fill_input(InputKind::v, Distribution::mixed, 1, elsewhere); });
  }
  CHECK_NOTHROW(
      fill_input(InputKind::v, Distribution::mixed, 1, HostTensor(DType::f32, {0, 2, 2})));
}
