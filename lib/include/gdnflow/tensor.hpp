#pragma once

#include <gdnflow/dtype.hpp>
#include <gdnflow/export.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace gdnflow {

enum class DeviceType : std::uint8_t { host, cuda };

GDNFLOW_API std::string_view to_string(DeviceType type) noexcept;

/// A place where memory lives and code runs; `index` is the CUDA ordinal, 0 for the host.
struct Device {
  DeviceType type = DeviceType::host;
  std::int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// "host", "cuda:0".
GDNFLOW_API std::string to_string(Device device);

/// A typed, strided window on memory that somebody else owns. Trivially copyable. Maps one to one
/// onto DLPack's DLTensor (strides in elements, never in bytes). Safe to share between threads as
/// long as the memory behind it is.
struct TensorView {
  static constexpr int max_rank = 6;

  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  std::int32_t rank = 0;
  std::array<std::int64_t, max_rank> extents{};
  std::array<std::int64_t, max_rank> strides{};  ///< elements

  /// A densely packed, row-major view. Errors: invalid_argument for a rank over `max_rank` or a
  /// negative extent.
  GDNFLOW_API static TensorView dense(void* data, DType dtype,
                                      std::span<const std::int64_t> extents, Device device = {});
  static TensorView dense(void* data, DType dtype, std::initializer_list<std::int64_t> extents,
                          Device device = {}) {
    return dense(data, dtype, std::span(extents.begin(), extents.size()), device);
  }

  /// Product of the extents; 1 for rank 0.
  GDNFLOW_API std::int64_t elements() const noexcept;
  /// Bytes of the elements when densely packed.
  std::int64_t bytes() const noexcept {
    return elements() * static_cast<std::int64_t>(size_of(dtype));
  }
  /// Row-major without gaps (strides of extents of 1 are not looked at).
  GDNFLOW_API bool is_dense() const noexcept;

  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

/// "bf16[1025,2,128] cuda:0", with strides where the view is not dense.
GDNFLOW_API std::string to_string(const TensorView& view);

}  // namespace gdnflow
