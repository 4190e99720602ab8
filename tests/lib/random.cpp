#include "random/draw.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

using gdnflow::Rounded;
using namespace gdnflow::random;

namespace {

// The largest relative error of `ours` against the standard library over evenly spaced arguments.
template <class Ours, class Theirs>
double worst_relative(double low, double high, Ours ours, Theirs theirs) {
  constexpr int steps = 200'000;
  double worst = 0;
  for (int i = 0; i <= steps; ++i) {
    const double x = low + (high - low) * i / steps;
    const long double expected = theirs(static_cast<long double>(x));
    const long double error = std::abs(ours(Rounded(x)).value - expected);
    worst = std::max(worst, static_cast<double>(error / std::max(std::abs(expected), 1e-300L)));
  }
  return worst;
}

}  // namespace

TEST_CASE("the generator gives the words that its authors publish")
{
  const auto words = [](std::uint32_t c, std::uint64_t key) {
    const Words w = philox({{c, c, c, c}}, key);
    return std::vector<std::uint32_t>(w.w, w.w + 4);
  };
  CHECK(words(0, 0) ==
        std::vector<std::uint32_t>{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U});
  CHECK(words(0xffffffffU, ~std::uint64_t{0}) ==
        std::vector<std::uint32_t>{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU});
  const Words pi =
      philox({{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}}, 0x299f31d0a4093822ULL);
  CHECK(std::vector<std::uint32_t>(pi.w, pi.w + 4) ==
        std::vector<std::uint32_t>{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U});
}

TEST_CASE("elementary functions agree with the standard library's to 1e-14")
{
  constexpr double most = 1e-14;
  CHECK(worst_relative(-30, 30, exponential, [](long double x) { return std::exp(x); }) < most);
  CHECK(worst_relative(-700, 700, exponential, [](long double x) { return std::exp(x); }) < most);
  CHECK(worst_relative(1e-10, 2.5, logarithm, [](long double x) { return std::log(x); }) < most);
  CHECK(worst_relative(1, 1e9, logarithm, [](long double x) { return std::log(x); }) < most);
  CHECK(worst_relative(0, 1, logarithm_of_one_plus, [](long double x) { return std::log1p(x); }) <
        most);
  CHECK(worst_relative(0, 1e-6, logarithm_of_one_plus,
                       [](long double x) { return std::log1p(x); }) < most);
  CHECK(worst_relative(-30, 30, sigmoid, [](long double x) { return 1 / (1 + std::exp(-x)); }) <
        most);
  CHECK(worst_relative(-30, 30, softplus, [](long double x) { return std::log1p(std::exp(x)); }) <
        most);
  CHECK(worst_relative(-30, 30, log_sigmoid,
                       [](long double x) { return -std::log1p(std::exp(-x)); }) < most);
  CHECK(worst_relative(-30, 30, silu, [](long double x) { return x / (1 + std::exp(-x)); }) < most);
  CHECK(worst_relative(0, 100, square_root, [](long double x) { return std::sqrt(x); }) < most);
}

TEST_CASE("sine and cosine hold in every part of a turn")
{
  const long double two_pi = 2 * std::acos(-1.0L);
  double worst = 0;
  const auto check = [&](std::uint32_t word) {
    const long double angle = two_pi * (static_cast<long double>(word) + 0.5L) / 4294967296.0L;
    const SineCosine sc = sine_cosine_of_turn(word);
    worst = std::max(worst, static_cast<double>(std::abs(sc.sine.value - std::sin(angle))));
    worst = std::max(worst, static_cast<double>(std::abs(sc.cosine.value - std::cos(angle))));
  };
  for (std::uint64_t word = 0; word < (std::uint64_t{1} << 32); word += 40'009) {
    check(static_cast<std::uint32_t>(word));
  }
  for (std::uint32_t octant = 0; octant < 8; ++octant) {
    for (std::uint32_t i = 0; i < 4; ++i) check((octant << 29) + i - 2);
  }
  CHECK(worst < 1e-15);
}

TEST_CASE("normal numbers have the moments of the normal distribution")
{
  constexpr std::int64_t count = 1 << 20;
  Normals normals(7, Sequence::v, 0);
  double sums[9] = {};
  double previous = 0, lagged = 0;
  std::int64_t beyond_two = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = normals.next().value;
    REQUIRE(std::abs(x) < 6.9);
    double power = 1;
    for (double& sum : sums) {
      sum += power;
      power *= x;
    }
    lagged += x * previous;
    previous = x;
    if (std::abs(x) > 2) ++beyond_two;
  }
  // Five standard errors each: the variance of x^n is E x^2n - (E x^n)^2.
  const auto moment = [&](int n) { return sums[n] / count; };
  const double root = std::sqrt(static_cast<double>(count));
  CHECK(std::abs(moment(1)) < 5 / root);
  CHECK(std::abs(moment(2) - 1) < 5 * std::sqrt(2.0) / root);
  CHECK(std::abs(moment(3)) < 5 * std::sqrt(15.0) / root);
  CHECK(std::abs(moment(4) - 3) < 5 * std::sqrt(96.0) / root);
  CHECK(std::abs(moment(6) - 15) < 5 * std::sqrt(10395.0 - 225.0) / root);
  CHECK(std::abs(lagged / count) < 5 / root);
  CHECK(std::abs(static_cast<double>(beyond_two) / count - 0.0455003) < 5 * 0.2084 / root);
}

TEST_CASE("a walk gives the same numbers wherever it begins")
{
  std::vector<double> all;
  Normals from_start(3, Sequence::q, 0);
  for (int i = 0; i < 40; ++i) all.push_back(from_start.next().value);
  for (std::int64_t first = 0; first < 9; ++first) {
    Normals later(3, Sequence::q, first);
    for (std::int64_t i = first; i < 40; ++i) CHECK(later.next().value == all[i]);
  }
}

TEST_CASE("seeds and sequences are independent")
{
  Normals a(1, Sequence::q, 0), b(1, Sequence::k, 0), c(2, Sequence::q, 0);
  double ab = 0, ac = 0;
  constexpr int count = 1 << 16;
  for (int i = 0; i < count; ++i) {
    const double x = a.next().value;
    ab += x * b.next().value;
    ac += x * c.next().value;
  }
  CHECK(std::abs(ab) < 5 * std::sqrt(count));
  CHECK(std::abs(ac) < 5 * std::sqrt(count));
}
