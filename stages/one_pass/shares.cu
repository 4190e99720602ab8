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
#include "one_pass/beside.cuh"
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
  Beside beside;
};

// Divisions are by estimates: a launch this short pays for each instruction that it has to fetch.
template <class T>
__device__ __forceinline__ T divide(T x, std::int32_t by) {
  auto quotient = static_cast<T>(__fdividef(static_cast<float>(x), static_cast<float>(by)));
  while (quotient * by > x) --quotient;
  while ((quotient + 1) * by <= x) ++quotient;
  return quotient;
}

// The chunks of a call in a row, in units of a chunk; each sequence and head has `change_cost`
// more, in front. A sequence in it:
template <class Unit>
struct Lot {
  std::int32_t sequence;
  Unit begin;
  std::int32_t length;  // of one head
};

constexpr std::int32_t threads = scan::Config::threads;
static_assert(ShareTable::most_blocks < threads);
static_assert(Beside::threads == threads);

struct Shared {
  scan::SharedStorage scan;
  // Of as many sequences as there is room for; of more they come from memory.
  static constexpr std::int32_t sequences = 1023;
  std::int32_t offsets[sequences + 1], starts[sequences + 1], units[sequences + 1];
  // Where shares begin: of whole sequences, and of others.
  alignas(std::int64_t) std::byte begins[2 * threads * sizeof(std::int64_t)];
  unsigned longest[2];
};

// The table, by a thread a block of the walk, from a row of `all` units. find(unit) is the lot that
// has it, span(n) how sequence n lies; both by every thread, behind the end for nothing.
template <class Unit, class Find, class SpanOf>
__device__ __forceinline__ void share_out(const ShareTable& table, Shared& shared,
                                          std::int32_t sequences, Unit all, std::int32_t chunks,
                                          Find&& find, SpanOf&& span) {
  const auto block = static_cast<std::int32_t>(threadIdx.x);
  auto& begins = reinterpret_cast<Unit(&)[2][threads]>(*shared.begins);
  if (block < 2) shared.longest[block] = 0;
  const Unit least = divide(all, table.blocks);
  const Unit rest = all - least * table.blocks;
  // No two blocks begin inside a sequence at one place.
  const Unit unit = least == 0 ? block : least * block + divide(rest * block, table.blocks);
  const Lot<Unit> lot = find(unit);
  Share share;
  share.begin = {sequences, 0, 0};
  Unit head_begin = all;
  Unit head_end = all;
  if (block < table.blocks && unit < all) {
    const auto within = static_cast<std::int32_t>(unit - lot.begin);
    const std::int32_t head = divide(within, lot.length);
    head_begin = lot.begin + static_cast<Unit>(head) * lot.length;
    head_end = head_begin + lot.length;
    share.begin = {lot.sequence, head, within - head * lot.length - change_cost};
  }
  share.span = span(share.begin.sequence);
  // Further in front, where that is better: not to walk the chunks in front twice.
  bool inside = share.begin.chunk > least_inside;
  begins[0][block] = head_begin;
  begins[1][block] = inside ? unit : head_begin;
  __syncthreads();
  // or whole sequences, where those are done as soon.
#pragma unroll
  for (int cut = 0; cut < 2; ++cut) {
    Unit cost = 0;
    if (block < table.blocks) {
      cost = begins[cut][block + 1] - begins[cut][block] + (cut == 1 && inside ? lead_cost : 0);
    }
    const unsigned longest = __reduce_max_sync(
        ~0U, static_cast<unsigned>(min(static_cast<std::int64_t>(cost), std::int64_t{UINT_MAX})));
    if (block % 32 == 0) atomicMax(&shared.longest[cut], longest);
  }
  __syncthreads();
  if (block > table.blocks) return;
  const bool whole = !table.cuts || shared.longest[0] <= shared.longest[1];
  const Unit* const chosen = begins[whole ? 0 : 1];
  inside = inside && !whole;
  if (!inside) share.begin.chunk = 0;
  const Unit next = block < table.blocks ? chosen[block + 1] : all;
  const bool goes_on = head_begin < next && next < head_end;
  share.first_block = share.last_block = block;
  if (inside || goes_on) {
    std::int32_t first = 0;
#pragma unroll 1
    for (std::int32_t step = (threads + 1) / 2; step > 0; step /= 2) {
      if (first + step <= block && chosen[first + step] <= head_begin) first += step;
      const std::int32_t last = share.last_block + step;
      if (last < table.blocks && chosen[last] < head_end) share.last_block = last;
    }
    if (inside) share.first_block = first;
  }
  share.most_lead = share.most_start = 0;
  if (share.begin.sequence == sequences) {
    share.span = {};
    share.span.first_chunk = chunks;
  } else {
    const std::int32_t end =
        goes_on ? static_cast<std::int32_t>(next - head_begin) - change_cost : share.span.chunks;
    share.most_lead = min(2 * (end - share.begin.chunk) + link_cost, segments::most_lead);
    // A head's last share is walked once, linked or not, and the block in front is no later with
    // the state than a walk from the start would be.
    share.most_start = goes_on ? share.most_lead : link_cost;
  }
  table.shares[block] = share;
}

// Of few sequences, which every warp finds for itself: a launch of nothing else is mostly barriers
// and instructions that come once. False, and nothing done, where numbers would not fit.
__device__ __forceinline__ bool share_few(const Params& p, Shared& shared) {
  const SequenceScan& s = p.scan;
  const auto count = static_cast<std::int32_t>(s.given);
  const scan::Sequence mine = scan::sequence_of_lane(s, count);
  const std::int32_t jobs =
      p.table.skips ? mine.before.sequences : static_cast<std::int32_t>(mine.number);
  const std::int32_t units = mine.before.chunks + change_cost * jobs;
  const std::int32_t in_all = __shfl_sync(~0U, units, 31);
  if (in_all > INT_MAX / (p.table.heads * threads)) return false;
  scan::write_few(s, mine);
  const auto behind = [](std::int32_t x, std::int32_t n) { return __shfl_sync(~0U, x, n + 1); };
  const auto at = [](std::int32_t x, std::int32_t n) { return __shfl_sync(~0U, x, n); };
  share_out(
      p.table, shared, count, in_all * p.table.heads, at(mine.before.chunks, 31),
      [&](std::int32_t unit) {
        const std::int32_t n = scan::lane_of(units * p.table.heads, unit);
        const std::int32_t begin = at(units, n);
        return Lot<std::int32_t>{n, begin * p.table.heads, behind(units, n) - begin};
      },
      [&](std::int32_t n) {
        const std::int32_t first = at(mine.before.chunks, n);
        const std::int32_t chunks = behind(mine.before.chunks, n) - first;
        return span_of(first, n < count ? chunks : 0, at(mine.start, n), behind(mine.start, n),
                       s.prefix_lens, s.wide_index, n);
      });
  return true;
}

__device__ __forceinline__ void share_many(const Params& p, Shared& shared) {
  const ShareTable& table = p.table;
  const auto sequences = static_cast<std::int32_t>(p.scan.sequences);
  const bool fit = sequences <= Shared::sequences;
  const auto keep = [&](const scan::Sequence& sequence) {
    const std::int64_t jobs = table.skips ? sequence.before.sequences : sequence.number;
    const auto units = static_cast<std::int32_t>(sequence.before.chunks + change_cost * jobs);
    if (!fit) {
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
  if (threadIdx.x == 0) {
    scan::write_end(p.scan, end);
    keep(end);
  }
  __syncthreads();
  const std::int32_t* const units = fit ? shared.units : table.units;
  const std::int32_t* const offsets = fit ? shared.offsets : p.scan.chunk_offsets;
  const std::int32_t* const starts = fit ? shared.starts : p.scan.starts;
  const auto begin_of = [&](std::int32_t n) { return std::int64_t{units[n]} * table.heads; };
  share_out(
      table, shared, sequences, begin_of(sequences), end.before.chunks,
      [&](std::int64_t unit) {
        std::int32_t sequence = 0;  // the last one that begins at `unit` or in front of it
        std::int32_t behind = sequences;
        while (behind - sequence > 1) {
          const std::int32_t middle = sequence + (behind - sequence) / 2;
          (begin_of(middle) <= unit ? sequence : behind) = middle;
        }
        return Lot<std::int64_t>{sequence, begin_of(sequence),
                                 units[sequence + 1] - units[sequence]};
      },
      [&](std::int32_t n) {
        return n < sequences ? span_of(offsets, starts, p.scan.prefix_lens, p.scan.wide_index, n)
                             : Span{};
      });
}

template <bool HasBeside>
__global__ void __launch_bounds__(threads) share_kernel(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  device::allow_successors();
  device::wait_for_predecessors();
  if (HasBeside && blockIdx.x > 0) {
    find_beside(p.beside);
    return;
  }
  const auto block = static_cast<std::int32_t>(threadIdx.x);
  if (block < p.table.blocks) p.table.finished[block] = p.table.left[block] = 0;
  if (p.scan.given <= scan::few && share_few(p, shared)) return;
  share_many(p, shared);
}

}  // namespace

Step share_step(const SequenceScan& scan, const ShareTable& table, const Beside& beside) {
  return programmatic(
      kernel_step("one_pass shares", beside.blocks > 0 ? share_kernel<true> : share_kernel<false>,
                  grid_of(1 + beside.blocks), {threads}, 0, Params{scan, table, beside}));
}

}  // namespace gdnflow::stages::one_pass
