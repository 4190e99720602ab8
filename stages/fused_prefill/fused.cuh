#pragma once

#include <gdnflow/stage.hpp>

#include "checkpoints.cuh"
#include "cuda_tiles.cuh"
#include "cuda_variant.hpp"
#include "device/state_io.cuh"
#include "device/views.cuh"

#include <cstdint>
#include <string>

// What the fused kernels on mma.sync share beside the mathematics: parameters, the work of a
// block, gates, and the host's choice of a value tile.

namespace gdnflow::stages::fused_prefill {

constexpr int chunk_rows = static_cast<int>(chunk_tokens);

template <class T>
struct Params {
  device::Rows<const T> q, k;             // [T, Hqk, D]
  device::Rows<const T> v;                // [T, Hv, D]
  device::Rows<const T> a;                // [T, Hv, 64]
  device::Rows<T> o;                      // [T, Hv, D]
  device::Scalars<const float> g_cumsum;  // [T, Hv]
  device::Scalars<const float> beta;      // [T, Hv]
  device::ChunkTable chunks;
  const std::int32_t* checkpoint_offsets = nullptr;  // [N+1], or null without checkpoints
  device::StatePorts states;
  device::Heads heads;
  float scale = 1.0F;

  Params() = default;
  explicit Params(const StageCall& call)
      : q(call["q"]),
        k(call["k"]),
        v(call["v"]),
        a(call["A"]),
        o(call["o"]),
        g_cumsum(call["g_cumsum"]),
        beta(call["beta"]),
        chunks(chunk_table(call)),
        checkpoint_offsets(call["checkpoint_offsets"].as<const std::int32_t>()),
        states(call),
        heads(call.problem),
        scale(call.problem.effective_scale()) {}
};

/// What a block works on: `Tile` value columns of one head through one sequence's chunks.
struct Place {
  int sequence;
  int head;  ///< value head
  int qk_head;
  int column;      ///< first of the value columns
  int begin, end;  ///< chunks
};

/// Worked out afresh at each call (`volatile`), so that a kernel short of registers may call it
/// again where it needs a field, instead of keeping it.
template <int D, int Tile, class T>
__device__ __forceinline__ Place place_of_block(const Params<T>& p) {
  constexpr unsigned tiles = D / Tile;
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  const unsigned matrix = block / tiles;
  Place place;
  place.sequence = static_cast<int>(matrix / p.heads.v);
  place.head = static_cast<int>(matrix % p.heads.v);
  place.qk_head = p.heads.qk_of(place.head);
  place.column = static_cast<int>(block % tiles) * Tile;
  place.begin = p.chunks.offsets[place.sequence];
  place.end = p.chunks.offsets[place.sequence + 1];
  return place;
}

/// The chunk at `index`, or one without tokens behind the last.
template <class T>
__device__ __forceinline__ device::Chunk chunk_at(const Params<T>& p, const Place& place,
                                                  int index) {
  return index < place.end ? p.chunks.at(index) : device::Chunk{};
}

/// Where the state behind the chunk at `index` goes as a checkpoint; -1 where it is none.
template <class T>
__device__ __forceinline__ std::int64_t checkpoint_row_at(const Params<T>& p, const Place& place,
                                                          int index) {
  return checkpoint_row(p.states, p.checkpoint_offsets, p.chunks.at(index),
                        p.chunks.at(place.begin).number);
}

/// Factors of a chunk's tokens. Tokens past the chunk's end have the last token's gc, so that
/// gamma[63] is the decay of the whole chunk, and zero for beta and decay.
struct Gates {
  float gc[chunk_rows];     ///< prefix sum of g
  float gamma[chunk_rows];  ///< exp(gc)
  float beta[chunk_rows];
  float decay[chunk_rows];  ///< exp(gc_l - gc), l the last token
};

/// One token's gates on their way from global memory: fetched a chunk ahead by one thread a token,
/// because they lie Hv apart and no vector copy takes them.
struct TokenGates {
  float gc, gc_last, beta;
  bool there;

  template <class T>
  __device__ __forceinline__ void fetch(const Params<T>& p, const Place& place,
                                        const device::Chunk& chunk, int token) {
    if (chunk.tokens == 0) return;
    there = token < chunk.tokens;
    const std::int64_t last = std::int64_t{chunk.first_token} + chunk.tokens - 1;
    const std::int64_t at = there ? std::int64_t{chunk.first_token} + token : last;
    gc = p.g_cumsum.at(at, place.head);
    gc_last = p.g_cumsum.at(last, place.head);
    beta = p.beta.at(at, place.head);
  }

  __device__ __forceinline__ void store(Gates& gates, int token) const {
    gates.gc[token] = gc;
    gates.gamma[token] = expf(gc);
    gates.beta[token] = there ? beta : 0.0F;
    gates.decay[token] = there ? expf(gc_last - gc) : 0.0F;
  }
};

/// Value columns of a block: the option's, else the width that should finish first. Halves of a
/// head make twice the blocks; each loads Q, K and A and makes Q K^T itself, so it costs about 0.6
/// of a whole head. A round is one block a multiprocessor. A function of problem, capacity and
/// device alone, so that a plan is the same whenever it is made.
inline int value_tile(const VariantQuery& query) {
  const std::int64_t chosen = option_or(query.options, "value_tile", 0);
  if (chosen != 0) return static_cast<int>(chosen);
  if (query.problem.mode == Mode::batch_invariant) return 64;
  if (query.problem.v_dim == 64) return 64;
  const std::int64_t heads = query.capacity.max_sequences * query.problem.v_heads;
  const std::int64_t width = query.device.multiprocessors > 0 ? query.device.multiprocessors : 1;
  return ceil_div(2 * heads, width) * 3 < ceil_div(heads, width) * 5 ? 64 : 128;
}

inline std::int64_t block_count(const VariantQuery& query, int tile) {
  return query.capacity.max_sequences * query.problem.v_heads * (query.problem.v_dim / tile);
}

/// Refusals of a fused kernel whose block takes `tile` value columns and `shared_bytes`.
inline Support supports_fused(const VariantQuery& query, int tile, std::size_t shared_bytes) {
  if (Support support = supports_tiles(query, block_count(query, tile)); !support) return support;
  if (tile > query.problem.v_dim) {
    return Support::no("value_tile: expected at most d_v = " + std::to_string(query.problem.v_dim) +
                       ", got " + std::to_string(tile));
  }
  if (static_cast<std::int64_t>(shared_bytes) > query.device.shared_bytes_per_block) {
    return Support::no("shared memory: expected " + std::to_string(shared_bytes) +
                       " bytes a block, the device has " +
                       std::to_string(query.device.shared_bytes_per_block));
  }
  return Support::yes();
}

inline Support accepts_fused(const StageCall& call) {
  return accepts_vectors(call, {"q", "k", "v", "A", "o"});
}

/// f.template operator()<T, D, Tile>() for a problem that `supports_fused` has accepted.
template <class F>
void with_fused_kernel(const VariantQuery& query, F&& f) {
  with_type_and_dim(query.problem, [&]<class T, int D>() {
    if constexpr (D == 128) {
      if (value_tile(query) == 128) {
        f.template operator()<T, 128, 128>();
        return;
      }
    }
    f.template operator()<T, D, 64>();
  });
}

/// The option that the fused kernels share.
inline OptionSpec value_tile_option() {
  return {"value_tile",
          "value columns of a block; 0: by heads, sequences and multiprocessors",
          0,
          {0, 64, 128}};
}

}  // namespace gdnflow::stages::fused_prefill
