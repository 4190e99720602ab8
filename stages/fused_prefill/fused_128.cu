// fused_prefill, fused-128: one block owns a head, tiles are reused by lifetime and loaded ahead.
//
//   R  = beta .* (V - gamma .* (K S))        64 x 128, contracted over d_k      gamma = exp(gc)
//   V' = A R                                 64 x 128, contracted over tokens
//   P  = scale tril(exp(gc_i - gc_j) Q K^T)  64 x  64, contracted over d_k
//   O  = scale gamma .* (Q S) + P V'         64 x 128
//   S <- gamma_l S + K^T (decay .* V')       128 x 128                          decay = exp(gc_l -
//   gc)
//
// The idea over fused-64: eight warps take all 128 value columns, so Q, K and A are loaded once a
// head and P is made once, by twice the warps. And the next chunk is on its way while this one is
// computed, which takes little memory, because a tile is refilled as soon as its last reader is
// done. Only K, read from the first product to the last, has two buffers.
//
//             | K and Q are here        | P, V and A are here               |
//   barrier --+-------------------------+-----------------------------------+-- next chunk
//   product   | P   S^T K^T and Q S     | R^T   V'^T   O -> o   S^T update   |
//   K         | read . . . . . . . . . . . . . . . . . . . . . . . . . read  |
//   K, other  | <== next K =============================                    |
//   Q         | read . . . . . . . read | <== next Q ==============         |
//   A         | <== this A =========    | . . . read                        |
//   V         |                         | read | <== next V =========       |
//   P         | . write                 | . . . . . . read                  |
//   gates     | fetch the next ones into registers . . . . . . . . .  store |
//
// V is private to warps: each loads the 16 columns that it alone reads, so it needs no barrier to
// refill them. Two barriers a chunk. With a value tile of 64 (an option) four warps do the same for
// half a head: twice the blocks, for few heads on many multiprocessors; also the form for D = 64.
//
// At D = 128 a chunk of a block takes 4.13 M multiply-adds (K S, Q S and the update 1.05 M each,
// P, A R and P V' 0.33 M each, blocks above the diagonal left out), 56 KiB of loads, 16 KiB of
// stores; shared memory moves 0.6 MiB, mostly the right operands that every warp reads for itself.
// Registers a thread: 64 for S, 32 each for two products, 16 for rounded values.

#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "device/swizzled_tile.cuh"
#include "fused.cuh"
#include "value_slab.cuh"

namespace gdnflow::stages::fused_prefill {
namespace {

template <int D, int Tile>
struct Config {
  static constexpr int warps = Tile / slab_columns;
  static constexpr int threads = 32 * warps;
  static_assert(Tile <= D && threads >= chunk_rows, "a thread fetches a token's gates");
};

template <class T, int D, int Tile>
struct SharedStorage {
  device::SwizzledTile<T, chunk_rows, D> k[2];
  device::SwizzledTile<T, chunk_rows, D> q;
  device::SwizzledTile<T, chunk_rows, Tile> v;
  device::SwizzledTile<T, chunk_rows, chunk_rows> a, p;
  Gates gates[2];
};
static_assert(sizeof(SharedStorage<__half, 128, 128>) == 82 * 1024, "a block on 99 KiB");
static_assert(sizeof(SharedStorage<__half, 128, 64>) == 74 * 1024, "two blocks on 163 KiB");

/// A block's view of its work; one function a load, in the order of the picture.
template <class T, int D, int Tile>
struct Block {
  static constexpr int threads = Config<D, Tile>::threads;
  const Params<T>& p;
  const Place place;
  SharedStorage<T, D, Tile>& shared;

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  /// First of this warp's columns, in the tile.
  __device__ __forceinline__ static int column() { return device::warp() * slab_columns; }

  __device__ __forceinline__ void load_k(const device::Chunk& chunk, int buffer) const {
    device::load_rows_async<threads>(shared.k[buffer], p.k.row(chunk.first_token, place.qk_head),
                                     p.k.token_stride, chunk.tokens, thread());
  }
  __device__ __forceinline__ void load_q(const device::Chunk& chunk) const {
    device::load_rows_async<threads>(shared.q, p.q.row(chunk.first_token, place.qk_head),
                                     p.q.token_stride, chunk.tokens, thread());
  }
  __device__ __forceinline__ void load_a(const device::Chunk& chunk) const {
    device::load_rows_async<threads>(shared.a, p.a.row(chunk.first_token, place.head),
                                     p.a.token_stride, chunk.tokens, thread());
  }
  __device__ __forceinline__ void load_v_slab(const device::Chunk& chunk) const {
    device::load_columns_async<32, slab_columns>(
        shared.v, column(), p.v.row(chunk.first_token, place.head) + place.column + column(),
        p.v.token_stride, chunk.tokens, device::lane());
  }
  __device__ __forceinline__ void store_state_to(const device::StatePool& pool, std::int64_t row,
                                                 Slab<D / 8>& state) const {
    store_state(state, pool, row, place.head, place.column + column());
  }
};

/// Chunk `index`. On entry K, Q (one group) and V (the latest group) are on their way; on return
/// those of `next` are, if it has tokens.
template <class T, int D, int Tile>
__device__ __forceinline__ void compute_chunk(const Block<T, D, Tile>& block,
                                              const device::Chunk& chunk, const device::Chunk& next,
                                              int buffer, Slab<D / 8>& state) {
  auto& shared = block.shared;
  const Gates& gates = shared.gates[buffer];
  const auto& k_tile = shared.k[buffer];
  const bool more = next.tokens > 0;
  device::wait_for_copy_groups<1>();
  __syncthreads();  // K, Q and gates are here; all that the last chunk used has been read

  block.load_a(chunk);
  device::close_copy_group();
  if (more) block.load_k(next, buffer ^ 1);
  device::close_copy_group();
  TokenGates next_gates{};
  if (Block<T, D, Tile>::thread() < chunk_rows) {
    next_gates.fetch(block.p, block.place, next, Block<T, D, Tile>::thread());
  }

  attend_jobs<T, D, Config<D, Tile>::warps>(shared.q, k_tile, shared.p, gates, block.p.scale,
                                            device::warp());
  const MatrixCursor keys(k_tile, MatrixOrder::right_down);
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
  device::wait_for_copy_groups<1>();
  __syncthreads();  // P, V and A are here; Q has been read

  if (more) block.load_q(next);
  device::close_copy_group();
  const MatrixCursor v_slab(shared.v, MatrixOrder::right_down, 0, block.column());
  TokenFragments r;
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
    r.x[step] = residual<T>(product, step, v_slab, gates, 16 * step);
  }
  __syncwarp();  // the slab of V has been read
  if (more) block.load_v_slab(next);
  device::close_copy_group();

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
    scale_output(o[m], gates, block.p.scale, 16 * m);
#pragma unroll
    for (int j = 0; j <= m; ++j) {
      multiply_add_slab<T>(o[m], load<FragmentA>(scores, 16 * m, 16 * j), v_new.x[j]);
    }
    store_output(o[m], block.p, block.place, chunk, 16 * m, block.column());
  }
  update_state<T, D>(state, v_decayed, k_tile, gates);
  if (Block<T, D, Tile>::thread() < chunk_rows) {
    next_gates.store(shared.gates[buffer ^ 1], Block<T, D, Tile>::thread());
  }
}

template <class T, int D, int Tile>
__global__ void __launch_bounds__(Config<D, Tile>::threads, 128 / Tile)
    fused_128_kernel(const __grid_constant__ Params<T> p) {
  auto& shared = device::dynamic_shared<SharedStorage<T, D, Tile>>();
  const Block<T, D, Tile> block{p, place_of_block<D, Tile>(p), shared};
  const Place& place = block.place;
  const int thread = Block<T, D, Tile>::thread();
  device::Chunk chunk = chunk_at(p, place, place.begin);
  device::Chunk next = chunk_at(p, place, place.begin + 1);
  const std::int32_t first_number = chunk.number;
  if (chunk.tokens > 0) {
    block.load_k(chunk, 0);
    block.load_q(chunk);
    device::close_copy_group();
    block.load_v_slab(chunk);
    device::close_copy_group();
    if (thread < chunk_rows) {
      TokenGates gates{};
      gates.fetch(p, place, chunk, thread);
      gates.store(shared.gates[0], thread);
    }
  }
  Slab<D / 8> state;
  load_state(state, p.states.initial, p.states.initial_row(place.sequence), place.head,
             place.column + block.column());
  for (int index = place.begin; index < place.end; ++index) {
    const device::Chunk after = chunk_at(p, place, index + 2);
    compute_chunk(block, chunk, next, (index - place.begin) & 1, state);
    block.store_state_to(p.states.checkpoints,
                         checkpoint_row(p.states, p.checkpoint_offsets, chunk, first_number),
                         state);
    chunk = next;
    next = after;
  }
  device::allow_successors();
  block.store_state_to(p.states.final, p.states.final_row(place.sequence), state);
}

/// Bytes of a block at a value tile; the same for both types.
std::uint32_t shared_bytes(const Problem& problem, int tile) {
  if (problem.v_dim == 64) return sizeof(SharedStorage<__half, 64, 64>);
  return tile == 64 ? sizeof(SharedStorage<__half, 128, 64>)
                    : sizeof(SharedStorage<__half, 128, 128>);
}

Support supports(const VariantQuery& query) {
  const int tile = value_tile(query);
  return supports_fused(query, tile, shared_bytes(query.problem, tile));
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  with_fused_kernel(query, [&]<class T, int D, int Tile>() {
    out.push_back(kernel_step<Params<T>>(
        "fused_prefill", fused_128_kernel<T, D, Tile>, grid_of(block_count(query, Tile)),
        {Config<D, Tile>::threads}, shared_bytes(call.problem, Tile), Params<T>(call)));
  });
}

}  // namespace

Variant fused_128() {
  Variant variant;
  variant.id = "fused-128";
  variant.description = "one block a head, tiles reused by lifetime and loaded a chunk ahead";
  variant.target = DeviceType::cuda;
  variant.options = {value_tile_option()};
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts_fused;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::fused_prefill
