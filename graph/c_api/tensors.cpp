#include "tensors.hpp"

#include "border.hpp"
#include "prefill_tensors.hpp"

#include <algorithm>
#include <cstring>
#include <span>

// DLPack's tensors as the library's views.

namespace gdnflow::c_api {
namespace {

DType type_of(const DLDataType& type, std::string_view name) {
  constexpr int boolean = 6;  // kDLBool, which older headers lack
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 32) return DType::f32;
    if (type.code == kDLFloat && type.bits == 16) return DType::f16;
    if (type.code == kDLBfloat && type.bits == 16) return DType::bf16;
    if (type.code == kDLInt && type.bits == 32) return DType::i32;
    if (type.code == kDLInt && type.bits == 64) return DType::i64;
    if ((type.code == kDLUInt || type.code == boolean) && type.bits == 8) return DType::u8;
  }
  refuse(
      fmt::format("{}: expected float 32 or 16, bfloat 16, int 32 or 64, or uint 8, of 1 lane, got "
                  "DLPack's code {} "
                  "with {} bits and {} lanes",
                  name, type.code, type.bits, type.lanes));
}

}  // namespace

Device device_of(const DLDevice& device, std::string_view name) {
  int type = 0;  // as a number: it may be none of the enumeration's
  static_assert(sizeof type == sizeof device.device_type);
  std::memcpy(&type, &device.device_type, sizeof type);
  if (type == kDLCPU) return {DeviceType::host, 0};
  if (type == kDLCUDA) return {DeviceType::cuda, device.device_id};
  refuse(fmt::format("{}: expected kDLCPU or kDLCUDA, got DLPack's device type {}", name, type));
}

TensorView view_of(const DLTensor& tensor, std::string_view name) {
  if (tensor.ndim < 1 || tensor.ndim > TensorView::max_rank) {
    refuse(fmt::format("{}: expected 1 to {} dimensions, got {}", name, TensorView::max_rank,
                       tensor.ndim));
  }
  expect(tensor.shape, fmt::format("{}: shape", name));
  const std::span<const std::int64_t> extents(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  for (const std::int64_t extent : extents) {
    if (extent < 0) refuse(fmt::format("{}: expected extents of at least 0, got {}", name, extent));
  }
  void* const data =
      tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  TensorView view =
      TensorView::dense(data, type_of(tensor.dtype, name), extents, device_of(tensor.device, name));
  if (tensor.strides != nullptr) std::copy_n(tensor.strides, tensor.ndim, view.strides.begin());
  return view;
}

void bind(PrefillTensors& tensors, const char* name, const DLTensor* tensor) {
  const std::string_view text = expect_text(name, "name");
  const TensorName& known = find_named(tensor_names, &TensorName::edge, "name", text);
  tensors.*known.member = tensor == nullptr ? TensorView{} : view_of(*tensor, text);
}

}  // namespace gdnflow::c_api
