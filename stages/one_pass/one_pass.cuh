#pragma once

// What the kernels of one_pass for sm_90a share.

#include <gdnflow/stage.hpp>

#include "device/gates.cuh"
#include "device/prefix.cuh"
#include "fused_prefill/register_state.cuh"

#include <cstdint>

namespace gdnflow::stages::one_pass {

using namespace fused_prefill;

struct Params : RegisterStateParams {
  const std::int32_t* starts;  // [N+1]: first token of each sequence
  const void* prefix_lens;     // [N], or null
  bool wide_index;
};

// Chunk `index` of a sequence, counted from its first.
__device__ __forceinline__ device::Chunk chunk_of(const Params& p, int sequence, int index) {
  const std::int64_t prefix = device::safe_prefix(p.prefix_lens, p.wide_index, sequence);
  const auto in_first = static_cast<std::int32_t>(prefix % chunk_tokens);
  const std::int32_t start = p.starts[sequence];
  device::Chunk chunk;
  chunk.sequence = sequence;
  chunk.first_token = start + (index == 0 ? 0 : index * rows - in_first);
  chunk.tokens =
      min(index == 0 ? rows - in_first : rows, p.starts[sequence + 1] - chunk.first_token);
  chunk.number = static_cast<std::int32_t>(prefix / chunk_tokens) + index;
  return chunk;
}

__device__ __forceinline__ void find_tokens(const Params& p, Task& task) {
  if (task.chunks == 0) return;
  const int index = task.first_chunk - p.chunks.offsets[task.sequence];
  task.chunk = chunk_of(p, task.sequence, index);
  const device::Chunk last = chunk_of(p, task.sequence, index + task.chunks - 1);
  task.end_token = last.first_token + last.tokens;
}

// A lane's element of the diagonal of K K^T in row `row` + 8 h of a warp's sixteen, where `row` is
// lane / 4 and `gram` are the warp's rows; of use in the lanes that have it, those with row / 2 ==
// lane % 4.
__device__ __forceinline__ float diagonal_of(const float (&gram)[rows / 2], int warp, int row,
                                             int h) {
  float square = 0.0F;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const float* const x = &gram[4 * (2 * block + h) + 2 * h];
    if (block == warp) square = row % 2 == 0 ? x[0] : x[1];
  }
  return square;
}

// log2 of the product of |1 - beta |k|^2| over a lane's tokens of the chunk, those factors that are
// more than one: where they are, the state may grow. `gram` are a warp's rows of K K^T; beta(row,
// h) is that of row `row` + 8 h of a warp's.
template <class Beta>
__device__ __forceinline__ float log2_growth_of(const float (&gram)[rows / 2], int warp,
                                                Beta&& beta) {
  const int row = threadIdx.x % 32 / 4;
  if (row / 2 != threadIdx.x % 4) return 0.0F;  // has no element of the diagonal
  float growth = 0.0F;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = fabsf(1.0F - beta(row, h) * diagonal_of(gram, warp, row, h));
    if (factor > 1.0F) growth += log2f(factor);
  }
  return growth;
}
__device__ __forceinline__ float log2_growth_of(const float (&gram)[rows / 2], const Gates& gates,
                                                int warp) {
  return log2_growth_of(gram, warp, [&](int row, int h) {
    const float4& pair = gates.residual[8 * warp + row / 2 + 4 * h];
    return row % 2 == 0 ? pair.z : pair.w;
  });
}

}  // namespace gdnflow::stages::one_pass
