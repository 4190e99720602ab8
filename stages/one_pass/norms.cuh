#pragma once

// Norms of the rows of q and k, where the walks normalise them: by blocks beside the one that
// plans, each row read once whatever the number of value heads that read it.

#include "device/half.cuh"
#include "device/views.cuh"
#include "qk_norm/epsilon.hpp"

#include <algorithm>
#include <cstdint>

namespace gdnflow::stages::one_pass {

struct NormTable {
  static constexpr int threads = 256;
  static constexpr int lanes = 16;              // of a row of 128
  static constexpr int rows = threads / lanes;  // of a block at a time,
  static constexpr int ahead = 2;               // times this
  static constexpr std::int64_t resident = 8;   // blocks a multiprocessor, about

  device::Rows<const __nv_bfloat16> q;  // [T, Hqk, 128]
  device::Rows<const __nv_bfloat16> k;  // [T, Hqk, 128]
  float2* norms = nullptr;              // [T, Hqk]: 1 / |q| and 1 / |k|
  std::int64_t count = 0;               // of the tokens that there are, times Hqk
  std::int32_t heads = 0;               // Hqk

  /// Blocks for so many tokens.
  static std::int64_t blocks(std::int64_t tokens, std::int64_t heads, int multiprocessors) {
    constexpr std::int64_t pass = rows * ahead;
    return std::min((tokens * heads + pass - 1) / pass, resident * multiprocessors);
  }
};

/// The part of block `block` of so many.
__device__ __forceinline__ void find_norms(const NormTable& p, std::int64_t block,
                                           std::int64_t blocks) {
  const auto lane = static_cast<int>(threadIdx.x) % NormTable::lanes;
  const std::int64_t mine = block * NormTable::rows + threadIdx.x / NormTable::lanes;
  const std::int64_t step = blocks * NormTable::rows;
  // Every lane takes part in the sums; past the end they repeat the last row.
  for (std::int64_t first = mine; first - mine + block * NormTable::rows < p.count;
       first += step * NormTable::ahead) {
    uint4 x[NormTable::ahead][2];
#pragma unroll
    for (int i = 0; i < NormTable::ahead; ++i) {
      const std::int64_t row = min(first + i * step, p.count - 1);
      const std::int64_t token = row / p.heads;
      const std::int64_t head = row % p.heads;
      x[i][0] = *reinterpret_cast<const uint4*>(p.q.row(token, head) + 8 * lane);
      x[i][1] = *reinterpret_cast<const uint4*>(p.k.row(token, head) + 8 * lane);
    }
#pragma unroll
    for (int i = 0; i < NormTable::ahead; ++i) {
      float sums[2];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const std::uint32_t pairs[4] = {x[i][part].x, x[i][part].y, x[i][part].z, x[i][part].w};
        sums[part] = 0.0F;
#pragma unroll
        for (const std::uint32_t pair : pairs) {
          const float2 two = device::unpack<__nv_bfloat16>(pair);
          sums[part] += two.x * two.x + two.y * two.y;
        }
#pragma unroll
        for (int lanes = 1; lanes < NormTable::lanes; lanes *= 2) {
          sums[part] += __shfl_xor_sync(~0U, sums[part], lanes);
        }
      }
      const std::int64_t row = first + i * step;
      if (lane == 0 && row < p.count) {
        p.norms[row] = {rsqrtf(sums[0] + qk_norm::epsilon), rsqrtf(sums[1] + qk_norm::epsilon)};
      }
    }
  }
}

}  // namespace gdnflow::stages::one_pass
