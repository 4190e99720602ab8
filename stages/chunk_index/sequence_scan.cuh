#pragma once

#include <gdnflow/problem.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "device/prefix.cuh"

#include <cstddef>
#include <cstdint>

#include <cub/block/block_scan.cuh>

// The scan over sequences by one block: 1024 sequences a pass, and a carry from pass to pass.
//   starts[n] = max over m <= n of clamp(cu_seqlens[m], 0, T); the rest are exclusive sums.
// The prefix of an empty sequence is never read: it may be one that the caller does not have.

namespace gdnflow::stages::scan {

struct Config {
  static constexpr int threads = 256;
  static constexpr int items = 4;
  static constexpr int per_pass = threads * items;
};

/// What is summed over sequences.
struct Counts {
  std::int32_t chunks = 0;
  std::int32_t checkpoints = 0;
  std::int32_t sequences = 0;  ///< with chunks

  friend __device__ Counts operator+(const Counts& a, const Counts& b) {
    return {a.chunks + b.chunks, a.checkpoints + b.checkpoints, a.sequences + b.sequences};
  }
};

struct Larger {
  __device__ std::int32_t operator()(std::int32_t a, std::int32_t b) const { return max(a, b); }
};
struct Sum {
  __device__ Counts operator()(const Counts& a, const Counts& b) const { return a + b; }
};

using MaxScan = cub::BlockScan<std::int32_t, Config::threads>;
using CountScan = cub::BlockScan<Counts, Config::threads>;

/// A sequence as the scan visits it.
struct Sequence {
  std::int64_t number;  ///< n; N for the end
  std::int32_t start;   ///< first token
  Counts before;        ///< of all sequences in front
};

struct SharedStorage {
  union {
    typename MaxScan::TempStorage max;
    typename CountScan::TempStorage counts;
    alignas(alignof(Sequence)) std::byte end[sizeof(Sequence)];  // of few sequences
  };
};

/// cu_seqlens[n] within [0, T]; dense sequences have T / N tokens each. What lies behind the last
/// entry repeats it.
__device__ __forceinline__ std::int32_t boundary(const SequenceScan& p, std::int64_t n) {
  if (p.cu_seqlens == nullptr) return static_cast<std::int32_t>(n * (p.tokens / p.sequences));
  const std::int64_t value = device::load_index(p.cu_seqlens, p.wide_index, min(n, p.given));
  return static_cast<std::int32_t>(min(max(value, std::int64_t{0}), p.tokens));
}

__device__ __forceinline__ Counts counts_of(const SequenceScan& p, std::int64_t n,
                                            std::int32_t tokens) {
  if (tokens == 0) return {};
  const std::int64_t prefix = device::safe_prefix(p.prefix_lens, p.wide_index, n);
  const auto in_first = static_cast<std::int32_t>(prefix % chunk_tokens);
  Counts counts;
  counts.sequences = tokens > p.most_unchunked ? 1 : 0;
  counts.chunks =
      counts.sequences * static_cast<std::int32_t>(
                             (in_first + std::int64_t{tokens} + chunk_tokens - 1) / chunk_tokens);
  if (p.checkpoint_interval > 0) {
    counts.checkpoints = static_cast<std::int32_t>((prefix + tokens) / p.checkpoint_interval -
                                                   prefix / p.checkpoint_interval);
  }
  return counts;
}

/// Sequences that a warp scans at once, a lane each, and the end.
inline constexpr std::int64_t few = 31;

/// The sum of `x` over the lanes in front of this one.
__device__ __forceinline__ std::int32_t sum_in_front(std::int32_t x) {
  std::int32_t through = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int32_t before = __shfl_up_sync(~0U, through, step);
    if (threadIdx.x % 32 >= step) through += before;
  }
  return through - x;
}

/// Of the first `count` sequences, at most `few`, this lane's, by a whole warp; in the lanes behind
/// them, what comes next.
__device__ __forceinline__ Sequence sequence_of_lane(const SequenceScan& p, std::int64_t count) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int64_t number = min(std::int64_t{lane}, count);
  std::int32_t start = boundary(p, number);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    start = max(start, __shfl_up_sync(~0U, start, step));
  }
  const std::int32_t end = __shfl_down_sync(~0U, start, 1);
  const Counts counts = lane < count ? counts_of(p, lane, end - start) : Counts{};
  return {number,
          start,
          {sum_in_front(counts.chunks),
           p.checkpoint_interval > 0 ? sum_in_front(counts.checkpoints) : 0,
           sum_in_front(counts.sequences)}};
}

/// The last lane whose `first`, which does not fall from lane to lane, is at most `x`; lane 0's is.
template <class T>
__device__ __forceinline__ std::int32_t lane_of(T first, T x) {
  std::int32_t found = 0;
#pragma unroll
  for (std::int32_t step = 16; step > 0; step /= 2) {
    if (__shfl_sync(~0U, first, found + step) <= x) found += step;
  }
  return found;
}

/// Calls visit(sequence) for every sequence, each thread for four neighbours a pass, and
/// pass(first, last) for all threads behind a pass over sequences [first, last); returns the end.
template <class Visit, class Pass>
__device__ Sequence scan_sequences(const SequenceScan& p, SharedStorage& shared, Visit&& visit,
                                   Pass&& pass) {
  if (p.sequences <= few) {
    auto& end = *reinterpret_cast<Sequence*>(shared.end);
    if (threadIdx.x < 32) {
      const Sequence found = sequence_of_lane(p, p.sequences);
      if (threadIdx.x < p.sequences) visit(found);
      if (threadIdx.x == p.sequences) end = found;
    }
    __syncthreads();
    const Sequence found = end;
    pass(found, 0);
    return found;
  }
  std::int32_t reached = boundary(p, 0);  // the largest boundary of the passes before
  Counts counted{};                       // and their sums
  for (std::int64_t base = 0; base < p.sequences; base += Config::per_pass) {
    const std::int64_t mine = base + threadIdx.x * Config::items;
    std::int32_t end[Config::items];  // of each sequence, as given
    std::int32_t start[Config::items];
#pragma unroll
    for (int i = 0; i < Config::items; ++i) {
      end[i] = mine + i < p.sequences ? boundary(p, mine + i + 1) : 0;
    }
    std::int32_t furthest = 0;
    MaxScan(shared.max).ExclusiveScan(end, start, 0, Larger{}, furthest);
    __syncthreads();  // the two scans share memory
    Counts counts[Config::items];
    Counts before[Config::items];
#pragma unroll
    for (int i = 0; i < Config::items; ++i) {
      start[i] = max(start[i], reached);
      const std::int32_t tokens = max(end[i] - start[i], 0);
      counts[i] = mine + i < p.sequences ? counts_of(p, mine + i, tokens) : Counts{};
    }
    Counts total{};
    CountScan(shared.counts).ExclusiveScan(counts, before, Counts{}, Sum{}, total);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Config::items; ++i) {
      if (mine + i < p.sequences) visit(Sequence{mine + i, start[i], counted + before[i]});
    }
    reached = max(reached, furthest);
    counted = counted + total;
    pass(Sequence{min(base + Config::per_pass, p.sequences), reached, counted}, base);
  }
  return {p.sequences, reached, counted};
}

/// A sequence's entries in the outputs, or those behind the last.
__device__ __forceinline__ void write_offsets(const SequenceScan& p, const Sequence& sequence) {
  if (p.starts != nullptr) p.starts[sequence.number] = sequence.start;
  if (p.chunk_offsets != nullptr) p.chunk_offsets[sequence.number] = sequence.before.chunks;
  if (p.checkpoint_offsets != nullptr) {
    p.checkpoint_offsets[sequence.number] = sequence.before.checkpoints;
  }
}

__device__ __forceinline__ void write_end(const SequenceScan& p, const Sequence& end) {
  write_offsets(p, end);
  if (p.chunk_counts == nullptr) return;
  p.chunk_counts[0] = end.before.chunks;
  p.chunk_counts[1] = end.start - boundary(p, 0);
  p.chunk_counts[2] = end.before.checkpoints;
  p.chunk_counts[3] = end.before.sequences;
}

/// The outputs where at most `few` sequences are there, by a block whose warps have each found them
/// (sequence_of_lane).
__device__ __forceinline__ void write_few(const SequenceScan& p, const Sequence& mine) {
  if (threadIdx.x < p.given) write_offsets(p, mine);
  Sequence end = mine;
  end.start = __shfl_sync(~0U, mine.start, 31);
  end.before = {__shfl_sync(~0U, mine.before.chunks, 31),
                __shfl_sync(~0U, mine.before.checkpoints, 31),
                __shfl_sync(~0U, mine.before.sequences, 31)};
  const auto sequences = static_cast<std::int32_t>(p.sequences);
  auto number = static_cast<std::int32_t>(p.given) + static_cast<std::int32_t>(threadIdx.x);
#pragma unroll 1
  for (; number < sequences; number += static_cast<std::int32_t>(blockDim.x)) {
    end.number = number;
    write_offsets(p, end);
  }
  end.number = sequences;
  if (number == sequences) write_end(p, end);  // one thread
}

}  // namespace gdnflow::stages::scan
