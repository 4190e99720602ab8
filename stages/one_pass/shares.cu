// In front of the walk by whole heads: where sequences begin, and how their chunks are shared out
// among so many blocks that stay.
//
// All chunks in a row, cut where each block has had as many as any other. A share that begins
// inside a sequence costs the chunks in front of it until the past has faded; so one that would
// begin shortly behind a sequence's start begins there. Where shares of whole sequences are done as
// soon, nothing is cut. Blocks beside this one find norms, where they are asked for.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "one_pass/norms.cuh"
#include "one_pass/shares.hpp"
#include "one_pass/span.cuh"
#include "segments/plan.hpp"

#include <climits>
#include <cstdint>

namespace gdnflow::stages::one_pass {
namespace {

// In chunks: what a block loses from one sequence and head to the next,
constexpr std::int32_t change_cost = 1;
// and in front of a share that begins inside one.
constexpr std::int32_t lead_cost = 11;
// What a link costs beside walking the share twice more.
constexpr std::int32_t link_cost = 8;
// A share that would begin so little behind a sequence's start begins there.
constexpr std::int32_t least_inside = 5;

struct Params {
  SequenceScan scan;
  ShareTable table;
  NormTable norms;
};

// Divisions are by estimates: a launch this short pays for each instruction that it has to fetch.
__device__ std::int64_t divide(std::int64_t x, std::int32_t by) {
  auto quotient = static_cast<std::int64_t>(__ll2float_rn(x) * __frcp_rn(static_cast<float>(by)));
  while (quotient * by > x) --quotient;
  while ((quotient + 1) * by <= x) ++quotient;
  return quotient;
}

// The chunks of a call in a row, in units of a chunk; each sequence and head has `change_cost`
// more, in front.
struct Row {
  const std::int32_t* units;  // [N+1]: of one head, in front of each sequence
  std::int32_t sequences, heads;

  __device__ std::int32_t length_of(std::int32_t sequence) const {
    return units[sequence + 1] - units[sequence];
  }
  __device__ std::int64_t begin_of(std::int32_t sequence) const {
    return std::int64_t{units[sequence]} * heads;
  }

  // Where the share of a block begins if all are alike.
  __device__ Place begin_of_share(std::int32_t block, std::int32_t blocks) const {
    const std::int64_t all = begin_of(sequences);
    const std::int64_t least = divide(all, blocks);
    const auto rest = static_cast<std::int32_t>(all - least * blocks);
    // No two blocks begin inside a sequence at one place.
    const std::int64_t unit = least == 0 ? block : least * block + divide(rest * block, blocks);
    if (unit >= all || block >= blocks) return {sequences, 0, 0};
    std::int32_t sequence = 0;  // the last one that begins at `unit` or in front of it
    std::int32_t behind = sequences;
    while (behind - sequence > 1) {
      const std::int32_t middle = sequence + (behind - sequence) / 2;
      (begin_of(middle) <= unit ? sequence : behind) = middle;
    }
    const std::int32_t length = length_of(sequence);
    const std::int64_t within = unit - begin_of(sequence);
    const std::int64_t head = divide(within, length);
    return {sequence, static_cast<std::int32_t>(head),
            static_cast<std::int32_t>(within - head * length - change_cost)};
  }
  __device__ std::int64_t unit_of(const Place& place) const {
    if (place.sequence == sequences) return begin_of(sequences);
    return begin_of(place.sequence) + std::int64_t{place.head} * length_of(place.sequence) +
           (place.chunk > 0 ? change_cost + place.chunk : 0);
  }
};

// Further in front, where that is better: `whole` sequences, or not to walk the chunks in front
// twice.
__device__ Place moved(Place place, bool whole) {
  if (whole || place.chunk <= least_inside) place.chunk = 0;
  return place;
}

constexpr std::int32_t threads = scan::Config::threads;
static_assert(ShareTable::most_blocks < threads);

struct Shared {
  scan::SharedStorage scan;
  // Of as many sequences as there is room for; of more they come from memory.
  static constexpr std::int32_t sequences = 1023;
  std::int32_t offsets[sequences + 1], starts[sequences + 1], units[sequences + 1];
  Place places[threads + 1];
  unsigned longest[2];  // share, of whole sequences and of others
};

static_assert(NormTable::threads == threads);

template <bool Norms>
__global__ void __launch_bounds__(threads) share_kernel(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  device::allow_successors();
  device::wait_for_predecessors();
  if (Norms && blockIdx.x > 0) {
    find_norms(p.norms, blockIdx.x - 1, gridDim.x - 1);
    return;
  }
  const ShareTable& table = p.table;
  const auto block = static_cast<std::int32_t>(threadIdx.x);  // of the walk
  const auto sequences = static_cast<std::int32_t>(p.scan.sequences);
  const bool few = sequences <= Shared::sequences;
  if (block < table.blocks) table.finished[block] = table.left[block] = 0;
  if (block < 2) shared.longest[block] = 0;
  const auto keep = [&](const scan::Sequence& sequence) {
    const std::int64_t jobs = table.skips ? sequence.before.sequences : sequence.number;
    const auto units = static_cast<std::int32_t>(sequence.before.chunks + change_cost * jobs);
    if (!few) {
      table.units[sequence.number] = units;
      return;
    }
    shared.units[sequence.number] = units;
    shared.offsets[sequence.number] = sequence.before.chunks;
    shared.starts[sequence.number] = sequence.start;
  };
  const scan::Sequence end = scan::scan_sequences(
      p.scan, shared.scan,
      [&](const scan::Sequence& sequence) {
        scan::write_offsets(p.scan, sequence);
        keep(sequence);
      },
      [](const scan::Sequence&, std::int64_t) {});
  if (block == 0) {
    scan::write_end(p.scan, end);
    keep(end);
  }
  __syncthreads();

  const Row row{few ? shared.units : table.units, sequences, table.heads};
  const std::int32_t* const offsets = few ? shared.offsets : p.scan.chunk_offsets;
  const std::int32_t* const starts = few ? shared.starts : p.scan.starts;
  const Place even = row.begin_of_share(block, table.blocks);
  shared.places[block] = even;
  __syncthreads();
  const auto reduce_longest = [&](bool whole) {
    const Place begin = moved(even, whole);
    const Place behind = moved(shared.places[min(block, table.blocks - 1) + 1], whole);
    const std::int64_t cost =
        row.unit_of(behind) - row.unit_of(begin) + (begin.chunk > 0 ? lead_cost : 0);
    const unsigned longest = __reduce_max_sync(
        ~0U, block < table.blocks ? static_cast<unsigned>(min(cost, std::int64_t{UINT_MAX})) : 0);
    if (block % 32 == 0) atomicMax(&shared.longest[whole ? 0 : 1], longest);
  };
  reduce_longest(true);
  reduce_longest(false);
  __syncthreads();
  const bool whole = !table.cuts || shared.longest[0] <= shared.longest[1];
  Share share;
  share.begin = moved(even, whole);
  shared.places[block] = share.begin;
  __syncthreads();
  if (block > table.blocks) return;
  const auto begins_inside = [&](std::int32_t other) {
    const Place& place = shared.places[other];
    return place.sequence == share.begin.sequence && place.head == share.begin.head &&
           place.chunk > 0;
  };
  share.first_block = block;
  while (begins_inside(share.first_block)) --share.first_block;
  share.last_block = block;
  while (share.last_block < table.blocks && begins_inside(share.last_block + 1)) {
    ++share.last_block;
  }
  const std::int32_t n = share.begin.sequence;
  share.most_lead = share.most_start = 0;
  share.span = {};
  share.span.first_chunk = offsets[n];
  if (n < sequences) {
    share.span = span_of(offsets, starts, p.scan.prefix_lens, p.scan.wide_index, n);
    const bool goes_on = begins_inside(block + 1);
    const std::int32_t end = goes_on ? shared.places[block + 1].chunk : share.span.chunks;
    share.most_lead = min(2 * (end - share.begin.chunk) + link_cost, segments::most_lead);
    // A head's last share is walked once, linked or not, and the block in front is no later with
    // the state than a walk from the start would be.
    share.most_start = goes_on ? share.most_lead : link_cost;
  }
  table.shares[block] = share;
}

}  // namespace

Step share_step(const SequenceScan& scan, const ShareTable& table, const NormTable& norms,
                std::int64_t norm_blocks) {
  const bool with_norms = norm_blocks > 0;
  return programmatic(
      kernel_step("one_pass shares", with_norms ? share_kernel<true> : share_kernel<false>,
                  grid_of(1 + norm_blocks), {threads}, 0, Params{scan, table, norms}));
}

}  // namespace gdnflow::stages::one_pass
