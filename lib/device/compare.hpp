#pragma once

#include <gdnflow/compare.hpp>

#include "host/difference.hpp"

namespace gdnflow::device {

/// The device's half of compare_on_device, for dense tensors that have been checked. Exactly one
/// of `expected` and `expected_double` is not null.
Difference compare(const TensorView& got, const TensorView* expected, const double* expected_double,
                   Tolerance tolerance);

}  // namespace gdnflow::device
