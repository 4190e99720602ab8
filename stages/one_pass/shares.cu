// In front of the walk by whole heads: where sequences begin, and how their chunks are shared out
// among so many blocks that stay.
//
// All chunks in a row, cut where each block has had as many as any other. A share that begins
// inside a sequence costs the chunks in front of it until the past has faded; so one that would
// begin shortly behind a sequence's start begins there. Where shares of whole sequences are done as
// soon, nothing is cut.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "one_pass/shares.hpp"

#include <cub/block/block_reduce.cuh>

namespace gdnflow::stages::one_pass {
namespace {

// In chunks: what a block loses from one sequence and head to the next,
constexpr std::int64_t change_cost = 1;
// and in front of a share that begins inside one.
constexpr std::int32_t lead_cost = 6;

struct Params {
  SequenceScan scan;
  ShareTable table;
};

// The chunks of a call in a row, in units of a chunk; each sequence and head has `change_cost`
// more, in front.
struct Row {
  const std::int32_t* offsets;  // [N+1]: first chunk of each sequence
  std::int32_t sequences, heads;

  __device__ std::int64_t begin_of(std::int32_t sequence) const {
    return (offsets[sequence] + change_cost * sequence) * heads;
  }
  __device__ std::int64_t length() const { return begin_of(sequences); }

  // Where the share of a block begins if all are alike.
  __device__ Place begin_of_share(std::int32_t block, std::int32_t blocks) const {
    const std::int64_t all = length();
    // No two blocks begin inside a sequence at one place.
    const std::int64_t unit =
        all < blocks ? block : all / blocks * block + all % blocks * block / blocks;
    if (unit >= all || block == blocks) return {sequences, 0, 0};
    std::int32_t sequence = 0;  // the last one that begins at `unit` or in front of it
    std::int32_t behind = sequences;
    while (behind - sequence > 1) {
      const std::int32_t middle = sequence + (behind - sequence) / 2;
      (begin_of(middle) <= unit ? sequence : behind) = middle;
    }
    const auto length =
        static_cast<std::int32_t>(offsets[sequence + 1] - offsets[sequence] + change_cost);
    const std::int64_t within = unit - begin_of(sequence);
    const auto head = static_cast<std::int32_t>(within / length);
    return {sequence, head,
            static_cast<std::int32_t>(within - std::int64_t{head} * length - change_cost)};
  }
  __device__ std::int64_t unit_of(const Place& place) const {
    if (place.sequence == sequences) return length();
    const std::int64_t length = offsets[place.sequence + 1] - offsets[place.sequence] + change_cost;
    return begin_of(place.sequence) + place.head * length +
           (place.chunk > 0 ? change_cost + place.chunk : 0);
  }
};

// Further in front, where that is better: `whole` sequences, or not to walk the chunks in front
// twice.
__device__ Place moved(Place place, bool whole) {
  if (whole || place.chunk <= lead_cost) place.chunk = 0;
  return place;
}

struct Costs {
  std::int64_t whole, cut;  // of the longest share
};
struct Larger {
  __device__ Costs operator()(const Costs& a, const Costs& b) const {
    return {max(a.whole, b.whole), max(a.cut, b.cut)};
  }
};
using Reduce = cub::BlockReduce<Costs, scan::Config::threads>;

__global__ void __launch_bounds__(scan::Config::threads)
    share_kernel(const __grid_constant__ Params p) {
  __shared__ union {
    scan::SharedStorage scan;
    typename Reduce::TempStorage reduce;
  } shared;
  __shared__ bool whole;
  device::allow_successors();
  const ShareTable& table = p.table;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  constexpr std::int32_t threads = scan::Config::threads;
  for (std::int32_t block = thread; block < table.blocks; block += threads) {
    table.finished[block] = 0;
  }
  const scan::Sequence end = scan::scan_sequences(
      p.scan, shared.scan,
      [&](const scan::Sequence& sequence) { scan::write_offsets(p.scan, sequence); },
      [](const scan::Sequence&, std::int64_t) {});
  if (thread == 0) scan::write_end(p.scan, end);
  __syncthreads();

  const Row row{p.scan.chunk_offsets, static_cast<std::int32_t>(p.scan.sequences), table.heads};
  for (std::int32_t block = thread; block <= table.blocks; block += threads) {
    table.places[block] = row.begin_of_share(block, table.blocks);
  }
  __syncthreads();
  Costs costs{};
  for (std::int32_t block = thread; block < table.blocks; block += threads) {
    const auto cost = [&](bool of_whole) {
      const Place begin = moved(table.places[block], of_whole);
      const Place end = moved(table.places[block + 1], of_whole);
      return row.unit_of(end) - row.unit_of(begin) + (begin.chunk > 0 ? lead_cost : 0);
    };
    costs = Larger{}(costs, {cost(true), cost(false)});
  }
  costs = Reduce(shared.reduce).Reduce(costs, Larger{});
  if (thread == 0) whole = !table.cuts || costs.whole <= costs.cut;
  __syncthreads();
  for (std::int32_t block = thread; block <= table.blocks; block += threads) {
    table.places[block] = moved(table.places[block], whole);
  }
}

}  // namespace

Step share_step(const SequenceScan& scan, const ShareTable& table) {
  return kernel_step("one_pass shares", share_kernel, grid_of(1), {scan::Config::threads}, 0,
                     Params{scan, table});
}

}  // namespace gdnflow::stages::one_pass
