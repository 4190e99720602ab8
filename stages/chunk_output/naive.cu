// O = scale * (gamma .* (Q S) + P V'),   P = tril(exp(gc_i - gc_j) <q_i, k_j>),   gamma_i =
// exp(gc_i)
//
// A block takes a chunk and a value head. Warp w makes rows 16w to 16w + 15 of P once, and keeps
// them in registers as a left operand; then O goes by in tiles of 64 columns:
//
//          d_k = D                      64 of d_v
//        +---------+                    +-----+
//     64 |  Q      |               d_k  |  S  |       O tile = gamma .* (Q S) + P V', in one
//        +---------+                    +-----+       accumulator: gamma scales it between the
//     64 |  K      |           64 tokens|  V' |       two products, in fp32
//        +---------+                    +-----+
//
// At D = 128: 0.52 M (Q K^T) + 1.05 M (Q S) + 0.52 M (P V') multiply-adds; 32 KiB of q and k, 32
// KiB of S, 16 KiB of V' in, 16 KiB of o out. Rounded to the activations' type: P, and o.

#include "cuda_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/views.cuh"

namespace gdnflow::stages::chunk_output {
namespace {

using device::Slab;

template <class T, int D>
struct Config {
  static constexpr int threads = 128;
  static constexpr int tokens = static_cast<int>(chunk_tokens);
  static constexpr int columns = 64;  // of d_v, at a time
  static constexpr int k_steps = tokens / 16;
  static_assert(tokens == threads / 32 * 16 && D % columns == 0);
};

template <class T>
struct Params {
  device::Rows<const T> q;                 // [T, Hqk, D]
  device::Rows<const T> k;                 // [T, Hqk, D]
  device::Rows<const T> v_new;             // [T, Hv, D]
  device::Matrices<const T> chunk_states;  // [NC, Hv, D, D], d_k rows
  device::Scalars<const float> g_cumsum;   // [T, Hv]
  device::Rows<T> o;                       // [T, Hv, D]
  device::ChunkTable chunks;
  device::Heads heads;
  float scale;
};

template <class T, int D>
struct SharedStorage {
  device::Tile<T, 64, D> q;
  device::Tile<T, 64, D> k;
  device::Tile<T, D, 64> state;
  device::Tile<T, 64, 64> values;  // V', then O
  float g_cumsum[64];              // zero past the chunk's end
};
static_assert(sizeof(SharedStorage<__nv_bfloat16, 128>) <= 63 * 1024, "three blocks on sm_90");

template <class T, int D>
__device__ void load_columns(SharedStorage<T, D>& shared, const Params<T>& p,
                             const device::Chunk& chunk, std::int64_t index, int head, int column) {
  device::load_rows_async<Config<T, D>::threads>(
      shared.state, p.chunk_states.matrix(index, head) + column, p.chunk_states.row_stride, D);
  device::load_rows_async<Config<T, D>::threads>(shared.values,
                                                 p.v_new.row(chunk.first_token, head) + column,
                                                 p.v_new.token_stride, chunk.tokens);
}

/// P's rows of this warp as left operands; the mask comes before the exp.
template <class T, int D>
__device__ void make_p(device::FragmentA (&p)[Config<T, D>::k_steps],
                       const SharedStorage<T, D>& shared, int tokens) {
  const int row = device::warp() * 16;
  Slab<8> slab;
  slab.clear();
  device::multiply_add<T, D>(
      slab, [&](int k) { return device::load_a(shared.q, row, k); },
      [&](int k, int n) { return device::load_b_from_rows_of_n(shared.k, k, n); });
  slab.for_each([&](int r, int j, float& x) {
    const int i = row + r;
    const bool kept = j <= i && i < tokens;
    x = kept ? x * expf(shared.g_cumsum[i] - shared.g_cumsum[j]) : 0.0F;
  });
#pragma unroll
  for (int step = 0; step < Config<T, D>::k_steps; ++step) {
    p[step] = device::to_a<T>(slab, 16 * step);
  }
}

/// This warp's rows of O for the columns in shared memory.
template <class T, int D>
__device__ Slab<8> make_o(const device::FragmentA (&p)[Config<T, D>::k_steps],
                          const SharedStorage<T, D>& shared, float scale) {
  const int row = device::warp() * 16;
  Slab<8> slab;
  slab.clear();
  device::multiply_add<T, D>(
      slab, [&](int k) { return device::load_a(shared.q, row, k); },
      [&](int k, int n) { return device::load_b(shared.state, k, n); });
  slab.for_each([&](int r, int, float& x) { x *= expf(shared.g_cumsum[row + r]); });
  device::multiply_add<T, Config<T, D>::tokens>(
      slab, [&](int k) { return p[k / 16]; },
      [&](int k, int n) { return device::load_b(shared.values, k, n); });
  slab.for_each([&](int, int, float& x) { x *= scale; });
  return slab;
}

template <class T, int D>
__global__ void __launch_bounds__(Config<T, D>::threads)
    chunk_output_kernel(const __grid_constant__ Params<T> p) {
  using C = Config<T, D>;
  auto& shared = device::dynamic_shared<SharedStorage<T, D>>();
  device::allow_successors();
  const std::int64_t index = blockIdx.x / p.heads.v;
  if (index >= p.chunks.chunks()) return;
  const device::Chunk chunk = p.chunks.at(index);
  const int head = static_cast<int>(blockIdx.x % p.heads.v);
  const int qk_head = p.heads.qk_of(head);

  device::load_rows_async<C::threads>(shared.q, p.q.row(chunk.first_token, qk_head),
                                      p.q.token_stride, chunk.tokens);
  device::load_rows_async<C::threads>(shared.k, p.k.row(chunk.first_token, qk_head),
                                      p.k.token_stride, chunk.tokens);
  load_columns(shared, p, chunk, index, head, 0);
  const int token = static_cast<int>(threadIdx.x);
  if (token < C::tokens) {
    shared.g_cumsum[token] =
        token < chunk.tokens ? p.g_cumsum.at(std::int64_t{chunk.first_token} + token, head) : 0.0F;
  }
  device::wait_for_copies();
  __syncthreads();
  device::FragmentA weights[C::k_steps];
  make_p(weights, shared, chunk.tokens);
  for (int column = 0; column < D; column += C::columns) {
    if (column > 0) {
      load_columns(shared, p, chunk, index, head, column);
      device::wait_for_copies();
      __syncthreads();
    }
    Slab<8> o = make_o(weights, shared, p.scale);
    __syncthreads();  // V' has been read by all
    device::store_slab(shared.values, device::warp() * 16, 0, o);
    __syncthreads();
    device::store_rows<C::threads>(shared.values, p.o.row(chunk.first_token, head) + column,
                                   p.o.token_stride, chunk.tokens);
    __syncthreads();  // the tiles are free
  }
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return max_chunks(problem, capacity) * problem.v_heads;
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) {
  return accepts_vectors(call, {"q", "k", "v_new", "chunk_states", "o"});
}

void steps(const StageCall& call, StepList& out) {
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    Params<T> params{};
    params.q = device::Rows<const T>(call["q"]);
    params.k = device::Rows<const T>(call["k"]);
    params.v_new = device::Rows<const T>(call["v_new"]);
    params.chunk_states = device::Matrices<const T>(call["chunk_states"]);
    params.g_cumsum = device::Scalars<const float>(call["g_cumsum"]);
    params.o = device::Rows<T>(call["o"]);
    params.chunks = chunk_table(call);
    params.heads = device::Heads(call.problem);
    params.scale = call.problem.effective_scale();
    out.push_back(kernel_step("chunk_output", chunk_output_kernel<T, D>,
                              grid_of(blocks(call.problem, call.capacity)), {Config<T, D>::threads},
                              sizeof(SharedStorage<T, D>), params));
  });
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "a block a chunk and head; P in registers, 64 columns of o at a time";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::chunk_output
