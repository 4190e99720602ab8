#pragma once

#include "checkpoints.cuh"
#include "cuda_tiles.cuh"
#include "device/mma.cuh"
#include "device/state_io.cuh"
#include "device/tile.cuh"
#include "device/views.cuh"

#include <cstdint>

// The recurrence over a sequence's chunks, which the naive chunk_state and residual_state share:
//
//   write S, rounded, as the chunk's start;  V' <- Form;  S <- exp(gc_l) S + K^T (exp(gc_l - gc) .*
//   V')
//
// A block takes a sequence, a value head and 32 of d_v's columns, which are independent of each
// other; 128 threads walk the chunks in order. S stays in fp32 registers: warp w holds rows
// (D/4) w to (D/4)(w + 1) - 1 of d_k. Tokens' products are cut by rows: warp w has tokens 16w to
// 16w + 15.
//
//            d_k = D                    32 of d_v
//         +-----------+               +-----+            what meets a tensor core is rounded to the
//      64 |     K     |          d_k  |  S  |            activations' type: S for the products with
//  tokens |           |           = D |     |            tokens (and so the stored chunk states),
//  V',
//         +-----------+               |     |            and the decayed V', each from fp32 once
//                                     +-----+
//
// A chunk at D = 128 costs 0.26 M (K S or W S) + 0.26 M (K^T V') multiply-adds a block, 0.13 M more
// in the residual form (A R); 16 KiB of K, 4 KiB of values in and out, 8 KiB of S, and A or W.
// Narrower tiles mean more blocks, each shorter a chunk, against reading K and A four times a head,
// mostly from L2: with few heads the chain over chunks is all that counts.

namespace gdnflow::stages {

template <int D>
struct StateWalkConfig {
  static constexpr int threads = 128;
  static constexpr int tokens = static_cast<int>(chunk_tokens);
  static constexpr int columns = 32;         // of d_v, a block's
  static constexpr int tiles = D / columns;  // blocks a head
  static constexpr int slabs = D / 64;       // 16-row slabs of S a warp holds
  static constexpr int width = columns / 8;  // of a slab, in mma tiles
  static_assert(tokens == threads / 32 * 16 && D == threads / 32 * 16 * slabs);
};

template <class T>
struct StateWalkParams {
  device::Rows<const T> k;                // [T, Hqk, D]
  device::Scalars<const float> g_cumsum;  // [T, Hv]
  device::Rows<T> v_new;                  // [T, Hv, D]
  device::Matrices<T> chunk_states;       // [NC, Hv, D, D], d_k rows
  device::ChunkTable chunks;
  const std::int32_t* checkpoint_offsets;  // [N+1], or null where there are no checkpoints
  device::StatePorts states;
  device::Heads heads;

  StateWalkParams() = default;
  explicit StateWalkParams(const StageCall& call)
      : k(call["k"]),
        g_cumsum(call["g_cumsum"]),
        v_new(call["v_new"]),
        chunk_states(call["chunk_states"]),
        chunks(chunk_table(call)),
        checkpoint_offsets(call["checkpoint_offsets"].as<const std::int32_t>()),
        states(call),
        heads(call.problem) {}
};

/// The decays of a chunk's tokens; zero for tokens past its end.
struct ChunkDecays {
  float from_start[64];  ///< exp(gc_i)
  float to_end[64];      ///< exp(gc_l - gc_i), l the last token of the chunk
};

template <class T, int D>
struct StateWalkStorage {
  using Config = StateWalkConfig<D>;
  device::Tile<T, Config::tokens, D> k;
  device::Tile<T, D, Config::columns> state;
  device::Tile<T, Config::tokens, Config::columns> v_new;
  device::Tile<T, Config::tokens, Config::columns> decayed;
  ChunkDecays decays;
};

/// What a block works on.
struct StateWalkPlace {
  int sequence;
  int head;    ///< value head
  int column;  ///< first of d_v
};

template <int D>
__device__ __forceinline__ StateWalkPlace state_walk_place(const device::Heads& heads) {
  constexpr unsigned tiles = StateWalkConfig<D>::tiles;
  const unsigned matrix = blockIdx.x / tiles;
  return {static_cast<int>(matrix / heads.v), static_cast<int>(matrix % heads.v),
          static_cast<int>(blockIdx.x % tiles) * StateWalkConfig<D>::columns};
}

/// A warp's part of S.
template <int D>
struct StateRegisters {
  using Config = StateWalkConfig<D>;
  device::Slab<Config::width> slabs[Config::slabs];

  /// The first row of d_k in slab i.
  __device__ __forceinline__ static int row(int i) {
    return (device::warp() * Config::slabs + i) * 16;
  }

  /// f(k, v, x) with v counted from the block's first column.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) {
#pragma unroll
    for (int i = 0; i < Config::slabs; ++i) {
      slabs[i].for_each([&](int r, int c, float& x) { f(row(i) + r, c, x); });
    }
  }

  __device__ __forceinline__ void load(const device::StatePool& pool, std::int64_t from,
                                       const StateWalkPlace& place) {
    if (from < 0) {
#pragma unroll
      for (int i = 0; i < Config::slabs; ++i) slabs[i].clear();
      return;
    }
    const device::StateMatrix matrix = pool.matrix(from, place.head);
    for_each([&](int k, int v, float& x) { x = matrix.load(k, place.column + v); });
  }

  __device__ __forceinline__ void store(const device::StatePool& pool, std::int64_t to,
                                        const StateWalkPlace& place) {
    if (to < 0) return;
    const device::StateMatrix matrix = pool.matrix(to, place.head);
    for_each([&](int k, int v, float& x) { matrix.store(k, place.column + v, x); });
  }
};

template <class T>
__device__ __forceinline__ void load_decays(ChunkDecays& decays, const StateWalkParams<T>& p,
                                            const device::Chunk& chunk, int head) {
  const int token = static_cast<int>(threadIdx.x);
  if (token >= 64) return;
  const bool there = token < chunk.tokens;
  const std::int64_t first = chunk.first_token;
  const float gc = there ? p.g_cumsum.at(first + token, head) : 0.0F;
  const float last = p.g_cumsum.at(first + chunk.tokens - 1, head);
  decays.from_start[token] = there ? expf(gc) : 0.0F;
  decays.to_end[token] = there ? expf(last - gc) : 0.0F;
}

/// Walks a block's chunks. `Form` makes the new values:
///   typename Form::Params   derives from StateWalkParams<T>
///   typename Form::Storage  derives from StateWalkStorage<T, D>
///   Form::load(storage, params, chunk, place)    starts copying its tiles
///   Form::values(storage, params, chunk, place)  a warp's V' in fp32, rows past the end zero; the
///                                                tiles, storage.state and decays are there
template <class T, int D, class Form>
__device__ void walk_states(const typename Form::Params& p, typename Form::Storage& shared) {
  using Config = StateWalkConfig<D>;
  const StateWalkPlace place = state_walk_place<D>(p.heads);
  const int qk_head = p.heads.qk_of(place.head);
  const int begin = p.chunks.offsets[place.sequence];
  const int end = p.chunks.offsets[place.sequence + 1];
  const int token_row = device::warp() * 16;

  StateRegisters<D> state;
  state.load(p.states.initial, p.states.initial_row(place.sequence), place);
  device::Chunk next = begin < end ? p.chunks.at(begin) : device::Chunk{};
  const std::int32_t first_number = next.number;
  for (int index = begin; index < end; ++index) {
    const device::Chunk chunk = next;
    if (index + 1 < end) next = p.chunks.at(index + 1);  // its latency hides behind this chunk
    device::load_rows_async<Config::threads>(shared.k, p.k.row(chunk.first_token, qk_head),
                                             p.k.token_stride, chunk.tokens);
    Form::load(shared, p, chunk, place);
    load_decays(shared.decays, p, chunk, place.head);
#pragma unroll
    for (int i = 0; i < Config::slabs; ++i) {
      device::store_slab(shared.state, StateRegisters<D>::row(i), 0, state.slabs[i]);
    }
    device::wait_for_copies();
    __syncthreads();
    device::store_rows<Config::threads>(shared.state,
                                        p.chunk_states.matrix(index, place.head) + place.column,
                                        p.chunk_states.row_stride, D);

    device::Slab<Config::width> values = Form::values(shared, p, chunk, place);
    device::store_slab(shared.v_new, token_row, 0, values);
    values.for_each([&](int r, int, float& x) { x *= shared.decays.to_end[token_row + r]; });
    device::store_slab(shared.decayed, token_row, 0, values);
    const float decay = shared.decays.from_start[chunk.tokens - 1];
    __syncthreads();
    device::store_rows<Config::threads>(shared.v_new,
                                        p.v_new.row(chunk.first_token, place.head) + place.column,
                                        p.v_new.token_stride, chunk.tokens);
    state.for_each([&](int, int, float& x) { x *= decay; });
#pragma unroll
    for (int i = 0; i < Config::slabs; ++i) {
      device::multiply_add<T, Config::tokens>(
          state.slabs[i],
          [&](int k) {
            return device::load_a_from_rows_of_k(shared.k, StateRegisters<D>::row(i), k);
          },
          [&](int k, int n) { return device::load_b(shared.decayed, k, n); });
    }
    state.store(p.states.checkpoints,
                checkpoint_row(p.states, p.checkpoint_offsets, chunk, first_number), place);
    __syncthreads();  // the tiles are free for the next chunk
  }
  state.store(p.states.final, p.states.final_row(place.sequence), place);
}

template <int D>
std::int64_t state_walk_blocks_of(const Problem& problem, const Capacity& capacity) {
  return capacity.max_sequences * problem.v_heads * StateWalkConfig<D>::tiles;
}

inline std::int64_t state_walk_blocks(const Problem& problem, const Capacity& capacity) {
  return problem.v_dim == 64 ? state_walk_blocks_of<64>(problem, capacity)
                             : state_walk_blocks_of<128>(problem, capacity);
}

}  // namespace gdnflow::stages
