#pragma once

#include <gdnflow/problem.hpp>
#include <gdnflow/tensor.hpp>

#include "host/convert.hpp"

#include <cstdint>
#include <type_traits>

#include <Eigen/Core>

namespace gdnflow::stages::host {

/// What the host variants compute on: fp32, row-major, one row a token.
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;

/// A matrix inside a host tensor of any floating type and strides.
struct Window {
  TensorView view;  ///< gives the memory and its type
  std::int64_t offset = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
};

/// Rows [first, first + count) of one head of a [T, H, D] tensor.
inline Window rows_of(const TensorView& view, std::int64_t head, std::int64_t first,
                      std::int64_t count) {
  return {view,
          gdnflow::host::offset_of(view, first, head),
          count,
          view.extents[2],
          view.strides[0],
          view.strides[2]};
}

/// The same tokens of one head of a [T, H] tensor, as a column.
inline Window column_of(const TensorView& view, std::int64_t head, std::int64_t first,
                        std::int64_t count) {
  return {view, gdnflow::host::offset_of(view, first, head), count, 1, view.strides[0], 1};
}

/// One state of a [P, Hv, r, c] tensor as [Dk, Dv], whatever its layout.
inline Window state_of(const TensorView& view, std::int64_t row, std::int64_t head,
                       StateLayout layout) {
  const bool kv = layout == StateLayout::kv;
  const int key = kv ? 2 : 3;
  const int value = kv ? 3 : 2;
  return {view,
          gdnflow::host::offset_of(view, row, head),
          view.extents[key],
          view.extents[value],
          view.strides[key],
          view.strides[value]};
}

namespace detail {
using WindowStride = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline WindowStride stride_of(const Window& w) { return {w.row_stride, w.column_stride}; }
}  // namespace detail

/// Reads a window as fp32 into `out`, a Matrix or (for one column) a Vector, which takes its size.
/// Errors: invalid_argument for a tensor that is not floating.
template <class Plain>
void load(const Window& w, Plain& out) {
  out.resize(w.rows, w.columns);
  gdnflow::host::dispatch_float(w.view.dtype, [&]<class T>(std::type_identity<T>) {
    const T* data = w.view.as<const T>() + w.offset;
    out = Eigen::Map<const detail::RowMajor<T>, 0, detail::WindowStride>(data, w.rows, w.columns,
                                                                         detail::stride_of(w))
              .template cast<float>();
  });
}

/// Writes an expression of the window's size, rounded to nearest even. Errors: as `load`.
template <class Expression>
void store(const Expression& in, const Window& w) {
  gdnflow::host::dispatch_float(w.view.dtype, [&]<class T>(std::type_identity<T>) {
    T* data = w.view.as<T>() + w.offset;
    Eigen::Map<detail::RowMajor<T>, 0, detail::WindowStride>(
        data, w.rows, w.columns, detail::stride_of(w)) = in.template cast<T>();
  });
}

}  // namespace gdnflow::stages::host
