#pragma once

#include <gdnflow/stage.hpp>

#include "cuda_tiles.cuh"
#include "cuda_variant.hpp"
#include "device/state_io.cuh"
#include "device/tensor_map.hpp"
#include "device/tma.cuh"
#include "device/views.cuh"
#include "device/wgmma.cuh"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

// What the kernels of warp groups (sm_90a) share: a block's work, its place in the ring of loaded
// chunks, the store of an output tile, and which problems they take. Head dims are 128, tiles are
// panels of 64 columns in TMA's 128-byte swizzle.

namespace gdnflow::stages::fused_prefill {

inline constexpr int rows = chunk_tokens;        // of a chunk
inline constexpr int dim = 128;                  // d_k = d_v
inline constexpr int group_threads = 128;        // a warp group
inline constexpr int panel_bytes = rows * 128;   // 64 rows x 64 columns
inline constexpr int steps_of_rows = rows / 16;  // WGMMA steps over tokens
inline constexpr int steps_of_dim = dim / 16;    // over d_k
inline constexpr std::size_t shared_limit = 227 * 1024;

/// What the kernels read and write.
struct Sm90Params {
  CUtensorMap q, k, v, a, o;              ///< [T, H, 128], A [T, Hv, 64]; boxes of 64 columns
  device::Scalars<const float> g_cumsum;  ///< [T, Hv]
  device::Scalars<const float> beta;      ///< [T, Hv]
  device::Rows<void> o_rows;              ///< [T, Hv, 128], for chunks that are not full
  device::ChunkTable chunks;
  const std::int32_t* checkpoint_offsets;  ///< [N+1], or null
  device::StatePorts state;
  device::Heads heads;
  float scale;
};

/// What every kernel reads and writes.
inline Sm90Params sm90_tensors(const StageCall& call) {
  Sm90Params params{};
  params.q = device::tile_map(call["q"], rows);
  params.k = device::tile_map(call["k"], rows);
  params.v = device::tile_map(call["v"], rows);
  params.o = device::tile_map(call["o"], rows);
  params.beta = device::Scalars<const float>(call["beta"]);
  params.o_rows = device::Rows<void>(call["o"]);
  params.state = device::StatePorts(call);
  params.heads = device::Heads(call.problem);
  params.scale = call.problem.effective_scale();
  return params;
}

/// The same, and what the stages in front of fused_prefill have made.
inline Sm90Params sm90_params(const StageCall& call) {
  Sm90Params params = sm90_tensors(call);
  params.a = device::tile_map(call["A"], rows);
  params.g_cumsum = device::Scalars<const float>(call["g_cumsum"]);
  params.chunks = chunk_table(call);
  params.checkpoint_offsets = call["checkpoint_offsets"].as<const std::int32_t>();
  return params;
}

/// What a block works on: a sequence and a value head, or `Tile` of its value columns.
struct Work {
  int sequence, head, qk_head, first_column;
  int first_chunk, chunks;
};

template <int Tile>
__device__ __forceinline__ Work work_of_block(const device::ChunkTable& chunks,
                                              const device::Heads& heads) {
  constexpr int splits = dim / Tile;
  Work w;
  const int split = static_cast<int>(blockIdx.x % splits);
  const unsigned task = blockIdx.x / splits;
  w.head = static_cast<int>(task % heads.v);
  w.sequence = static_cast<int>(task / heads.v);
  w.qk_head = heads.qk_of(w.head);
  w.first_column = split * Tile;
  w.first_chunk = chunks.offsets[w.sequence];
  w.chunks = chunks.offsets[w.sequence + 1] - w.first_chunk;
  return w;
}

/// Position in a ring of stages with mbarriers.
struct Slot {
  int index = 0;
  std::uint32_t phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) {
      index = 0;
      phase ^= 1;
    }
  }
};

/// Sends `length` rows of a tile of O, of `Panels` panels, on their way; by `Threads`
/// threads, after a barrier behind the tile's writes. A whole tile goes by TMA in the bulk group of
/// thread 0.
template <class Element, int Panels, int Threads = group_threads>
__device__ __forceinline__ void store_output_tile(const CUtensorMap& map,
                                                  const device::Rows<void>& o, const Work& w,
                                                  const std::byte* tile, int first, int length,
                                                  int thread) {
  if (length == rows) {
    if (thread == 0) {
      for (int c = 0; c < Panels; ++c) {
        device::store_box(map, tile + c * panel_bytes, w.first_column + 64 * c, w.head, first);
      }
      device::store_commit();
    }
    return;
  }
  // A full box would overwrite the next sequence. So rare that nothing of it is to be kept in
  // registers.
  asm volatile("" : "+r"(thread));
  constexpr int parts = Panels * 8;  // 16 bytes each
#pragma unroll 1
  for (int j = thread; j < length * parts; j += Threads) {
    const int row = j / parts;
    const int column = j % parts * 8;
    auto* out = static_cast<Element*>(o.data) + (std::int64_t{first} + row) * o.token_stride +
                w.head * o.head_stride + w.first_column + column;
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(
        tile + column / 64 * panel_bytes + device::panel_offset(row, column % 64));
  }
}

/// Blocks of a launch at `tile` value columns a block.
inline std::int64_t sm90_blocks(const VariantQuery& query, int tile) {
  return query.capacity.max_sequences * query.problem.v_heads * (dim / tile);
}

inline Support supports_sm90(const VariantQuery& query, std::int64_t blocks) {
  if (query.device.capability != 90) {
    return Support::no("expected a device of capability 9.0 (WGMMA and TMA), got sm_" +
                       std::to_string(query.device.capability));
  }
  if (query.problem.qk_dim != dim) {
    return Support::no("expected head dimension 128, got " + std::to_string(query.problem.qk_dim));
  }
  return supports_tiles(query, blocks);
}

/// Refuses what a tensor map cannot describe, on ports of [T, H, columns] tensors.
inline Support accepts_tiles(const StageCall& call, std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    const TensorView& view = call[name];
    for (int i = 0; i < 2; ++i) {
      if (view.extents[i] > 1 && view.strides[i] <= 0) {
        return Support::no(std::string(name) + ": expected positive strides, got " +
                           to_string(view));
      }
    }
  }
  return accepts_vectors(call, names);
}

inline Support accepts_sm90(const StageCall& call) {
  return accepts_tiles(call, {"q", "k", "v", "A", "o"});
}

}  // namespace gdnflow::stages::fused_prefill
