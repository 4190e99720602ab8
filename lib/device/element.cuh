#pragma once

#include <gdnflow/dtype.hpp>

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gdnflow::device {

/// A floating element by its run-time type, for code that is not worth an instantiation a type.
__device__ inline float load_element(const void* data, DType type, std::int64_t index) {
  switch (type) {
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

/// The same for writing, rounded to nearest even.
__device__ inline void store_element(void* data, DType type, std::int64_t index, float value) {
  switch (type) {
    case DType::bf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    case DType::f16:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace gdnflow::device
