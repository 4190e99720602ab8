#include <gdnflow/error.hpp>

#include "device/tensor_map.hpp"

#include <string>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace gdnflow::device {
namespace {

// Through the runtime, so that the library needs no link to the driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw Error(ErrorCode::cuda, "tensor maps: expected a driver with cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return function;
}

}  // namespace

CUtensorMap tile_map(const TensorView& view, std::uint32_t tokens) {
  constexpr std::uint32_t columns = 64;
  const auto element = static_cast<cuuint64_t>(size_of(view.dtype));
  // A map has no empty extent; a tensor of no tokens is never read through it.
  const auto extent = [&](int i) {
    return static_cast<cuuint64_t>(view.extents[i] > 0 ? view.extents[i] : 1);
  };
  const cuuint64_t extents[3] = {extent(2), extent(1), extent(0)};
  // The stride of an extent of one is never used, but has to look like one.
  const auto stride = [&](int i, cuuint64_t dense) {
    return view.extents[i] > 1 ? static_cast<cuuint64_t>(view.strides[i]) * element : dense;
  };
  const cuuint64_t row = extent(2) * element;
  const cuuint64_t heads = stride(1, row);
  const cuuint64_t strides[2] = {heads, stride(0, extent(1) * heads)};
  const cuuint32_t box[3] = {columns, 1, tokens};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUtensorMapDataType type = view.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // No tokens may come with no memory: an aligned address that nothing will read.
  void* const base = view.data != nullptr ? view.data : reinterpret_cast<void*>(row);
  CUtensorMap map;
  const CUresult status =
      encoder()(&map, type, 3, base, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::cuda, "tensor map of " + to_string(view) + ": refused with code " +
                                     std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace gdnflow::device
