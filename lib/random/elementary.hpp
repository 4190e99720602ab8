#pragma once

#include "rounded.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

/// Elementary functions from correctly rounded operations only, so that every machine gives the
/// same bits. Relative error below 1e-14 on the ranges stated, which tests compare with the
/// standard library's.
namespace gdnflow::random {

/// c0 + x (c1 + x (c2 + ...)).
GDNFLOW_HOST_DEVICE inline Rounded horner(Rounded /*x*/, double c) { return c; }
template <class... Rest>
GDNFLOW_HOST_DEVICE inline Rounded horner(Rounded x, double c, Rest... rest) {
  return Rounded(c) + x * horner(x, rest...);
}

GDNFLOW_HOST_DEVICE inline Rounded square_root(Rounded x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x.value);
#else
  return std::sqrt(x.value);
#endif
}

/// 2^n for n in [-1022, 1023].
GDNFLOW_HOST_DEVICE inline Rounded power_of_two(std::int32_t n) {
  const std::uint64_t bits = static_cast<std::uint64_t>(n + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline constexpr double ln2_high = 0x1.62e42fefa38p-1;   // the last 11 bits are zero: n * this is
inline constexpr double ln2_low = 0x1.ef35793c7673p-45;  // exact for |n| < 2048

/// e^x for x in [-700, 700]: e^r by its series, |r| <= ln 2 / 2, times a power of two.
GDNFLOW_HOST_DEVICE inline Rounded exponential(Rounded x) {
  const Rounded turns = x * 0x1.71547652b82fep+0;
  const auto n = static_cast<std::int32_t>((turns + (turns.value < 0 ? -0.5 : 0.5)).value);
  const Rounded r = (x - Rounded(n) * ln2_high) - Rounded(n) * ln2_low;
  const Rounded series =
      horner(r, 1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
             1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800);
  return series * power_of_two(n);
}

/// ln x for normal x > 0: x = m 2^n with m in [1/sqrt 2, sqrt 2), ln m = 2 atanh((m - 1)/(m + 1)).
GDNFLOW_HOST_DEVICE inline Rounded logarithm(Rounded x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x.value, sizeof bits);
  auto n = static_cast<std::int32_t>(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  if (mantissa > 0x1.6a09e667f3bcdp+0) {
    mantissa *= 0.5;
    ++n;
  }
  const Rounded s = (Rounded(mantissa) - 1.0) / (Rounded(mantissa) + 1.0);
  const Rounded series = horner(s * s, 2.0, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13,
                                2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21);
  return Rounded(n) * ln2_high + (s * series + Rounded(n) * ln2_low);
}

/// ln(1 + y) for y in [0, 1]; the quotient undoes what 1 + y rounded away.
GDNFLOW_HOST_DEVICE inline Rounded logarithm_of_one_plus(Rounded y) {
  const Rounded sum = Rounded(1.0) + y;
  if (sum.value == 1.0) return y;
  return logarithm(sum) * (y / (sum - 1.0));
}

struct SineCosine {
  Rounded sine;
  Rounded cosine;
};

/// Sine and cosine of 2 pi (word + 1/2) / 2^32. The angle is folded to at most an eighth of a turn
/// in integers, where nothing rounds.
GDNFLOW_HOST_DEVICE inline SineCosine sine_cosine_of_turn(std::uint32_t word) {
  const std::uint32_t quarter = (word + 0x20000000U) >> 30;
  const auto folded = static_cast<std::int32_t>(word - (quarter << 30));
  const Rounded x = (Rounded(folded) + 0.5) * 0x1.921fb54442d18p-30;  // 2 pi / 2^32
  const Rounded square = x * x;
  const Rounded sine = x * horner(square, 1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880,
                                  -1.0 / 39916800, 1.0 / 6227020800, -1.0 / 1307674368000);
  const Rounded cosine =
      horner(square, 1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800,
             1.0 / 479001600, -1.0 / 87178291200, 1.0 / 20922789888000);
  switch (quarter & 3U) {
    case 0:
      return {sine, cosine};
    case 1:
      return {cosine, -sine};
    case 2:
      return {-sine, -cosine};
    default:
      return {-cosine, sine};
  }
}

/// 1 / (1 + e^-x), |x| <= 700.
GDNFLOW_HOST_DEVICE inline Rounded sigmoid(Rounded x) {
  return Rounded(1.0) / (Rounded(1.0) + exponential(-x));
}

/// ln(1 + e^x), |x| <= 700, without overflow or cancellation on either side.
GDNFLOW_HOST_DEVICE inline Rounded softplus(Rounded x) {
  const bool positive = x.value > 0;
  const Rounded tail = logarithm_of_one_plus(exponential(positive ? -x : x));
  return positive ? x + tail : tail;
}

/// ln sigmoid(x) = -softplus(-x).
GDNFLOW_HOST_DEVICE inline Rounded log_sigmoid(Rounded x) { return -softplus(-x); }

/// x sigmoid(x).
GDNFLOW_HOST_DEVICE inline Rounded silu(Rounded x) { return x * sigmoid(x); }

}  // namespace gdnflow::random
