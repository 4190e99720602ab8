#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gdnflow {

/// One element where two tensors differ.
struct WorstElement {
  std::vector<std::int64_t> index;  ///< by the tensors' dimensions
  double got = 0;
  double expected = 0;
};

/// How a result differs from what was expected.
struct Comparison {
  double relative_rms = 0;  ///< ||got - expected|| / ||expected|| over finite pairs; the norm of
                            ///< the difference where the expected norm is 0
  double max_abs = 0;
  std::int64_t elements = 0;
  std::int64_t over_tolerance = 0;        ///< |got - expected| > absolute + relative |expected|,
                                          ///< or a mismatch of the next kind
  std::int64_t nonfinite_mismatches = 0;  ///< finite on one side only, or a different infinity
  WorstElement worst{};  ///< by difference / tolerance; a mismatch comes first, then the
                         ///< first by index

  /// Whether the measures are within bounds. Pairs that are NaN on both sides agree.
  bool within(double most_relative_rms) const noexcept {
    return nonfinite_mismatches == 0 && relative_rms <= most_relative_rms;
  }
};

/// The element-wise tolerance: 5e-3 + 5e-3 |expected| is the pass mark on benchmark data.
struct Tolerance {
  double absolute = 5e-3;
  double relative = 5e-3;
};

/// Compares host tensors of any floating type and strides. Errors: invalid_argument where extents
/// differ or a tensor is not on the host.
GDNFLOW_API Comparison compare(const TensorView& got, const TensorView& expected,
                               Tolerance tolerance = {});
/// Against fp64 values, row-major, one for each element of `got`.
GDNFLOW_API Comparison compare(const TensorView& got, std::span<const double> expected,
                               Tolerance tolerance = {});
/// Dense tensors on one CUDA device; the expected one may be f32 or given as fp64 device memory.
/// Waits for the result. Errors: as above; unsupported without CUDA; cuda.
GDNFLOW_API Comparison compare_on_device(const TensorView& got, const TensorView& expected,
                                         Tolerance tolerance = {});
GDNFLOW_API Comparison compare_on_device(const TensorView& got, const double* expected,
                                         Tolerance tolerance = {});

/// One line: measures and the worst element. With `cu_seqlens` a leading token index is given as
/// sequence and token within it: "rel_rms 3.1e-03, max_abs 1.2e-02, worst at sequence 2 token 17
/// head 3 column 5: got 0.1, expected 0.2".
GDNFLOW_API std::string to_string(const Comparison& comparison,
                                  std::span<const std::int64_t> cu_seqlens = {});

}  // namespace gdnflow
