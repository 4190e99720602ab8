#pragma once

#include "device/half.cuh"
#include "device/wgmma.cuh"

#include <cstdint>

// A warp group's accumulators as 16-bit tiles in shared memory and back: panels of 64 columns in
// the 128-byte swizzle (wgmma.cuh says how accumulators lie), through stmatrix and ldmatrix.

namespace gdnflow::device {

/// Where this lane's row of the 16 x 16 block at (first_row, column) lies, for the matrices of one
/// stmatrix.x4 or ldmatrix.x4: lanes 0-15 rows of the left half, 16-31 of the right. `first_row` is
/// a multiple of 8, `column` of 16. One XOR a block: the swizzle of a lane is the same everywhere.
__device__ __forceinline__ std::uint32_t block_address(std::uint32_t panels, int first_row,
                                                       int column, std::uint32_t panel_stride) {
  const int lane = threadIdx.x % 32;
  const std::uint32_t offset =
      (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
  return panels + first_row * 128 + column / 64 * panel_stride + (offset ^ (column % 64 * 2));
}

/// Stores the group's 64 rows of pairs in the accumulators' order at `first_row`: pairs[i] holds
/// elements 2 i and 2 i + 1.
template <int Count>
__device__ __forceinline__ void store_pairs(std::byte* panels, const std::uint32_t (&pairs)[Count],
                                            int first_row, std::uint32_t panel_stride) {
  const std::uint32_t base = shared_address(panels);
#pragma unroll
  for (int j = 0; j < Count / 4; ++j) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     block_address(base, first_row, 16 * j, panel_stride)),
                 "r"(pairs[4 * j]), "r"(pairs[4 * j + 1]), "r"(pairs[4 * j + 2]),
                 "r"(pairs[4 * j + 3])
                 : "memory");
  }
}

/// Rounds the group's 64 rows of accumulators to 16 bits and stores them at `first_row`.
template <class Element, int Count>
__device__ __forceinline__ void store_accumulators(std::byte* panels, const float (&d)[Count],
                                                   int first_row, std::uint32_t panel_stride) {
  std::uint32_t pairs[Count / 2];
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) pairs[i] = pack<Element>(d[2 * i], d[2 * i + 1]);
  store_pairs(panels, pairs, first_row, panel_stride);
}

/// Loads the group's 64 rows as pairs in the accumulators' order.
template <int Count>
__device__ __forceinline__ void load_pairs(const std::byte* panels, std::uint32_t (&pairs)[Count],
                                           int first_row, std::uint32_t panel_stride) {
  const std::uint32_t base = shared_address(panels);
#pragma unroll
  for (int j = 0; j < Count / 4; ++j) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[4 * j]), "=r"(pairs[4 * j + 1]), "=r"(pairs[4 * j + 2]),
                   "=r"(pairs[4 * j + 3])
                 : "r"(block_address(base, first_row, 16 * j, panel_stride))
                 : "memory");
  }
}

}  // namespace gdnflow::device
