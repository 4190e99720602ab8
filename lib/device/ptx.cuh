#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The instructions of sm_80 that CUDA C++ has no name for, one function each.

namespace gdnflow::device {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Starts a copy of 16 bytes from global to shared memory; with `valid` false writes zeros and
/// does not read `source`.
__device__ __forceinline__ void copy_16_async(void* destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(destination)),
               "l"(source), "r"(bytes)
               : "memory");
}

/// Copies 4 bytes to shared memory in the background.
__device__ __forceinline__ void copy_4_async(void* destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared_address(destination)),
               "l"(source)
               : "memory");
}

/// Waits for all copies that this thread has started. A barrier must follow before other threads
/// read them.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

/// Starts bringing the line of a global address into L2.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(pointer));
}

/// Loads four 8x8 matrices of 16-bit elements. Lane 8m + r gives the address in shared memory of
/// row r of matrix m; register m of lane l receives elements 2(l % 4) and 2(l % 4) + 1 of row l / 4
/// of matrix m.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&registers)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&registers)[4], const void* row) {
  load_matrix_x4(registers, shared_address(row));
}

/// The same of the transposed matrices.
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&registers)[4],
                                                          std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&registers)[4],
                                                          const void* row) {
  load_matrix_x4_transposed(registers, shared_address(row));
}

/// c += a b: a is 16x16, b 16x8, c 16x8 in fp32. With g = lane / 4 and t = lane % 4:
///   a[0]: row g, columns 2t, 2t+1   a[1]: row g + 8   a[2]: columns + 8   a[3]: both
///   b0: column g, rows 2t, 2t+1     b1: rows + 8
///   c[0], c[1]: row g, columns 2t, 2t+1   c[2], c[3]: row g + 8
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&c)[4],
                                                           const std::uint32_t (&a)[4],
                                                           std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                                    std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace gdnflow::device
