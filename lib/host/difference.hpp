#pragma once

#include "rounded.hpp"

#include <cstdint>

namespace gdnflow {

/// The running measures of a comparison. Merging is independent of order up to the rounding of the
/// two sums, so that host and device name the same worst element.
struct Difference {
  double squared_difference = 0;
  double squared_expected = 0;
  double max_abs = 0;
  std::int64_t over_tolerance = 0;
  std::int64_t nonfinite_mismatches = 0;
  double worst_share = 0;         ///< |difference| over its tolerance
  std::int64_t worst_index = -1;  ///< row-major; -1: no element yet
  double worst_got = 0;
  double worst_expected = 0;
};

GDNFLOW_HOST_DEVICE inline bool is_finite_number(double x) { return x - x == 0; }

/// Shares that no quotient reaches: a mismatch, and a difference where none is tolerated.
inline constexpr double most_share = 1.7976931348623157e308;
inline constexpr double beyond_bounds = most_share / 2;

/// The measures of one element.
GDNFLOW_HOST_DEVICE inline Difference difference_of(double got, double expected, double absolute,
                                                    double relative, std::int64_t index) {
  Difference d;
  d.worst_index = index;
  d.worst_got = got;
  d.worst_expected = expected;
  if (is_finite_number(got) && is_finite_number(expected)) {
    const double difference = got - expected;
    d.max_abs = difference < 0 ? -difference : difference;
    d.squared_difference = difference * difference;
    d.squared_expected = expected * expected;
    const Rounded bound =
        Rounded(absolute) + Rounded(relative) * (expected < 0 ? -expected : expected);
    d.over_tolerance = d.max_abs > bound.value ? 1 : 0;
    d.worst_share = bound.value > 0 ? d.max_abs / bound.value : d.max_abs > 0 ? beyond_bounds : 0;
    return d;
  }
  const bool both_nan = got != got && expected != expected;
  const bool same = both_nan || got == expected;
  d.nonfinite_mismatches = same ? 0 : 1;
  d.over_tolerance = d.nonfinite_mismatches;
  d.worst_share = same ? 0 : most_share;
  return d;
}

GDNFLOW_HOST_DEVICE inline Difference merge(const Difference& a, const Difference& b) {
  const bool b_is_worse =
      b.worst_index >= 0 && (a.worst_index < 0 || b.worst_share > a.worst_share ||
                             (b.worst_share == a.worst_share && b.worst_index < a.worst_index));
  Difference out = b_is_worse ? b : a;
  out.squared_difference = a.squared_difference + b.squared_difference;
  out.squared_expected = a.squared_expected + b.squared_expected;
  out.max_abs = a.max_abs > b.max_abs ? a.max_abs : b.max_abs;
  out.over_tolerance = a.over_tolerance + b.over_tolerance;
  out.nonfinite_mismatches = a.nonfinite_mismatches + b.nonfinite_mismatches;
  return out;
}

}  // namespace gdnflow
