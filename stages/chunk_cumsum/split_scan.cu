// g_cumsum[t] = sum of g from the chunk's first token to t, for each value head.
//
//          32 heads               A tile is a chunk and 32 heads. Warp w of the block takes tokens
//        +-----------+            8 w to 8 w + 7, a lane a head: eight loads in flight a thread,
//        along
//   w 0  | 8 tokens  |            heads, which are contiguous. It sums its tokens in registers, the
//   w 1  | 8 tokens  |            warps' totals go through shared memory, and each adds those
//   before
//    ... |           |            it. One barrier and 1 KiB of shared memory a tile, no scan across
//   w 7  | 8 tokens  |            lanes.
//        +-----------+
//
// 8 bytes move an element, which is all that the time depends on: 4.2 MB for 8192 tokens and 64
// heads, about 1 us; the launch costs more. Hence kkt_solve may be launched while this runs.
//
// g below -104, -inf included, counts as -104 (gates.cuh), so that differences of sums are never
// inf - inf. Error of a sum: at most fifteen roundings of 2^-24 of the largest partial sum.

#include "cuda_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/mma.cuh"
#include "device/views.cuh"

#include <algorithm>

namespace gdnflow::stages::chunk_cumsum {
namespace {

using device::lane;
using device::warp;

struct Config {
  static constexpr int warps = 8;
  static constexpr int heads = 32;                                       // of a tile
  static constexpr int tokens = static_cast<int>(chunk_tokens) / warps;  // of a thread
  static constexpr int blocks_a_multiprocessor = 8;
  static_assert(tokens * warps == chunk_tokens);
  static_assert(32 * warps * blocks_a_multiprocessor <= 2048);
};

struct Params {
  device::Scalars<const float> g;   // [T, Hv]
  device::Scalars<float> g_cumsum;  // [T, Hv]
  device::ChunkTable chunks;
  std::int32_t heads;       // Hv
  std::int32_t head_tiles;  // ceil(Hv / 32)
};

struct SharedStorage {
  float totals[Config::warps][Config::heads];
};
static_assert(sizeof(SharedStorage) == 1024);

/// A thread's tokens of one head.
__device__ void sum_tile(SharedStorage& shared, const Params& p, const device::Chunk& chunk,
                         int head) {
  const int first = warp() * Config::tokens;
  const std::int64_t token = std::int64_t{chunk.first_token} + first;
  const int here = head < p.heads ? chunk.tokens - first : 0;
  float sum[Config::tokens];
#pragma unroll
  for (int i = 0; i < Config::tokens; ++i) {
    sum[i] = i < here ? device::clamp_log_decay(p.g.at(token + i, head)) : 0.0F;
  }
#pragma unroll
  for (int i = 1; i < Config::tokens; ++i) sum[i] += sum[i - 1];
  shared.totals[warp()][lane()] = sum[Config::tokens - 1];
  __syncthreads();
  float before = 0.0F;
  for (int w = 0; w < warp(); ++w) before += shared.totals[w][lane()];
#pragma unroll
  for (int i = 0; i < Config::tokens; ++i) {
    if (i < here) p.g_cumsum.at(token + i, head) = before + sum[i];
  }
}

__global__ void __launch_bounds__(32 * Config::warps)
    chunk_cumsum_split_scan_kernel(const __grid_constant__ Params p) {
  __shared__ SharedStorage shared;
  device::allow_successors();
  device::wait_for_predecessors();
  const int tiles = p.chunks.chunks() * p.head_tiles;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    sum_tile(shared, p, p.chunks.at(tile / p.head_tiles),
             tile % p.head_tiles * Config::heads + lane());
    __syncthreads();  // the totals are written again
  }
}

std::int64_t head_tiles(const Problem& problem) { return ceil_div(problem.v_heads, Config::heads); }

std::int64_t tiles(const Problem& problem, const Capacity& capacity) {
  return max_chunks(problem, capacity) * head_tiles(problem);
}

Support supports(const VariantQuery& query) {
  return supports_cuda(query, tiles(query.problem, query.capacity));
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {}); }

void steps(const StageCall& call, StepList& out) {
  Params params{};
  params.g = device::Scalars<const float>(call["g"]);
  params.g_cumsum = device::Scalars<float>(call["g_cumsum"]);
  params.chunks = chunk_table(call);
  params.heads = call.problem.v_heads;
  params.head_tiles = static_cast<std::int32_t>(head_tiles(call.problem));
  // As many blocks as run at once: a replay far below its capacity starts no blocks in vain.
  const std::int64_t blocks =
      std::min(tiles(call.problem, call.capacity),
               std::int64_t{call.device.multiprocessors} * Config::blocks_a_multiprocessor);
  out.push_back(programmatic(kernel_step("chunk_cumsum", chunk_cumsum_split_scan_kernel,
                                         grid_of(blocks), {32 * Config::warps}, 0, params)));
}

}  // namespace

Variant split_scan() {
  Variant variant;
  variant.id = "split-scan";
  variant.description = "eight tokens a thread in registers, joined through shared memory";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::chunk_cumsum
