#include <gdnflow/error.hpp>
#include <gdnflow/tensor.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {

std::string_view to_string(DeviceType type) noexcept {
  return type == DeviceType::host ? "host" : "cuda";
}

std::string to_string(Device device) {
  return device.type == DeviceType::host ? "host" : fmt::format("cuda:{}", device.index);
}

TensorView TensorView::dense(void* data, DType dtype, std::span<const std::int64_t> extents,
                             Device device) {
  if (extents.size() > max_rank) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("tensor rank: expected at most {}, got {}", +max_rank, extents.size()));
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<std::int32_t>(extents.size());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (extents[i] < 0) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("tensor extent {}: expected at least 0, got {}", i, extents[i]));
    }
    view.extents[i] = extents[i];
    view.strides[i] = stride;
    if (__builtin_mul_overflow(stride, extents[i], &stride)) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("tensor extents: expected less than 2^63 elements, got [{}]",
                              fmt::join(extents, ",")));
    }
  }
  return view;
}

std::int64_t TensorView::elements() const noexcept {
  std::int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= extents[i];
  return count;
}

bool TensorView::is_dense() const noexcept {
  std::int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (extents[i] != 1 && strides[i] != stride) return false;
    stride *= extents[i];
  }
  return true;
}

std::string to_string(const TensorView& view) {
  const auto list = [&](const auto& values) {
    return fmt::format("[{}]", fmt::join(values.begin(), values.begin() + view.rank, ","));
  };
  std::string text = fmt::format("{}{}", to_string(view.dtype), list(view.extents));
  if (!view.is_dense()) text += " strides " + list(view.strides);
  return text + " " + to_string(view.device);
}

}  // namespace gdnflow
