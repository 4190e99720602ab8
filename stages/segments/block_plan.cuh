#pragma once

#include "chunk_index/sequence_scan.cuh"
#include "segments/plan.hpp"

#include <cstdint>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

// How sequences are cut, by a block of `Threads` threads: one that looks for its own slot, which is
// cheaper than a launch more, since lengths are a few loads from L2; or one that writes them all,
// where there is such a launch anyway.

namespace gdnflow::stages::segments {

/// The lengths of a call.
struct Sequences {
  const std::int32_t* offsets;  ///< [N+1]: first chunk of each sequence
  std::int32_t count;           ///< N
  std::int32_t running;         ///< of at least one chunk
  std::int32_t useful;          ///< segments that fill the machine
};

struct Joined {
  __device__ Cut::Pieces operator()(const Cut::Pieces& a, const Cut::Pieces& b) const {
    return {a.count + b.count, min(a.shortest, b.shortest), max(a.longest, b.longest)};
  }
};

template <int Threads>
struct BlockPlan {
  using Reduce = cub::BlockReduce<Cut::Pieces, Threads>;
  using Scan = cub::BlockScan<std::int32_t, Threads>;

  struct Storage {
    union {
      typename Reduce::TempStorage reduce;
      typename Scan::TempStorage scan;
    };
    Cut cut;
    Slot slot;            ///< what find_slot has found
    std::int32_t first;   ///< its sequence's first chunk
    std::int32_t chunks;  ///< its sequence's
  };

  __device__ static Cut cut(const Sequences& sequences, Storage& shared) {
    const std::int32_t* const offsets = sequences.offsets;
    const std::int32_t total = offsets[sequences.count];
    if (sequences.useful <= 1 || total == 0) return Cut::none();
    const Cut fine = Cut::into(total, sequences.useful);
    Cut::Pieces pieces{0, 1 << 30, 0};
    for (auto n = static_cast<std::int32_t>(threadIdx.x); n < sequences.count; n += Threads) {
      const std::int32_t chunks = offsets[n + 1] - offsets[n];
      if (chunks == 0) continue;
      const std::int32_t count = fine.segments(chunks);
      pieces.count += count;
      pieces.shortest = min(pieces.shortest, chunks / count);
      pieces.longest = max(pieces.longest, chunks);
    }
    pieces = Reduce(shared.reduce).Reduce(pieces, Joined{});
    if (threadIdx.x == 0) {
      shared.cut = Cut::choose(total, sequences.running, sequences.useful, pieces);
    }
    __syncthreads();
    return shared.cut;
  }

  /// Leaves slot `number` in shared memory; its sequence is -1 where there are fewer.
  __device__ static void find_slot(const Sequences& sequences, const Cut& cut, std::int32_t number,
                                   Storage& shared) {
    const std::int32_t* const offsets = sequences.offsets;
    if (threadIdx.x == 0) shared.slot = {-1, 0, 0, 0};
    std::int32_t base = 0;
    for (std::int32_t first = 0; first < sequences.count && base <= number; first += Threads) {
      const std::int32_t n = first + static_cast<std::int32_t>(threadIdx.x);
      const bool there = n < sequences.count;
      const std::int32_t begin = there ? offsets[n] : 0;
      const std::int32_t chunks = there ? offsets[n + 1] - begin : 0;
      const std::int32_t count = there ? cut.segments(chunks) : 0;
      std::int32_t before = 0;
      std::int32_t sum = 0;
      __syncthreads();
      Scan(shared.scan).ExclusiveSum(count, before, sum);
      const std::int32_t i = number - base - before;
      if (i >= 0 && i < count) {
        shared.slot = {n, begin + Cut::border(chunks, count, i),
                       begin + Cut::border(chunks, count, i + 1), i};
        shared.first = begin;
        shared.chunks = chunks;
      }
      base += sum;
    }
    __syncthreads();
  }

  /// Writes all of `capacity` slots; those that are not used have no sequence.
  __device__ static void write_slots(const Sequences& sequences, const Cuts& cut, Slot* slots,
                                     std::int32_t capacity, Storage& shared) {
    const std::int32_t* const offsets = sequences.offsets;
    std::int32_t base = 0;
    for (std::int32_t first = 0; first < sequences.count; first += Threads) {
      const std::int32_t n = first + static_cast<std::int32_t>(threadIdx.x);
      const bool there = n < sequences.count;
      const std::int32_t begin = there ? offsets[n] : 0;
      const std::int32_t chunks = there ? offsets[n + 1] - begin : 0;
      const std::int32_t count = there ? cut.segments(chunks) : 0;
      std::int32_t before = 0;
      std::int32_t sum = 0;
      __syncthreads();
      Scan(shared.scan).ExclusiveSum(count, before, sum);
      for (std::int32_t i = 0; i < count; ++i) {
        slots[base + before + i] = {n, begin + Cut::border(chunks, count, i),
                                    begin + Cut::border(chunks, count, i + 1), i};
      }
      base += sum;
    }
    for (auto i = base + static_cast<std::int32_t>(threadIdx.x); i < capacity; i += Threads) {
      slots[i] = {-1, 0, 0, 0};
    }
  }
};

/// The same for few sequences, a lane each, by a warp that knows their lengths; whole warps may do
/// it side by side.
struct WarpPlan {
  std::int32_t first;   ///< this lane's sequence's first chunk; behind the last, their end
  std::int32_t chunks;  ///< this lane's sequence's
  bool there;           ///< whether it has one

  /// `total` chunks in all, in `running` sequences.
  __device__ Cut cut(std::int32_t total, std::int32_t running, std::int32_t useful) const {
    if (useful <= 1 || total == 0) return Cut::none();
    const Cut fine = Cut::into(total, useful);
    const std::int32_t count = chunks > 0 ? fine.segments(chunks) : 0;
    return Cut::choose(total, running, useful,
                       {__reduce_add_sync(~0U, count),
                        __reduce_min_sync(~0U, count > 0 ? chunks / count : 1 << 30),
                        __reduce_max_sync(~0U, chunks)});
  }

  /// Writes all of `capacity` slots, by a whole block.
  __device__ void write_slots(const Cuts& cut, Slot* slots, std::int32_t capacity) const {
    const std::int32_t mine = there ? cut.segments(chunks) : 0;
    const std::int32_t in_front = scan::sum_in_front(mine);
    const std::int32_t used = __shfl_sync(~0U, in_front, 31);
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    for (auto base = static_cast<std::int32_t>(threadIdx.x) - lane; base < capacity;
         base += static_cast<std::int32_t>(blockDim.x)) {
      const std::int32_t slot = base + lane;
      const std::int32_t n = scan::lane_of(in_front, slot);
      const std::int32_t begin = __shfl_sync(~0U, first, n);
      const std::int32_t length = __shfl_sync(~0U, chunks, n);
      const std::int32_t count = __shfl_sync(~0U, mine, n);
      const std::int32_t i = slot - __shfl_sync(~0U, in_front, n);
      if (slot < min(used, capacity)) {
        slots[slot] = {n, begin + Cut::border(length, count, i),
                       begin + Cut::border(length, count, i + 1), i};
      } else if (slot < capacity) {
        slots[slot] = {-1, 0, 0, 0};
      }
    }
  }
};

struct Start {
  std::int32_t chunk;  ///< -1: none is near enough
  float log2_bound;
};

/// The nearest place in front of chunk `begin` of a sequence, whose first chunk is `first`, where
/// the bound is small enough; by a block of `Warps` warps. log2_bound(chunk) is that of a chunk, by
/// a warp. A NaN never is small enough. `sums` is shared.
template <int Warps, class Log2Bound>
__device__ Start find_start(std::int32_t first, std::int32_t begin, float (&sums)[Warps],
                            Log2Bound&& log2_bound) {
  constexpr auto grain = static_cast<std::int32_t>(segment_grain);
  const float nothing = -__int_as_float(0x7f800000);
  if (begin == first) return {begin, nothing};
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
  const std::int32_t least = max(first, begin - most_lead);
  float sum = 0.0F;
  for (std::int32_t at = begin - 1; at >= least; at -= Warps) {
    if (at - warp >= least) {
      const float x = log2_bound(at - warp);
      if (threadIdx.x % 32 == 0) sums[warp] = x;
    }
    __syncthreads();
    Start found{-1, nothing};
    for (std::int32_t i = 0; i < Warps && at - i >= least && found.chunk < 0; ++i) {
      sum += sums[i];
      const std::int32_t chunk = at - i;
      if ((chunk - first) % grain == 0 && sum <= log2_resolution + log2_margin) {
        found = {chunk, chunk == first ? nothing : sum};
      }
    }
    __syncthreads();
    if (found.chunk >= 0) return found;
  }
  return {-1, nothing};
}

/// The sum of what a warp's lanes have.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0U, x, step);
  return x;
}

}  // namespace gdnflow::stages::segments
