#pragma once

#include "device/barrier.cuh"

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Warp-group matrix products (sm_90a): D[64, N] += A[64, 16] B[16, N], fp32 accumulators in
// registers, B in shared memory, A in shared memory or registers. Tiles in shared memory are
// panels of 64 16-bit columns, 128 bytes a row, in the 128-byte swizzle that TMA writes.
//
// Accumulator layout, thread t of the group: rows (t / 32) * 16 + (t % 32) / 4 + {0, 8},
// columns 8 j + 2 (t % 4) + {0, 1}: d[4 j + 2 h + c] is row + 8 h, column 8 j + 2 (t % 4) + c.
// Packed in pairs, the accumulators of columns 16 k .. 16 k + 15 are the A fragment of step k.

namespace gdnflow::device {

/// Bytes of eight rows of a panel: the swizzle's period.
inline constexpr std::uint32_t swizzle_atom = 1024;

/// Byte offset of (row, 16-bit column < 64) in a panel.
__device__ __forceinline__ std::uint32_t panel_offset(int row, int column) {
  const std::uint32_t offset = row * 128 + column * 2;
  return offset ^ ((row & 7) << 4);
}

/// Descriptor of an operand whose reduction dimension is contiguous: rows of a panel are M or N.
/// `address` points at the panel's first row plus 32 bytes a step of 16.
__device__ __forceinline__ std::uint64_t descriptor_k_major(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | (std::uint64_t{1} << 16) |
         (std::uint64_t{swizzle_atom >> 4} << 32) | (std::uint64_t{1} << 62);
}

/// Descriptor of an operand whose M or N dimension is contiguous: rows of a panel are the reduction
/// dimension, panels of 64 columns lie `panel_stride` bytes apart. `address` points at the first
/// row of the step (2048 bytes a step of 16).
__device__ __forceinline__ std::uint64_t descriptor_mn_major(std::uint32_t address,
                                                             std::uint32_t panel_stride) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) |
         (static_cast<std::uint64_t>(panel_stride >> 4) << 16) |
         (std::uint64_t{swizzle_atom >> 4} << 32) | (std::uint64_t{1} << 62);
}

/// The descriptor of what lies `bytes` further in the same tile. One 32-bit addition: the address
/// is in the lower word, which shared memory cannot make overflow.
__device__ __forceinline__ std::uint64_t descriptor_at(std::uint64_t descriptor,
                                                       std::uint32_t bytes) {
  return (descriptor & 0xffffffff00000000U) |
         (static_cast<std::uint32_t>(descriptor) + (bytes >> 4));
}

/// Before the first product that reads registers or accumulators that ordinary code has written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `Pending` committed groups are in flight.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Ties accumulators to this point, so that the compiler moves no access to them across a wait.
template <int Count>
__device__ __forceinline__ void hold(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Ends the life of what accumulators held, at no cost: the first product into them overwrites it,
/// but is written as if it read them, which would keep their registers taken.
template <int Count>
__device__ __forceinline__ void forget(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "=f"(d[i]));
}

// The instruction names each accumulator, so that its text depends on the width; a macro writes it
// for each width and type. Operands after the accumulators are numbered on from there, which the
// last arguments say.

// clang-format off
#define GDNFLOW_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GDNFLOW_NAMES_32 \
  GDNFLOW_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GDNFLOW_NAMES_64                                                               \
  GDNFLOW_NAMES_32                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GDNFLOW_OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GDNFLOW_OUT_16_FROM(i) \
  GDNFLOW_OUT_4(i), GDNFLOW_OUT_4(i + 4), GDNFLOW_OUT_4(i + 8), GDNFLOW_OUT_4(i + 12)
#define GDNFLOW_OUT_16 GDNFLOW_OUT_16_FROM(0)
#define GDNFLOW_OUT_32 GDNFLOW_OUT_16, GDNFLOW_OUT_16_FROM(16)
#define GDNFLOW_OUT_64 GDNFLOW_OUT_32, GDNFLOW_OUT_16_FROM(32), GDNFLOW_OUT_16_FROM(48)

// o0 ... o6: the numbers of the operands that may follow COUNT accumulators.
#define GDNFLOW_WGMMA(ELEMENT, TYPE, WIDTH, COUNT, o0, o1, o2, o3, o4, o5, o6)                     \
  template <int TransposeA, int TransposeB>                                                        \
  __device__ __forceinline__ void wgmma_k16(ELEMENT, float (&d)[COUNT], std::uint64_t a,           \
                                            std::uint64_t b, int accumulate) {                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32." TYPE "." TYPE                \
                 " {" GDNFLOW_NAMES_##COUNT "}, " o0 ", " o1 ", p, 1, 1, " o3 ", " o4 ";\n}\n"     \
                 : GDNFLOW_OUT_##COUNT                                                             \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TransposeA), "n"(TransposeB));             \
  }                                                                                                \
  template <int TransposeB>                                                                        \
  __device__ __forceinline__ void wgmma_k16(ELEMENT, float (&d)[COUNT],                            \
                                            const std::uint32_t (&a)[4], std::uint64_t b,          \
                                            int accumulate) {                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32." TYPE "." TYPE                \
                 " {" GDNFLOW_NAMES_##COUNT "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4             \
                 ", p, 1, 1, " o6 ";\n}\n"                                                         \
                 : GDNFLOW_OUT_##COUNT                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),            \
                   "n"(TransposeB));                                                               \
  }
#define GDNFLOW_WGMMA_WIDTHS(ELEMENT, TYPE)                                               \
  GDNFLOW_WGMMA(ELEMENT, TYPE, "32", 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22") \
  GDNFLOW_WGMMA(ELEMENT, TYPE, "64", 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38") \
  GDNFLOW_WGMMA(ELEMENT, TYPE, "128", 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")

GDNFLOW_WGMMA_WIDTHS(__nv_bfloat16, "bf16")
GDNFLOW_WGMMA_WIDTHS(__half, "f16")

// clang-format on
#undef GDNFLOW_WGMMA_WIDTHS
#undef GDNFLOW_WGMMA
#undef GDNFLOW_OUT_64
#undef GDNFLOW_OUT_32
#undef GDNFLOW_OUT_16
#undef GDNFLOW_OUT_16_FROM
#undef GDNFLOW_OUT_4
#undef GDNFLOW_NAMES_64
#undef GDNFLOW_NAMES_32
#undef GDNFLOW_NAMES_16

/// D += A B for one step of 16, A and B in shared memory. A transposed operand is one whose M or N
/// dimension is contiguous (descriptor_mn_major).
template <class Element, bool TransposeA, bool TransposeB, int Count>
__device__ __forceinline__ void wgmma_step(float (&d)[Count], std::uint64_t a, std::uint64_t b,
                                           bool accumulate = true) {
  wgmma_k16<TransposeA, TransposeB>(Element{}, d, a, b, accumulate);
}
/// The same with A in registers.
template <class Element, bool TransposeB, int Count>
__device__ __forceinline__ void wgmma_step(float (&d)[Count], const std::uint32_t (&a)[4],
                                           std::uint64_t b, bool accumulate = true) {
  wgmma_k16<TransposeB>(Element{}, d, a, b, accumulate);
}

}  // namespace gdnflow::device
