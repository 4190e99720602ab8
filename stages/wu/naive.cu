// U = A (beta .* V),   W = A (beta .* gamma .* K),   gamma_i = exp(gc_i), for each chunk and value
// head.
//
//          64 tokens            D
//        +-----------+     +---------+      A block takes a chunk and a value head; warp w makes
//     64 |     A     |  64 | V, or K |      rows 16w to 16w + 15 of both products, all D columns
//        +-----------+     +---------+      at once.
//
// 2 x 0.52 M multiply-adds at D = 128; 8 KiB of A, 16 KiB each of v and k in, of u and w out.
// Rounded to the activations' type: beta .* V and beta .* gamma .* K before the products, U and W
// behind them.

#include "cuda_tiles.cuh"
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/views.cuh"

namespace gdnflow::stages::wu {
namespace {

using device::Slab;

template <class T, int D>
struct Config {
  static constexpr int threads = 128;
  static constexpr int tokens = static_cast<int>(chunk_tokens);
  static constexpr int width = D / 8;
  static_assert(tokens == threads / 32 * 16);
};

template <class T>
struct Params {
  device::Rows<const T> k;                // [T, Hqk, D]
  device::Rows<const T> v;                // [T, Hv, D]
  device::Rows<const T> a;                // [T, Hv, 64]
  device::Scalars<const float> beta;      // [T, Hv]
  device::Scalars<const float> g_cumsum;  // [T, Hv]
  device::Rows<T> w;                      // [T, Hv, D]
  device::Rows<T> u;                      // [T, Hv, D]
  device::ChunkTable chunks;
  device::Heads heads;
};

template <class T, int D>
struct SharedStorage {
  device::Tile<T, 64, 64> a;
  device::Tile<T, 64, D> k;  // then W
  device::Tile<T, 64, D> v;  // then U
  float v_factor[64];        // zero past the chunk's end, as the tiles are
  float k_factor[64];
};
static_assert(sizeof(SharedStorage<__nv_bfloat16, 128>) <= 48 * 1024, "no opt-in is needed");

/// A times a tile, which the result then replaces and leaves for global memory.
template <class T, int D>
__device__ void multiply_and_store(const device::Tile<T, 64, 64>& a, device::Tile<T, 64, D>& tile,
                                   T* destination, std::int64_t row_stride, int tokens) {
  const int row = device::warp() * 16;
  Slab<Config<T, D>::width> slab;
  slab.clear();
  device::multiply_add<T, Config<T, D>::tokens>(
      slab, [&](int k) { return device::load_a(a, row, k); },
      [&](int k, int n) { return device::load_b(tile, k, n); });
  __syncthreads();  // the tile has been read by all
  device::store_slab(tile, row, 0, slab);
  __syncthreads();
  device::store_rows<Config<T, D>::threads>(tile, destination, row_stride, tokens);
}

template <class T, int D>
__global__ void __launch_bounds__(Config<T, D>::threads)
    wu_kernel(const __grid_constant__ Params<T> p) {
  using C = Config<T, D>;
  __shared__ SharedStorage<T, D> shared;
  const std::int64_t index = blockIdx.x / p.heads.v;
  if (index >= p.chunks.chunks()) return;
  const device::Chunk chunk = p.chunks.at(index);
  const int head = static_cast<int>(blockIdx.x % p.heads.v);
  const std::int64_t first = chunk.first_token;

  device::load_rows_async<C::threads>(shared.a, p.a.row(first, head), p.a.token_stride,
                                      chunk.tokens);
  device::load_rows_async<C::threads>(shared.k, p.k.row(first, p.heads.qk_of(head)),
                                      p.k.token_stride, chunk.tokens);
  device::load_rows_async<C::threads>(shared.v, p.v.row(first, head), p.v.token_stride,
                                      chunk.tokens);
  const int token = static_cast<int>(threadIdx.x);
  if (token < C::tokens) {
    const bool there = token < chunk.tokens;
    const float beta = there ? p.beta.at(first + token, head) : 0.0F;
    shared.v_factor[token] = beta;
    shared.k_factor[token] = there ? beta * expf(p.g_cumsum.at(first + token, head)) : 0.0F;
  }
  device::wait_for_copies();
  __syncthreads();
  device::scale_rows<C::threads>(shared.v, shared.v_factor);
  device::scale_rows<C::threads>(shared.k, shared.k_factor);
  __syncthreads();
  multiply_and_store(shared.a, shared.v, p.u.row(first, head), p.u.token_stride, chunk.tokens);
  multiply_and_store(shared.a, shared.k, p.w.row(first, head), p.w.token_stride, chunk.tokens);
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return max_chunks(problem, capacity) * problem.v_heads;
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {"k", "v", "A", "w", "u"}); }

void steps(const StageCall& call, StepList& out) {
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    Params<T> params{};
    params.k = device::Rows<const T>(call["k"]);
    params.v = device::Rows<const T>(call["v"]);
    params.a = device::Rows<const T>(call["A"]);
    params.beta = device::Scalars<const float>(call["beta"]);
    params.g_cumsum = device::Scalars<const float>(call["g_cumsum"]);
    params.w = device::Rows<T>(call["w"]);
    params.u = device::Rows<T>(call["u"]);
    params.chunks = chunk_table(call);
    params.heads = device::Heads(call.problem);
    out.push_back(kernel_step("wu", wu_kernel<T, D>, grid_of(blocks(call.problem, call.capacity)),
                              {Config<T, D>::threads}, 0, params));
  });
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "a block a chunk and head; two products with A";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::wu
