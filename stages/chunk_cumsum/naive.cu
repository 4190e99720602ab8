// g_cumsum[t] = sum of g from the chunk's first token to t, for each value head.
//
// A block takes a chunk and 32 heads: the 64 x 32 tile goes through shared memory so that global
// reads run along heads, which are contiguous, and the scan along tokens. A warp scans a head, two
// tokens a lane.
//
// g below -104, -inf included, counts as -104: exp(-104) is zero in fp32 already, and the sums stay
// finite, so that differences of them are never inf - inf. g > 0 is not touched. Error of a sum:
// six roundings of at most 2^-24 of the largest partial sum, hence 64 x 104 x 6 x 2^-24 = 2.4e-3 in
// the exponent at the very worst (64 resets in a chunk, whose decays are zero anyway), and below
// 1e-4 with one reset a chunk.

#include "cuda_tiles.cuh"
#include "device/gates.cuh"
#include "device/views.cuh"

#include <cub/warp/warp_scan.cuh>

namespace gdnflow::stages::chunk_cumsum {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int heads = 32;  // a block's
  static constexpr int tokens = static_cast<int>(chunk_tokens);
  static constexpr int warps = threads / 32;
  static_assert(tokens == 64 && heads % warps == 0);
};

struct Params {
  device::Scalars<const float> g;   // [T, Hv]
  device::Scalars<float> g_cumsum;  // [T, Hv]
  device::ChunkTable chunks;
  std::int32_t heads;       // Hv
  std::int32_t head_tiles;  // ceil(Hv / 32)
};

using WarpScan = cub::WarpScan<float>;

struct SharedStorage {
  float g[Config::tokens][Config::heads + 1];  // one more: a column of it in 32 banks
  WarpScan::TempStorage scan[Config::warps];
};

/// Calls f(token, head) for the elements of the tile that exist.
template <class F>
__device__ void for_each_element(int tokens, int heads, F&& f) {
  const int head = static_cast<int>(threadIdx.x) % Config::heads;
  if (head >= heads) return;
  for (int token = static_cast<int>(threadIdx.x) / Config::heads; token < tokens;
       token += Config::threads / Config::heads) {
    f(token, head);
  }
}

__device__ void scan_head(SharedStorage& shared, int head, int warp, int lane) {
  float& first = shared.g[2 * lane][head];
  float& second = shared.g[2 * lane + 1][head];
  float before = 0.0F;
  WarpScan(shared.scan[warp]).ExclusiveSum(first + second, before);
  first = before + first;
  second = first + second;
  __syncwarp();  // the scan's memory is used again
}

__global__ void __launch_bounds__(Config::threads)
    chunk_cumsum_kernel(const __grid_constant__ Params p) {
  __shared__ SharedStorage shared;
  const std::int64_t index = blockIdx.x / p.head_tiles;
  if (index >= p.chunks.chunks()) return;
  const device::Chunk chunk = p.chunks.at(index);
  const int first_head = static_cast<int>(blockIdx.x % p.head_tiles) * Config::heads;
  const int heads = min(Config::heads, p.heads - first_head);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  // Elements that do not exist are left as they are: they are scanned behind those that do, or in
  // columns of their own, and never stored.
  for_each_element(chunk.tokens, heads, [&](int token, int head) {
    shared.g[token][head] =
        device::clamp_log_decay(p.g.at(chunk.first_token + token, first_head + head));
  });
  __syncthreads();
  for (int head = warp; head < heads; head += Config::warps) scan_head(shared, head, warp, lane);
  __syncthreads();
  for_each_element(chunk.tokens, heads, [&](int token, int head) {
    p.g_cumsum.at(chunk.first_token + token, first_head + head) = shared.g[token][head];
  });
}

std::int64_t head_tiles(const Problem& problem) { return ceil_div(problem.v_heads, Config::heads); }

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return max_chunks(problem, capacity) * head_tiles(problem);
}

Support supports(const VariantQuery& query) {
  return supports_cuda(query, blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {}); }

void steps(const StageCall& call, StepList& out) {
  Params params{};
  params.g = device::Scalars<const float>(call["g"]);
  params.g_cumsum = device::Scalars<float>(call["g_cumsum"]);
  params.chunks = chunk_table(call);
  params.heads = call.problem.v_heads;
  params.head_tiles = static_cast<std::int32_t>(head_tiles(call.problem));
  out.push_back(kernel_step("chunk_cumsum", chunk_cumsum_kernel,
                            grid_of(blocks(call.problem, call.capacity)), {Config::threads}, 0,
                            params));
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "a warp scan a chunk and head";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::chunk_cumsum
