// fused_prefill, fused-128x512: sixteen warps, half of which keep the state and half of which make
// the output.
//
//   R  = beta .* (V - gamma .* (K S))        64 x 128, contracted over d_k      state warps
//   V' = A R                                 64 x 128, contracted over tokens   state warps
//   S <- gamma_l S + K^T (decay .* V')       128 x 128                          state warps
//   P  = scale tril(exp(gc_i - gc_j) Q K^T)  64 x  64, contracted over d_k      output warps
//   O  = scale gamma .* (Q S) + P V'         64 x 128                           output warps
//
//   gamma = exp(gc), decay = exp(gc_l - gc), gc_l that of the chunk's last token
//
// The idea over fused-128: of a chunk's products, those that the next chunk waits for (K S, A R and
// the update) are little more than half. Eight warps do these alone; eight others trail behind with
// P, Q S and P V'. While one half rounds, scales and waits, the other has products to issue: each
// of the four schedulers has two warps of either kind.
//
//   state warp w: value columns 16 w .. 16 w + 15           output warp u: columns of state warps
//                                                           2 (u / 2) and the next one, tokens
//                                                           16 {0, 3} or 16 {1, 2}
//   --+-- chunk: all tiles and S^T are here --------------------------------+-- all
//     |   S^T K^T                                           P ==> shared    |
//     |   R^T  (V)                                          Q S             |
//     |   V'^T  (A) ==> shared                              scale gamma     |
//     |-- heads up ---------------------------------------- V' and P -------|
//     |   S^T <- gamma_l S^T + V'^T K                       O += P V' -> o  |
//     |   S^T ==> shared                                                    |
//   --+-- next chunk -------------------------------------------------------+--
//
// State warps announce V' at a named barrier (`arrive`) on which output warps wait (`sync`), and
// replace S^T when these have announced that Q S is done. S^T and V'^T are handed over as packed
// fragments, lane to lane: what a state warp's lane has as left operand is what an output warp's
// lane needs as right operand, so the mailboxes are read and written 16 bytes a lane without
// conflict.
//
// Output warps load everything: K, A and the gates a chunk ahead into second buffers; Q, which they
// alone read, and V into their only ones as soon as all of them know that V' is there. A thread of
// 512 has 128 registers at most; a state warp's hold 64 of S, 32 of a product and 16 of rounded
// values, so it keeps next to nothing else: half of V'^T at a time, fragments of S read back from
// the mailbox, the block's place worked out again where it is needed.
//
// At a value tile of 64 (an option) 4 + 4 warps do the same for half a head, and two such blocks
// fit on a multiprocessor of 227 KiB: one has work while the other waits for its next chunk.
//
// At D = 128 a chunk of a block takes 4.13 M multiply-adds (state warps 2.43 M, output warps 1.70
// M), 56 KiB of loads, 16 KiB of stores; shared memory moves 0.65 MiB.

#include "device/barrier.cuh"
#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "device/swizzled_tile.cuh"
#include "fused.cuh"
#include "value_slab.cuh"

namespace gdnflow::stages::fused_prefill {
namespace {

// Named barriers; 0 is __syncthreads.
enum Meeting : int {
  values_ready = 1,  // V'^T from the state warps, P among the output warps
  state_read,        // output warps -> state warps: Q S is done, S^T may be overwritten
  next_chunk,        // all warps: tiles and S^T are there
};

template <int D, int Tile>
struct Config {
  static constexpr int slabs = Tile / slab_columns;
  static constexpr int role_threads = 32 * slabs;  // state warps; as many output warps
  static constexpr int threads = 2 * role_threads;
  static constexpr int state_steps = D / 16;
  static_assert(Tile <= D && role_threads >= chunk_rows, "a thread fetches a token's gates");
};

/// A fragment a lane, 512 bytes a warp.
struct Mailbox {
  uint4 lanes[32];

  __device__ __forceinline__ void put(const FragmentA& f) {
    lanes[device::lane()] = make_uint4(f.x[0], f.x[1], f.x[2], f.x[3]);
  }
  __device__ __forceinline__ FragmentA get() const {
    const uint4 x = lanes[device::lane()];
    return {{x.x, x.y, x.z, x.w}};
  }
};

template <class T, int D, int Tile>
struct SharedStorage {
  device::SwizzledTile<T, chunk_rows, D> k[2], q;
  device::SwizzledTile<T, chunk_rows, chunk_rows> a[2];
  device::SwizzledTile<T, chunk_rows, Tile> v;
  device::SwizzledTile<T, chunk_rows, chunk_rows> p;
  Mailbox state[Config<D, Tile>::slabs][Config<D, Tile>::state_steps];
  Mailbox values[Config<D, Tile>::slabs][token_steps];
  Gates gates[2];
  float next_gates[3][chunk_rows];  // gc, gc of the chunk's last token and beta, on their way
};
static_assert(sizeof(SharedStorage<__half, 128, 128>) <= 139 * 1024, "a block on 163 KiB");
static_assert(sizeof(SharedStorage<__half, 128, 64>) <= 107 * 1024, "two blocks on 227 KiB");

template <class T, int D, int Tile>
struct Block {
  using Shape = Config<D, Tile>;
  const Params<T>& p;
  const Place place;
  SharedStorage<T, D, Tile>& shared;

  /// The thread's number within its role.
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x) % Shape::role_threads;
  }
  /// The warp's number within its role.
  __device__ __forceinline__ static int warp() { return device::warp() % Shape::slabs; }

  __device__ __forceinline__ void meet() const { device::named_sync(next_chunk, Shape::threads); }

  // Loads, by the output warps.
  __device__ __forceinline__ void load_double_tiles(const device::Chunk& chunk, int buffer) const {
    constexpr int threads = Shape::role_threads;
    const std::int64_t token = chunk.first_token;
    device::load_rows_async<threads>(shared.k[buffer], p.k.row(token, place.qk_head),
                                     p.k.token_stride, chunk.tokens, thread());
    device::load_rows_async<threads>(shared.a[buffer], p.a.row(token, place.head), p.a.token_stride,
                                     chunk.tokens, thread());
  }
  __device__ __forceinline__ void load_single_tiles(const device::Chunk& chunk) const {
    constexpr int threads = Shape::role_threads;
    device::load_rows_async<threads>(shared.q, p.q.row(chunk.first_token, place.qk_head),
                                     p.q.token_stride, chunk.tokens, thread());
    device::load_rows_async<threads>(shared.v,
                                     p.v.row(chunk.first_token, place.head) + place.column,
                                     p.v.token_stride, chunk.tokens, thread());
  }

  /// A token's gates wait in shared memory, where only the thread that has fetched them reads them:
  /// registers are scarce.
  __device__ __forceinline__ void load_gates(const device::Chunk& chunk) const {
    if (thread() >= chunk_rows) return;
    const std::int64_t last = std::int64_t{chunk.first_token} + chunk.tokens - 1;
    const std::int64_t token = min(std::int64_t{chunk.first_token} + thread(), last);
    device::copy_4_async(&shared.next_gates[0][thread()], &p.g_cumsum.at(token, place.head));
    device::copy_4_async(&shared.next_gates[1][thread()], &p.g_cumsum.at(last, place.head));
    device::copy_4_async(&shared.next_gates[2][thread()], &p.beta.at(token, place.head));
  }
  __device__ __forceinline__ void make_gates(const device::Chunk& chunk, int buffer) const {
    if (thread() >= chunk_rows) return;
    const TokenGates gates{shared.next_gates[0][thread()], shared.next_gates[1][thread()],
                           shared.next_gates[2][thread()], thread() < chunk.tokens};
    gates.store(shared.gates[buffer], thread());
  }
};

// ---------------------------------------------------------------------------------------------
// State warps.

/// V'^T of token steps `First` and `First` + 1, to the mailbox, and its decayed form. Half of the
/// tokens at a time, the later half first: beside S and R^T there is no room for all of V'^T.
template <class T, int First>
__device__ __forceinline__ void make_values(const TokenFragments& r,
                                            const MatrixCursor<chunk_rows>& inverse,
                                            const Gates& gates, Mailbox (&mailbox)[token_steps],
                                            TokenFragments& v_decayed) {
  const Slab<4> values = new_values<T, First, 2>(r, inverse);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    mailbox[First + step].put(device::to_a<T>(values, 16 * step));
    v_decayed.x[First + step] = decayed<T>(values, step, gates, 16 * (First + step));
  }
}

/// A chunk, whose tiles and gates stand in `buffer`: the parity of the count of chunks left.
template <class T, int D, int Tile>
__device__ __forceinline__ void advance_state(const Block<T, D, Tile>& block, int buffer,
                                              Slab<D / 8>& state) {
  using Shape = Config<D, Tile>;
  auto& shared = block.shared;
  const Gates& gates = shared.gates[buffer];
  const auto& k_tile = shared.k[buffer];
  const int warp = Block<T, D, Tile>::warp();

  const MatrixCursor keys(k_tile, MatrixOrder::right_down);
  Slab<8> product;
  product.clear();
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    // Back from the mailbox: all packed fragments beside S would not fit in 128 registers.
    multiply_keys<T>(product, shared.state[warp][k / 16].get(), keys, k);
  }
  const MatrixCursor v_slab(shared.v, MatrixOrder::right_down, 0, warp * slab_columns);
  TokenFragments r;
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
    r.x[step] = residual<T>(product, step, v_slab, gates, 16 * step);
  }

  const MatrixCursor inverse(shared.a[buffer], MatrixOrder::right_down);
  TokenFragments v_decayed;
  make_values<T, 2>(r, inverse, gates, shared.values[warp], v_decayed);
  make_values<T, 0>(r, inverse, gates, shared.values[warp], v_decayed);
  device::named_arrive(values_ready, Shape::threads);
  update_state<T, D>(state, v_decayed, k_tile, gates);
}

/// S^T for the next chunk, to the mailbox.
template <class T, int D, int Tile>
__device__ __forceinline__ void publish_state(const Block<T, D, Tile>& block,
                                              const Slab<D / 8>& state) {
  Mailbox* const mailbox = block.shared.state[Block<T, D, Tile>::warp()];
#pragma unroll
  for (int k = 0; k < D; k += 16) mailbox[k / 16].put(device::to_a<T>(state, k));
}

/// f(place, first column of this warp)
template <class T, int D, int Tile, class F>
__device__ __forceinline__ void with_place(const Block<T, D, Tile>& block, F&& f) {
  const Place place = place_of_block<D, Tile>(block.p);
  f(place, place.column + Block<T, D, Tile>::warp() * slab_columns);
}

template <class T, int D, int Tile>
__device__ __forceinline__ void keep_state(const Block<T, D, Tile>& block) {
  const device::StatePorts& states = block.p.states;
  Slab<D / 8> state;
  with_place(block, [&](const Place& place, int column) {
    load_state(state, states.initial, states.initial_row(place.sequence), place.head, column);
  });
  // The reduction leaves the count, the same in all lanes, in a register of the warp: a thread has
  // none to spare.
  int left = __reduce_max_sync(~0U, block.place.end - block.place.begin);
  for (; left > 0; --left) {
    publish_state(block, state);
    block.meet();
    advance_state(block, left & 1, state);
    device::named_sync(state_read, Config<D, Tile>::threads);
    if (states.checkpoint_chunks > 0) {
      with_place(block, [&](const Place& place, int column) {
        store_state(state, states.checkpoints, checkpoint_row_at(block.p, place, place.end - left),
                    place.head, column);
      });
    }
  }
  with_place(block, [&](const Place& place, int column) {
    store_state(state, states.final, states.final_row(place.sequence), place.head, column);
  });
}

// ---------------------------------------------------------------------------------------------
// Output warps.

/// Q S of two token tiles and two slabs: o[token tile][slab].
using OutputTiles = OutputSlab[2][2];

/// O += P V' for token tiles `Half` and 3 - `Half`.
template <class T, int Half, class Values>
__device__ __forceinline__ void add_values(OutputTiles& o, const MatrixCursor<chunk_rows>& scores,
                                           const Values& values, int first_slab) {
#pragma unroll
  for (int j = 0; j < 4 - Half; ++j) {
    const FragmentA v[2] = {values[first_slab][j].get(), values[first_slab + 1][j].get()};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = i == 0 ? Half : 3 - Half;
      if (j > m) continue;
      const auto a = load<FragmentA>(scores, 16 * m, 16 * j);
      multiply_add_slab<T>(o[i][0], a, v[0]);
      multiply_add_slab<T>(o[i][1], a, v[1]);
    }
  }
}

/// Among the four lanes of a quad: afterwards x[i] is what lane i of the quad had as x[this lane].
__device__ __forceinline__ void transpose_quad(std::uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (device::lane() & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const std::uint32_t other =
          __shfl_xor_sync(~0U, upper ? x[i] : x[i + step], static_cast<unsigned>(step));
      (upper ? x[i] : x[i + step]) = other;
    }
  }
}

/// Rounds and stores tokens `first` to `first + 15` of two slabs side by side; rows past the
/// chunk's end are left out. Quads put 16 bytes of a row together: a store of 4 bytes a lane takes
/// as long.
template <class T>
__device__ __forceinline__ void store_rows(const OutputSlab (&o)[2], const Params<T>& p,
                                           const Place& place, const device::Chunk& chunk,
                                           int first, int column) {
  const int lane = device::lane();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    std::uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &o[i / 2].x[i % 2][2 * h];
      x[i] = device::pack<T>(pair[0], pair[1]);
    }
    transpose_quad(x);
    const int row = first + 8 * h + lane / 4;
    if (row < chunk.tokens) {
      T* const out =
          p.o.row(chunk.first_token + row, place.head) + place.column + column + lane % 4 * 8;
      *reinterpret_cast<uint4*>(out) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

/// Chunk in `buffer`. On return the tiles and gates of `next` are on their way.
template <class T, int D, int Tile>
__device__ __forceinline__ void output_chunk(const Block<T, D, Tile>& block,
                                             const device::Chunk& chunk, const device::Chunk& next,
                                             int buffer) {
  using Shape = Config<D, Tile>;
  const int warp = Block<T, D, Tile>::warp();
  auto& shared = block.shared;
  const Gates& gates = shared.gates[buffer];
  if (next.tokens > 0) {
    block.load_double_tiles(next, buffer ^ 1);
    block.load_gates(next);
  }
  device::close_copy_group();

  attend_jobs<T, D, Shape::slabs>(shared.q, shared.k[buffer], shared.p, gates, block.p.scale, warp);
  device::wait_for_copy_groups<0>();  // long since there
  if (next.tokens > 0) block.make_gates(next, buffer ^ 1);

  const int first_slab = warp / 2 * 2;
  const int half = warp % 2;
  const int first_token[2] = {16 * half, 48 - 16 * half};
  const MatrixCursor queries(shared.q, MatrixOrder::down_right);
  OutputTiles o;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    o[i][0].clear();
    o[i][1].clear();
  }
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    const FragmentA s[2] = {shared.state[first_slab][k / 16].get(),
                            shared.state[first_slab + 1][k / 16].get()};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto a = load<FragmentA>(queries, first_token[i], k);
      multiply_add_slab<T>(o[i][0], a, s[0]);
      multiply_add_slab<T>(o[i][1], a, s[1]);
    }
  }
  device::named_arrive(state_read, Shape::threads);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scale_output(o[i][0], gates, block.p.scale, first_token[i]);
    scale_output(o[i][1], gates, block.p.scale, first_token[i]);
  }
  device::named_sync(values_ready, Shape::threads);
  if (next.tokens > 0) block.load_single_tiles(next);  // Q and V have been read
  device::close_copy_group();
  const MatrixCursor scores(shared.p, MatrixOrder::down_right);
  if (half == 0) {
    add_values<T, 0>(o, scores, shared.values, first_slab);
  } else {
    add_values<T, 1>(o, scores, shared.values, first_slab);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    store_rows(o[i], block.p, block.place, chunk, first_token[i], first_slab * slab_columns);
  }
}

template <class T, int D, int Tile>
__device__ __forceinline__ void make_output(const Block<T, D, Tile>& block) {
  const Place& place = block.place;
  int left = place.end - place.begin;
  device::Chunk chunk = chunk_at(block.p, place, place.begin);
  const device::Chunk last = left > 0 ? block.p.chunks.at(place.end - 1) : device::Chunk{};
  const int end = last.first_token + last.tokens;
  if (left > 0) {
    block.load_double_tiles(chunk, left & 1);
    block.load_single_tiles(chunk);
    block.load_gates(chunk);
    device::close_copy_group();
    device::wait_for_copy_groups<0>();
    block.make_gates(chunk, left & 1);
  }
  for (; left > 0; --left) {
    // A sequence's chunks follow one another, so the table need not be asked again.
    device::Chunk next{};
    next.first_token = chunk.first_token + chunk.tokens;
    next.tokens = min(chunk_rows, end - next.first_token);
    device::wait_for_copy_groups<0>();
    block.meet();
    output_chunk(block, chunk, next, left & 1);
    chunk = next;
  }
}

template <class T, int D, int Tile>
__global__ void __launch_bounds__(Config<D, Tile>::threads, 128 / Tile)
    fused_128x512_kernel(const __grid_constant__ Params<T> p) {
  auto& shared = device::dynamic_shared<SharedStorage<T, D, Tile>>();
  const Block<T, D, Tile> block{p, place_of_block<D, Tile>(p), shared};
  if (device::warp() < Config<D, Tile>::slabs) {
    keep_state(block);
  } else {
    make_output(block);
    device::allow_successors();
  }
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
        "fused_prefill", fused_128x512_kernel<T, D, Tile>, grid_of(block_count(query, Tile)),
        {Config<D, Tile>::threads}, shared_bytes(call.problem, Tile), Params<T>(call)));
  });
}

}  // namespace

Variant fused_128x512() {
  Variant variant;
  variant.id = "fused-128x512";
  variant.description = "sixteen warps a head: eight keep the state, eight make the output";
  variant.target = DeviceType::cuda;
  variant.options = {value_tile_option()};
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts_fused;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::fused_prefill
