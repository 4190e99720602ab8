#pragma once

#include <gdnflow/error.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include <Eigen/Core>

/// Typed access to host tensors whose element type is known only at run time. The type is looked at
/// once, outside the loop: the callables below are instantiated for each type.
namespace gdnflow::host {

namespace detail {
[[noreturn]] inline void refuse_type(const char* expected, DType got) {
  throw Error(ErrorCode::invalid_argument, std::string("tensor type: expected ") + expected +
                                               ", got " + std::string(to_string(got)));
}
}  // namespace detail

/// Calls `f(std::type_identity<T>{})` with T = float, Eigen::bfloat16 or Eigen::half, and returns
/// what it returns. All three convert to and from float by static_cast, rounding to nearest even.
/// Errors: invalid_argument for a type that is not floating.
template <class F>
decltype(auto) dispatch_float(DType type, F&& f) {
  switch (type) {
    case DType::f32:
      return std::forward<F>(f)(std::type_identity<float>{});
    case DType::bf16:
      return std::forward<F>(f)(std::type_identity<Eigen::bfloat16>{});
    case DType::f16:
      return std::forward<F>(f)(std::type_identity<Eigen::half>{});
    default:
      detail::refuse_type("f32, bf16 or f16", type);
  }
}

/// The same for lengths and offsets: T = std::int32_t or std::int64_t.
template <class F>
decltype(auto) dispatch_index(DType type, F&& f) {
  switch (type) {
    case DType::i32:
      return std::forward<F>(f)(std::type_identity<std::int32_t>{});
    case DType::i64:
      return std::forward<F>(f)(std::type_identity<std::int64_t>{});
    default:
      detail::refuse_type("i32 or i64", type);
  }
}

/// Elements between the start of a view and the element (or row) at the leading indices given.
template <class... Index>
std::int64_t offset_of(const TensorView& view, Index... index) noexcept {
  std::int64_t offset = 0;
  int dimension = 0;
  ((offset += static_cast<std::int64_t>(index) * view.strides[dimension++]), ...);
  return offset;
}

/// Reads `count` contiguous elements of a floating tensor, from element `offset` on, as float or
/// double. Errors: as dispatch_float.
template <class Real>
void load(const TensorView& view, std::int64_t offset, std::int64_t count, Real* out) {
  static_assert(std::is_floating_point_v<Real>);
  dispatch_float(view.dtype, [&]<class T>(std::type_identity<T>) {
    const T* in = view.as<const T>() + offset;
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<Real>(static_cast<float>(in[i]));
  });
}

/// Writes `count` contiguous elements, rounded to nearest even. A double is rounded to fp32 first,
/// as a kernel's accumulator would be. Errors: as dispatch_float.
template <class Real>
void store(const TensorView& view, std::int64_t offset, std::int64_t count, const Real* in) {
  static_assert(std::is_floating_point_v<Real>);
  dispatch_float(view.dtype, [&]<class T>(std::type_identity<T>) {
    T* out = view.as<T>() + offset;
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<float>(in[i]));
  });
}

}  // namespace gdnflow::host
