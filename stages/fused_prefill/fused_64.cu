// fused_prefill, fused-64: state and output in one kernel, 64 value columns a block.
//
//   R  = beta .* (V - gamma .* (K S))        64 x 64, contracted over d_k      gamma = exp(gc)
//   V' = A R                                 64 x 64, contracted over tokens
//   P  = scale tril(exp(gc_i - gc_j) Q K^T)  64 x 64, contracted over d_k
//   O  = scale gamma .* (Q S) + P V'         64 x 64
//   S <- gamma_l S + K^T (decay .* V')       D x 64                            decay = exp(gc_l -
//   gc)
//
// The idea: a chunk's state and its new values never leave the multiprocessor. The staged pipelines
// write S (32 KiB a chunk and head) and V' (16 KiB) to memory and read them again; here they are
// registers. A block of four warps walks a sequence's chunks for one value head and 64 of its
// columns; each warp keeps 16 columns of S, transposed, from the first chunk to the last, and works
// on them alone (value_slab.cuh). Only P is made together.
//
//   shared memory                       a warp's registers (16 value columns)
//
//   K  64 x D  --+------------------->  S^T K^T --+
//                |                                v
//   V  64 x 64 --|------------------------------> R^T --+
//                |                                      v
//   A  64 x 64 --|------------------------------------> V'^T ----+--------------+
//                |                                      |        v              v
//   Q  64 x D  --+--> P 64 x 64 ---------------------> P V'     S^T <- gamma_l S^T + ...
//                +------------------->  Q S ---------> + -> o
//
// One buffer for each tile, loaded when the chunk begins; V and A arrive while K and Q are at work.
// Nothing is loaded ahead: a second block on the multiprocessor fills the gap, if there is one.
//
// Three barriers a chunk: K and Q are there; P, V and A are there; all tiles have been read.
//
// At D = 128 a chunk of a block takes 2.23 M multiply-adds (K S, Q S and the update 0.52 M each,
// P, A R and P V' 0.33 + 0.16 + 0.16 M, blocks above the diagonal left out), 48 KiB of loads, 8 KiB
// of stores. Registers a thread: 64 for S, 32 each for two products, 16 for rounded values.

#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "device/swizzled_tile.cuh"
#include "fused.cuh"
#include "value_slab.cuh"

namespace gdnflow::stages::fused_prefill {
namespace {

constexpr int tile = 64;  // value columns
constexpr int warps = tile / slab_columns;
constexpr int threads = 32 * warps;
static_assert(threads >= chunk_rows, "a thread fetches a token's gates");

template <class T, int D>
struct SharedStorage {
  device::SwizzledTile<T, chunk_rows, D> k, q;
  device::SwizzledTile<T, chunk_rows, tile> v;
  device::SwizzledTile<T, chunk_rows, chunk_rows> a, p;
  Gates gates;
};
static_assert(sizeof(SharedStorage<__half, 128>) == 57 * 1024, "two blocks on 163 KiB and more");
static_assert(sizeof(SharedStorage<__half, 64>) == 41 * 1024, "two blocks on 99 KiB");

template <class T, int D>
__device__ __forceinline__ void load_tiles(const Params<T>& p, const Place& place,
                                           const device::Chunk& chunk,
                                           SharedStorage<T, D>& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t token = chunk.first_token;
  device::load_rows_async<threads>(shared.k, p.k.row(token, place.qk_head), p.k.token_stride,
                                   chunk.tokens, thread);
  device::load_rows_async<threads>(shared.q, p.q.row(token, place.qk_head), p.q.token_stride,
                                   chunk.tokens, thread);
  device::close_copy_group();
  device::load_rows_async<threads>(shared.v, p.v.row(token, place.head) + place.column,
                                   p.v.token_stride, chunk.tokens, thread);
  device::load_rows_async<threads>(shared.a, p.a.row(token, place.head), p.a.token_stride,
                                   chunk.tokens, thread);
  device::close_copy_group();
  if (thread < chunk_rows) {
    TokenGates gates;
    gates.fetch(p, place, chunk, thread);
    gates.store(shared.gates, thread);
  }
}

/// One chunk, with its tiles on their way.
template <class T, int D>
__device__ __forceinline__ void compute_chunk(const Params<T>& p, const Place& place,
                                              const device::Chunk& chunk, Slab<D / 8>& state,
                                              SharedStorage<T, D>& shared) {
  const int column = device::warp() * slab_columns;
  const Gates& gates = shared.gates;
  device::wait_for_copy_groups<1>();
  __syncthreads();  // K, Q and gates

  attend_jobs<T, D, warps>(shared.q, shared.k, shared.p, gates, p.scale, device::warp());
  const MatrixCursor keys(shared.k, MatrixOrder::right_down);
  const MatrixCursor queries(shared.q, MatrixOrder::down_right);
  Slab<8> product;
  product.clear();
  OutputSlab o[token_steps];
#pragma unroll
  for (int m = 0; m < token_steps; ++m) o[m].clear();
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    const FragmentA s = device::to_a<T>(state, k);
    multiply_keys<T>(product, s, keys, k);
#pragma unroll
    for (int m = 0; m < token_steps; ++m) {
      multiply_add_slab<T>(o[m], load<FragmentA>(queries, 16 * m, k), s);
    }
  }
  device::wait_for_copy_groups<0>();
  __syncthreads();  // P, V and A

  const MatrixCursor v_slab(shared.v, MatrixOrder::right_down, 0, column);
  TokenFragments r;
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
    r.x[step] = residual<T>(product, step, v_slab, gates, 16 * step);
  }
  const MatrixCursor inverse(shared.a, MatrixOrder::right_down);
  const Slab<8> values = new_values<T, 0, token_steps>(r, inverse);
  TokenFragments v_new;
  TokenFragments v_decayed;
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
    v_new.x[step] = device::to_a<T>(values, 16 * step);
    v_decayed.x[step] = decayed<T>(values, step, gates, 16 * step);
  }
  const MatrixCursor scores(shared.p, MatrixOrder::down_right);
#pragma unroll
  for (int m = 0; m < token_steps; ++m) {
    scale_output(o[m], gates, p.scale, 16 * m);
#pragma unroll
    for (int j = 0; j <= m; ++j) {
      multiply_add_slab<T>(o[m], load<FragmentA>(scores, 16 * m, 16 * j), v_new.x[j]);
    }
    store_output(o[m], p, place, chunk, 16 * m, column);
  }
  update_state<T, D>(state, v_decayed, shared.k, gates);
  __syncthreads();  // the tiles are free
}

template <class T, int D>
__global__ void __launch_bounds__(threads, 2) fused_64_kernel(const __grid_constant__ Params<T> p) {
  auto& shared = device::dynamic_shared<SharedStorage<T, D>>();
  const Place place = place_of_block<D, tile>(p);
  const int column = place.column + device::warp() * slab_columns;
  Slab<D / 8> state;
  load_state(state, p.states.initial, p.states.initial_row(place.sequence), place.head, column);
  device::Chunk next = chunk_at(p, place, place.begin);
  const std::int32_t first_number = next.number;
  for (int index = place.begin; index < place.end; ++index) {
    const device::Chunk chunk = next;
    load_tiles(p, place, chunk, shared);
    next = chunk_at(p, place, index + 1);
    compute_chunk<T, D>(p, place, chunk, state, shared);
    store_state(state, p.states.checkpoints,
                checkpoint_row(p.states, p.checkpoint_offsets, chunk, first_number), place.head,
                column);
  }
  device::allow_successors();
  store_state(state, p.states.final, p.states.final_row(place.sequence), place.head, column);
}

template <class T, int D>
constexpr std::uint32_t shared_bytes = sizeof(SharedStorage<T, D>);

Support supports(const VariantQuery& query) {
  return supports_fused(
      query, tile,
      query.problem.v_dim == 64 ? shared_bytes<__half, 64> : shared_bytes<__half, 128>);
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    out.push_back(kernel_step<Params<T>>("fused_prefill", fused_64_kernel<T, D>,
                                         grid_of(block_count(query, tile)), {threads},
                                         shared_bytes<T, D>, Params<T>(call)));
  });
}

}  // namespace

Variant fused_64() {
  Variant variant;
  variant.id = "fused-64";
  variant.description = "state and output in one kernel, 64 value columns a block";
  variant.target = DeviceType::cuda;
  variant.options = {{"value_tile", "value columns of a block", tile, {tile}}};
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts_fused;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::fused_prefill
