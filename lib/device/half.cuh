#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// 16-bit floating elements, bf16 and fp16, by compile-time type: conversion, rounded to nearest
// even, and pairs in one register. For element types known only at run time see element.cuh.

namespace gdnflow::device {

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

/// Two neighbours in memory order as one register: `low` has the lower address.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  // The intrinsic's result is taken apart and put together again where its halves are looked at.
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// The inverse of `pack`.
template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

/// Eight neighbours, 16-byte aligned.
template <class T>
__device__ __forceinline__ void load_8(float (&x)[8], const T* source) {
  const uint4 packed = *reinterpret_cast<const uint4*>(source);
  const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ void store_8(T* destination, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(destination) = make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                                      pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}

}  // namespace gdnflow::device
