// A = (I - N)^-1,  N_ij = -beta_i exp(gc_i - gc_j) <k_i, k_j> for j < i, for each chunk and value
// head: gc the prefix sum of g in the chunk, 64 tokens, both factors <= 1 in size for g <= 0 and
// normalised keys.
//
//   k [64, D]               A tile is a chunk and a q/k head. A block takes tiles in turn, with a
//  +---------+              warp a value head of the group (at most 8; a larger group takes more
//  |         |              rounds).
//  +---------+
//       |  K K^T: ten 16x16 blocks on and below the diagonal, dealt to all warps
//       v
//   G, fp32                 in shared memory, in the order in which accumulators lie
//    |    |    |            from here on a warp a value head, by itself:
//    v    v    v            N = gates .* G in registers, each block when it is wanted
//   A_h  A_h+1 ...          16x16 inverses by substitution, merges 16 -> 32 -> 64
//                           (warp_tril_inverse.cuh); rounded blocks to shared memory, rows of 128
//                           bytes to global memory
//
// What is computed of G is its upper half, blocks (j, i) with j <= i: an accumulator's rows are
// then columns of N, which is how both the substitution and the merges want N. G is symmetric, so
// nothing is computed twice.
//
// A tile at D = 128: 16 KiB of k read, 8 KiB of A a value head written, 0.33 M multiply-adds for G
// and 0.20 M a value head for the merges (three products of 16 bits each); a value head takes 2304
// exponentials and 148 x 32 fp32 multiply-adds. Memory is the floor: 12 KiB a value head in groups
// of four, 24 KiB in groups of one.
//
// Budget: 128 registers, so that 16 warps fit a multiprocessor; 49 KiB of shared memory a block in
// groups of four, which leaves room for four blocks on sm_90 and for two where a multiprocessor has
// 100 KiB. k lies where the warps' own memory lies later.
//
// Launched programmatically where the device can: the prologue overlaps the end of chunk_cumsum.
//
// Rows past the chunk's end: k is zero, beta is zero and gc is the last valid token's, so they are
// rows of the identity, which are not stored, and columns past the end are zero.

#include "cuda_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/tile.cuh"
#include "device/views.cuh"
#include "device/warp_tril_inverse.cuh"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace gdnflow::stages::kkt_solve {
namespace {

using device::FragmentA;
using device::lane;
using device::Slab;
using device::warp;
using device::WarpTrilInverse;

struct Config {
  static constexpr int tokens = static_cast<int>(chunk_tokens);
  static constexpr int most_warps = 8;               // of a block
  static constexpr int warps_a_multiprocessor = 16;  // at 128 registers a thread
  static constexpr int below = 6;                    // 16x16 blocks below the diagonal
  static_assert(tokens == 16 * WarpTrilInverse::blocks);
  static_assert(65536 / (32 * warps_a_multiprocessor) == 128);
};

template <class T>
struct Params {
  device::Rows<const T> k;                // [T, Hqk, D]
  device::Scalars<const float> beta;      // [T, Hv]
  device::Scalars<const float> g_cumsum;  // [T, Hv]
  device::Rows<T> a;                      // [T, Hv, 64]
  device::ChunkTable chunks;
  device::Heads heads;
};

/// G by blocks, in the accumulators' order: a lane's own elements, so that no bank is met twice.
struct Gram {
  float4 below[Config::below][2][32];            // i > j, by i (i - 1) / 2 + j
  float4 diagonal[WarpTrilInverse::blocks][32];  // the three quarters that hold j < i
  float2 diagonal_rest[WarpTrilInverse::blocks][32];
};

/// The gates of a value head.
struct Gates {
  static constexpr int stride = Config::tokens + 8;  // heads in different banks
  float g_cumsum[stride];                            // times log2(e)
  float negative_beta[stride];
};

/// The lower half of A in 16-bit blocks of 16 rows of 32 bytes.
struct OutputBlocks {
  static constexpr int stride = 16 * 32 + 32;  // neighbours in different banks
  alignas(16) std::byte data[9 * stride + 16 * 32];

  /// Eight elements of a row of block (i, j). Halves of every second four rows are exchanged: eight
  /// rows then lie in eight different groups of banks.
  __device__ __forceinline__ std::byte* half_row(int i, int j, int row, int half) {
    return data + (i * (i + 1) / 2 + j) * stride + row * 32 + (half ^ (row / 4 & 1)) * 16;
  }
};

struct WarpStorage {
  WarpTrilInverse::Storage inverse;
  OutputBlocks output;
};

/// Parts of a block's shared memory, which depends on the number of warps.
template <class T, int D>
struct SharedStorage {
  using Keys = device::Tile<T, Config::tokens, D>;

  Gram& gram;
  Gates* gates;        // one a warp
  Keys& keys;          // until G is there
  WarpStorage* warps;  // from then on

  __device__ SharedStorage(std::byte* memory, int warp_count)
      : gram(*reinterpret_cast<Gram*>(memory)),
        gates(reinterpret_cast<Gates*>(memory + sizeof(Gram))),
        keys(*reinterpret_cast<Keys*>(gates + warp_count)),
        warps(reinterpret_cast<WarpStorage*>(gates + warp_count)) {}

  static constexpr std::uint32_t bytes(int warp_count) {
    return static_cast<std::uint32_t>(sizeof(Gram) + warp_count * sizeof(Gates) +
                                      std::max(sizeof(Keys), warp_count * sizeof(WarpStorage)));
  }
};
static_assert(sizeof(Gates) % 16 == 0 && sizeof(WarpStorage) % 16 == 0 && sizeof(Gram) % 16 == 0);
// Every block keeps 1 KiB of a multiprocessor's shared memory for the system.
static_assert(2 * (SharedStorage<__half, 128>::bytes(4) + 1024) <= 100 * 1024);
static_assert(4 * (SharedStorage<__half, 128>::bytes(4) + 1024) <= 228 * 1024);
static_assert(SharedStorage<__half, 128>::bytes(Config::most_warps) <= 99 * 1024);

/// Starts copying the tile's keys; rows past the end become zero.
template <class T, int D>
__device__ void load_keys(device::Tile<T, Config::tokens, D>& keys, const Params<T>& p,
                          const device::Chunk& chunk, int qk_head) {
  constexpr int vectors = D / 8;
  const T* source = p.k.row(chunk.first_token, qk_head);
  for (int index = static_cast<int>(threadIdx.x); index < Config::tokens * vectors;
       index += static_cast<int>(blockDim.x)) {
    const int row = index / vectors;
    const int column = index % vectors * 8;
    const bool there = row < chunk.tokens;
    device::copy_16_async(keys.at(row, column),
                          source + (there ? row : 0) * p.k.token_stride + column, there);
  }
}

/// Gates of the group's value heads number `first` on, one head a warp; neighbouring threads read
/// neighbouring heads.
template <class T>
__device__ void load_gates(Gates* gates, const Params<T>& p, const device::Chunk& chunk,
                           int qk_head, int first) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int here = min(warps, p.heads.group() - first);
  // A head a warp has two tokens a lane: both are asked for before either is waited for.
  constexpr int passes = Config::tokens / 32;
  float g_cumsum[passes];
  float beta[passes];
  const auto place = [&](int pass) {
    const int index = static_cast<int>(threadIdx.x + pass * blockDim.x);
    return int2{index / here, index % here};  // token, head
  };
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int2 at = place(pass);
    if (at.x >= Config::tokens) continue;
    const int head = p.heads.v_of(qk_head, first + at.y);
    const std::int64_t token = std::int64_t{chunk.first_token} + min(at.x, chunk.tokens - 1);
    g_cumsum[pass] = p.g_cumsum.at(token, head);
    beta[pass] = p.beta.at(token, head);
  }
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int2 at = place(pass);
    if (at.x >= Config::tokens) continue;
    gates[at.y].g_cumsum[at.x] = g_cumsum[pass] * device::log2_e;
    gates[at.y].negative_beta[at.x] = at.x < chunk.tokens ? -beta[pass] : 0.0F;
  }
}

/// Brings what a later tile will read from device memory into L2, where its loads find it sooner.
template <class T, int D>
__device__ void prefetch_tile(const Params<T>& p, const device::Chunk& chunk, int qk_head) {
  constexpr int lines = D * static_cast<int>(sizeof(T)) / 128;  // of a row of keys
  for (int index = static_cast<int>(threadIdx.x); index < chunk.tokens * lines;
       index += static_cast<int>(blockDim.x)) {
    device::prefetch_l2(p.k.row(std::int64_t{chunk.first_token} + index / lines, qk_head) +
                        index % lines * (128 / static_cast<int>(sizeof(T))));
  }
  const int head = p.heads.v_of(qk_head, 0);
  for (int row = static_cast<int>(threadIdx.x); row < chunk.tokens;
       row += static_cast<int>(blockDim.x)) {
    const std::int64_t token = std::int64_t{chunk.first_token} + row;
    device::prefetch_l2(&p.g_cumsum.at(token, head));
    device::prefetch_l2(&p.beta.at(token, head));
  }
}

/// Block (j, i) of K K^T.
template <class T, int D>
__device__ __forceinline__ Slab<2> gram_block(const device::Tile<T, Config::tokens, D>& keys, int j,
                                              int i) {
  Slab<2> block;
  block.clear();
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    const FragmentA a = device::load_a(keys, 16 * j, k);
    const FragmentA b = device::load_a(keys, 16 * i, k);
#pragma unroll
    for (int n = 0; n < 2; ++n) device::mma_16x8x16<T>(block.x[n], a.x, b.x[n], b.x[n + 2]);
  }
  return block;
}

/// G, its ten blocks dealt to the warps. A block is one warp's sum in one order, so its bits do not
/// depend on the number of warps.
template <class T, int D>
__device__ void make_gram(Gram& gram, const device::Tile<T, Config::tokens, D>& keys) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int index = warp(); index < Config::below + WarpTrilInverse::blocks; index += warps) {
    if (index < Config::below) {
      const int i = index < 1 ? 1 : index < 3 ? 2 : 3;
      const Slab<2> block = gram_block(keys, index - i * (i - 1) / 2, i);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        gram.below[index][n][lane()] =
            make_float4(block.x[n][0], block.x[n][1], block.x[n][2], block.x[n][3]);
      }
    } else {
      const int i = index - Config::below;
      const Slab<2> block = gram_block(keys, i, i);
      gram.diagonal[i][lane()] =
          make_float4(block.x[0][0], block.x[0][1], block.x[1][0], block.x[1][1]);
      gram.diagonal_rest[i][lane()] = make_float2(block.x[1][2], block.x[1][3]);
    }
  }
}

/// The transpose of block (i, j) of N: gates on G. The mask comes before the exponential.
__device__ __forceinline__ Slab<2> gated_block(const Gram& gram, const Gates& gates, int i, int j) {
  const int first_row = lane() % 4 * 2;
  const int first_column = lane() / 4;
  const float gc_j[2] = {gates.g_cumsum[16 * j + first_column],
                         gates.g_cumsum[16 * j + first_column + 8]};
  Slab<2> block;
  if (i != j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 g = gram.below[i * (i - 1) / 2 + j][n][lane()];
      block.x[n][0] = g.x;
      block.x[n][1] = g.y;
      block.x[n][2] = g.z;
      block.x[n][3] = g.w;
    }
  } else {
    const float4 g = gram.diagonal[i][lane()];
    const float2 rest = gram.diagonal_rest[i][lane()];
    block.x[0][0] = g.x;
    block.x[0][1] = g.y;
    block.x[0][2] = block.x[0][3] = 0.0F;
    block.x[1][0] = g.z;
    block.x[1][1] = g.w;
    block.x[1][2] = rest.x;
    block.x[1][3] = rest.y;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 8 * n + first_row;
    const float2 gc_i = *reinterpret_cast<const float2*>(&gates.g_cumsum[16 * i + row]);
    const float2 beta_i = *reinterpret_cast<const float2*>(&gates.negative_beta[16 * i + row]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = first_column + 8 * c;
        if (i == j && c > n) continue;  // rows 0 to 7, columns 8 to 15: above the diagonal
        const float difference = (r == 0 ? gc_i.x : gc_i.y) - gc_j[c];
        const bool kept = i != j || c < n || row + r > column;
        const float decay = device::exp2_approximate(kept ? difference : -INFINITY);
        block.x[n][2 * c + r] *= (r == 0 ? beta_i.x : beta_i.y) * decay;
      }
    }
  }
  return block;
}

/// Rows of the inverse from the blocks, 16 bytes a lane, a row eight lanes.
template <class T>
__device__ void store_rows(OutputBlocks& output, const Params<T>& p, const device::Chunk& chunk,
                           int head) {
  const int column = lane() % 8;  // of eight elements
  T* destination = p.a.row(std::int64_t{chunk.first_token} + lane() / 8, head) + column * 8;
#pragma unroll
  for (int first = 0; first < Config::tokens; first += 4) {
    const int i = first / 16;
    const int row = first % 16 + lane() / 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (column / 2 <= i) {
      x = *reinterpret_cast<const uint4*>(output.half_row(i, column / 2, row, column % 2));
    }
    if (16 * i + row < chunk.tokens) {
      *reinterpret_cast<uint4*>(destination + first * p.a.token_stride) = x;
    }
  }
}

/// Value head number `i` of a tile's group, by one warp. The chunk is read again at the end, so
/// that it takes no registers in between.
template <class T>
__device__ void solve_head(const Gram& gram, const Gates& gates, WarpStorage& storage,
                           const Params<T>& p, int tile, int i) {
  WarpTrilInverse::invert<T>(
      storage.inverse, [&](int row, int column) { return gated_block(gram, gates, row, column); },
      [&](int row, int column, const FragmentA& rows) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          std::byte* half = storage.output.half_row(row, column, lane() / 4 + x % 2 * 8, x / 2);
          *reinterpret_cast<std::uint32_t*>(half + lane() % 4 * 4) = rows.x[x];
        }
      });
  __syncwarp();
  store_rows(storage.output, p, p.chunks.at(tile / p.heads.qk), p.heads.v_of(tile % p.heads.qk, i));
}

template <class T, int D>
__global__ void __launch_bounds__(32 * Config::most_warps,
                                  Config::warps_a_multiprocessor / Config::most_warps)
    kkt_solve_tensor_core_kernel(const __grid_constant__ Params<T> p) {
  extern __shared__ __align__(16) std::byte memory[];
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int own = __shfl_sync(0xffffffffU, warp(), 0);  // known to be the same in all lanes
  const SharedStorage<T, D> shared(memory, warps);
  device::wait_for_predecessors();
  device::allow_successors();

  const int tiles = p.chunks.chunks() * p.heads.qk;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    for (int first = 0; first < p.heads.group(); first += warps) {
      const device::Chunk chunk = p.chunks.at(tile / p.heads.qk);
      const int qk_head = tile % p.heads.qk;
      __syncthreads();  // every warp is done with the heads before
      if (first == 0) load_keys(shared.keys, p, chunk, qk_head);
      load_gates(shared.gates, p, chunk, qk_head, first);
      if (first == 0) {
        const int next = min(tile + static_cast<int>(gridDim.x), tiles - 1);
        prefetch_tile<T, D>(p, p.chunks.at(next / p.heads.qk), next % p.heads.qk);
      }
      device::wait_for_copies();
      __syncthreads();
      if (first == 0) {
        make_gram(shared.gram, shared.keys);
        __syncthreads();
      }
      if (first + own < p.heads.group()) {
        solve_head(shared.gram, shared.gates[own], shared.warps[own], p, tile, first + own);
      }
    }
  }
}

std::int64_t tiles(const Problem& problem, const Capacity& capacity) {
  return max_chunks(problem, capacity) * problem.qk_heads;
}

int warps(const Problem& problem) {
  return std::min(problem.v_heads / problem.qk_heads, Config::most_warps);
}

/// As many blocks as run at once, or one a tile: blocks take further tiles in turn, so a replay far
/// below its capacity starts no blocks for tokens that are not there.
std::int64_t blocks(const StageCall& call, std::uint32_t shared_bytes) {
  const std::int64_t by_warps = Config::warps_a_multiprocessor / warps(call.problem);
  const std::int64_t by_memory =
      (call.device.shared_bytes_per_block + 1024) / (std::int64_t{shared_bytes} + 1024);
  return std::min(
      tiles(call.problem, call.capacity),
      call.device.multiprocessors * std::max(std::min(by_warps, by_memory), std::int64_t{1}));
}

Support supports(const VariantQuery& query) {
  const Support support = supports_tiles(query, tiles(query.problem, query.capacity));
  if (!support) return support;
  std::int64_t bytes = 0;
  with_type_and_dim(query.problem, [&]<class T, int D>() {
    bytes = SharedStorage<T, D>::bytes(warps(query.problem));
  });
  if (bytes > query.device.shared_bytes_per_block) {
    return Support::no("shared memory: expected " + std::to_string(bytes) +
                       " bytes a block, the device has " +
                       std::to_string(query.device.shared_bytes_per_block));
  }
  return support;
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {"k", "A"}); }

void steps(const StageCall& call, StepList& out) {
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    Params<T> params{};
    params.k = device::Rows<const T>(call["k"]);
    params.beta = device::Scalars<const float>(call["beta"]);
    params.g_cumsum = device::Scalars<const float>(call["g_cumsum"]);
    params.a = device::Rows<T>(call["A"]);
    params.chunks = chunk_table(call);
    params.heads = device::Heads(call.problem);
    const int count = warps(call.problem);
    const std::uint32_t shared_bytes = SharedStorage<T, D>::bytes(count);
    out.push_back(programmatic(kernel_step(
        "kkt_solve", kkt_solve_tensor_core_kernel<T, D>, grid_of(blocks(call, shared_bytes)),
        {static_cast<std::uint32_t>(32 * count)}, shared_bytes, params)));
  });
}

}  // namespace

Variant tensor_core() {
  Variant variant;
  variant.id = "tensor-core";
  variant.description = "Gram matrix once a q/k head, a warp a value head, inverse on tensor cores";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::kkt_solve
