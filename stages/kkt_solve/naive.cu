// A = (I + strict_lower(beta_i exp(gc_i - gc_j) <k_i, k_j>))^-1, for each chunk and value head.
//
//          64 tokens                 A block takes a chunk and a q/k head. The Gram matrix K K^T is
//        +-----------+               made once, in registers (warp w holds rows 16w to 16w + 15);
//   64   | 1         |               each value head of the group then scales its lower triangle
//  tokens| x  1      |  D = 64, 128  into shared memory, inverts it (tril_inverse.cuh) and stores
//        | x  x  1   |               it, rounded once.
//        +-----------+
//
// 0.52 M multiply-adds for the Gram matrix at D = 128, on tensor cores; 0.09 M a value head for the
// inverse, in fp32. 16 KiB read a q/k head, 8 KiB written a value head.
//
// Rows past the chunk's end are rows of the identity, which are not stored; columns past it are
// zero.

#include "cuda_tiles.cuh"
#include "device/half.cuh"
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/tril_inverse.cuh"
#include "device/views.cuh"

namespace gdnflow::stages::kkt_solve {
namespace {

using device::Slab;
using device::TrilInverse;

template <class T, int D>
struct Config {
  static constexpr int threads = 128;
  static constexpr int tokens = static_cast<int>(chunk_tokens);
  static_assert(tokens == TrilInverse::size && threads == TrilInverse::threads);
  static_assert(threads / 32 * 16 == tokens, "a warp holds 16 rows");
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

template <class T, int D>
struct SharedStorage {
  device::Tile<T, 64, D> k;
  TrilInverse::Storage inverse;
  float beta[64];
  float g_cumsum[64];
};
static_assert(sizeof(SharedStorage<__nv_bfloat16, 128>) <= 48 * 1024, "no opt-in is needed");

/// The part below the diagonal, before the inverse; the mask comes before the exp.
template <class T, int D>
__device__ void fill_matrix(SharedStorage<T, D>& shared, Slab<8>& gram, int tokens) {
  const int first_row = device::warp() * 16;
  gram.for_each([&](int r, int j, float x) {
    const int i = first_row + r;
    float value = 0.0F;
    if (j < i && i < tokens) {
      value = shared.beta[i] * expf(shared.g_cumsum[i] - shared.g_cumsum[j]) * x;
    }
    shared.inverse.matrix[i * TrilInverse::stride + j] = value;
  });
}

/// Rows of the inverse, eight elements a thread at a time.
template <class T>
__device__ void store_inverse(const Params<T>& p, const TrilInverse::Storage& inverse,
                              const device::Chunk& chunk, int head) {
  for (int index = static_cast<int>(threadIdx.x); index < chunk.tokens * 8; index += 128) {
    const int row = index / 8;
    const int column = index % 8 * 8;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = inverse.matrix[row * TrilInverse::stride + column + i];
    device::store_8(p.a.row(std::int64_t{chunk.first_token} + row, head) + column, x);
  }
}

template <class T, int D>
__global__ void __launch_bounds__(Config<T, D>::threads)
    kkt_solve_kernel(const __grid_constant__ Params<T> p) {
  __shared__ SharedStorage<T, D> shared;
  const std::int64_t index = blockIdx.x / p.heads.qk;
  if (index >= p.chunks.chunks()) return;
  const device::Chunk chunk = p.chunks.at(index);
  const int qk_head = static_cast<int>(blockIdx.x % p.heads.qk);

  device::load_rows_async<Config<T, D>::threads>(shared.k, p.k.row(chunk.first_token, qk_head),
                                                 p.k.token_stride, chunk.tokens);
  device::wait_for_copies();
  __syncthreads();
  Slab<8> gram;
  gram.clear();
  device::multiply_add<T, D>(
      gram, [&](int k) { return device::load_a(shared.k, device::warp() * 16, k); },
      [&](int k, int n) { return device::load_b_from_rows_of_n(shared.k, k, n); });

  for (int i = 0; i < p.heads.group(); ++i) {
    const int head = p.heads.v_of(qk_head, i);
    const int token = static_cast<int>(threadIdx.x);
    if (token < chunk.tokens) {
      shared.beta[token] = p.beta.at(std::int64_t{chunk.first_token} + token, head);
      shared.g_cumsum[token] = p.g_cumsum.at(std::int64_t{chunk.first_token} + token, head);
    }
    __syncthreads();  // the gates are there, and the head before has stored its inverse
    fill_matrix(shared, gram, chunk.tokens);
    TrilInverse::invert(shared.inverse);
    store_inverse(p, shared.inverse, chunk, head);
  }
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return max_chunks(problem, capacity) * problem.qk_heads;
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, blocks(query.problem, query.capacity));
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
    out.push_back(kernel_step("kkt_solve", kkt_solve_kernel<T, D>,
                              grid_of(blocks(call.problem, call.capacity)), {Config<T, D>::threads},
                              0, params));
  });
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "Gram matrix once a q/k head, block inverse in fp32";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::kkt_solve
