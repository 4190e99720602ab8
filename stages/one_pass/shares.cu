// In front of the walk by whole heads: where sequences begin, and how their chunks are shared out
// among so many blocks that stay.
//
// All chunks in a row, cut where each block has had as many as any other. A share that begins
// inside a sequence costs the chunks in front of it until the past has faded; so one that would
// begin shortly behind a sequence's start begins there. Where all heads have as many chunks and
// there are blocks for each, each head is cut into as many shares, the first of them longer by what
// the others walk in front. Where shares of whole sequences are done as soon, nothing is cut. Heads
// whose past does not fade have shares inside walked three times (schedule.cuh); where sequences
// are few and long a sample of the gates tells which those are, and their chunks count as much.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "one_pass/ready_gates.cuh"
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
// Of that what it is busy for: so many chunks longer is a share that begins with its head where
// heads are alike, if the others have so many at least, and so many where they are to be no more
// than a chunk shorter than equal ones.
constexpr std::int32_t lead_time = 8;
constexpr std::int32_t least_share = 4;
constexpr std::int32_t long_share = 10;
// What a link costs beside walking the share twice more.
constexpr std::int32_t link_cost = 8;
// A share that would begin so little behind a sequence's start begins there.
constexpr std::int32_t least_inside = 5;
// What a chunk counts where shares are linked, which is looked for where a sequence has so many.
constexpr std::int32_t linked_weight = 3;
constexpr std::int32_t least_weighed = 48;
// Links of a head follow one another and take about a chunk's time each: n shares of L chunks are
// done soonest where 3 L / n is n, so one has this times sqrt(L) units at least.
constexpr float least_linked = 1.8F;

struct Params {
  SequenceScan scan;
  ShareTable table;
  device::Scalars<const float> g;  // [T, Hv]; not where gates are made ready here
  GateMaking making;
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
// more, in front. Some heads of a sequence that are alike, in it:
template <class Unit>
struct Lot {
  std::int32_t sequence;
  std::int32_t head;  // the first
  Unit begin;
  std::int32_t length;  // of one head
  std::int32_t weight;  // units of a chunk
};

constexpr std::int32_t threads = scan::Config::threads;
static_assert(ShareTable::most_blocks < threads);
static_assert(GateMaking::threads == threads);

struct Shared {
  scan::SharedStorage scan;
  // Of as many sequences as there is room for; of more they come from memory.
  static constexpr std::int32_t sequences = 1023;
  std::int32_t offsets[sequences + 1], starts[sequences + 1], units[sequences + 1];
  // Where shares begin: of whole sequences, and of others.
  alignas(std::int64_t) std::byte begins[2 * threads * sizeof(std::int64_t)];
  unsigned longest[2];
  std::int32_t totals[threads / 32];  // of warps
  std::int32_t least;                 // units of a share where some are linked
};

// Where the share of a thread's block begins in a row of `all` units, if all are alike.
template <class Unit>
struct Begin {
  Unit all;
  Place place{};
  Unit head_begin, head_end;
  Unit unit;  // of the place, further in front where that is better
  std::int32_t weight = 1;
  bool inside = false;  // of a head
};

// By every thread, behind the end for nothing: find(unit) is the lot that has it.
template <class Unit, class Find>
__device__ __forceinline__ Begin<Unit> find_begin(std::int32_t blocks, std::int32_t sequences,
                                                  Unit all, Find&& find) {
  const auto block = static_cast<std::int32_t>(threadIdx.x);
  const Unit least = divide(all, blocks);
  const Unit rest = all - least * blocks;
  // No two blocks begin inside a sequence at one place.
  const Unit unit = least == 0 ? block : least * block + divide(rest * block, blocks);
  const Lot<Unit> lot = find(unit);
  Begin<Unit> begin{all, {sequences, 0, 0}, all, all, all};
  if (block < blocks && unit < all) {
    const auto within = static_cast<std::int32_t>(unit - lot.begin);
    const std::int32_t head = divide(within, lot.length);
    begin.head_begin = lot.begin + static_cast<Unit>(head) * lot.length;
    begin.head_end = begin.head_begin + lot.length;
    begin.weight = lot.weight;
    std::int32_t chunk = within - head * lot.length - change_cost;
    if (lot.weight != 1) chunk = divide(max(chunk, 0), lot.weight);
    // Not to walk the chunks in front twice.
    begin.inside = chunk > least_inside;
    begin.place = {lot.sequence, lot.head + head, begin.inside ? chunk : 0};
    begin.unit = begin.inside ? unit : begin.head_begin;
  }
  return begin;
}

// The same where all heads have `length` chunks, each cut into as many shares: the first of a head
// has no lead, and so many chunks more.
__device__ __forceinline__ Begin<std::int32_t> begin_by_heads(std::int32_t blocks_of_head,
                                                              std::int32_t sequences,
                                                              std::int32_t heads,
                                                              std::int32_t length) {
  const auto block = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t units = length + change_cost;
  const std::int32_t all = sequences * heads * units;
  const std::int32_t lot = divide(block, blocks_of_head);
  const std::int32_t n = divide(lot, heads);
  Begin<std::int32_t> begin{all, {sequences, 0, 0}, all, all, all};
  if (n < sequences) {
    const std::int32_t number = block - lot * blocks_of_head;
    const std::int32_t chunk = lead_time + divide(number * (length - lead_time), blocks_of_head);
    begin.inside = number > 0;
    begin.head_begin = lot * units;
    begin.head_end = begin.head_begin + units;
    begin.place = {n, lot - n * heads, begin.inside ? chunk : 0};
    begin.unit = begin.head_begin + (begin.inside ? change_cost + chunk : 0);
  }
  return begin;
}

// The table, by a thread a block of the walk: of whole sequences, or of others where that is done
// sooner. span(n) is how sequence n lies, by every thread.
template <class Unit, class SpanOf>
__device__ __forceinline__ void share_out(const ShareTable& table, Shared& shared,
                                          std::int32_t sequences, std::int32_t chunks,
                                          const Begin<Unit>& uncut, const Begin<Unit>& cut,
                                          SpanOf&& span) {
  const auto block = static_cast<std::int32_t>(threadIdx.x);
  auto& begins = reinterpret_cast<Unit(&)[2][threads]>(*shared.begins);
  if (block < 2) shared.longest[block] = 0;
  begins[0][block] = uncut.head_begin;
  begins[1][block] = cut.unit;
  const Span uncut_span = span(uncut.place.sequence);
  const Span cut_span = span(cut.place.sequence);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Unit cost = 0;
    if (block < table.blocks) {
      cost = begins[i][block + 1] - begins[i][block] + (i == 1 && cut.inside ? lead_cost : 0);
    }
    const unsigned longest = __reduce_max_sync(
        ~0U, static_cast<unsigned>(min(static_cast<std::int64_t>(cost), std::int64_t{UINT_MAX})));
    if (block % 32 == 0) atomicMax(&shared.longest[i], longest);
  }
  __syncthreads();
  if (block > table.blocks) return;
  const bool whole = !table.cuts || shared.longest[0] <= shared.longest[1];
  const Begin<Unit> own = whole ? uncut : cut;
  const Unit* const chosen = begins[whole ? 0 : 1];
  const bool inside = !whole && own.inside;
  const Unit next = block < table.blocks ? chosen[block + 1] : own.all;
  const bool goes_on = own.head_begin < next && next < own.head_end;
  Share share;
  share.begin = own.place;
  if (!inside) share.begin.chunk = 0;
  share.first_block = share.last_block = block;
  if (inside || goes_on) {
    std::int32_t first = 0;
#pragma unroll 1
    for (std::int32_t step = (threads + 1) / 2; step > 0; step /= 2) {
      if (first + step <= block && chosen[first + step] <= own.head_begin) first += step;
      const std::int32_t last = share.last_block + step;
      if (last < table.blocks && chosen[last] < own.head_end) share.last_block = last;
    }
    if (inside) share.first_block = first;
  }
  share.most_lead = share.most_start = 0;
  if (share.begin.sequence == sequences) {
    share.span = {};
    share.span.first_chunk = chunks;
  } else {
    share.span = whole ? uncut_span : cut_span;
    std::int32_t end = share.span.chunks;
    if (goes_on) {
      end = divide(static_cast<std::int32_t>(next - own.head_begin) - change_cost, own.weight);
    }
    share.most_lead = min(2 * (end - share.begin.chunk) + link_cost, segments::most_lead);
    // A head's last share is walked once, linked or not, and what blocks in front leave is there no
    // later than a walk from the start would be done.
    share.most_start = goes_on ? share.most_lead : link_cost;
  }
  table.shares[block] = share;
}

// Sequences by lanes.
struct FewSequences {
  std::int32_t count;
  std::int32_t units;   // in front of this lane's sequence, of one head,
  std::int32_t chunks;  // and of those
  std::int32_t start;   // its first token

  __device__ static std::int32_t at(std::int32_t x, std::int32_t n) {
    return __shfl_sync(~0U, x, n);
  }
  __device__ static std::int32_t of(std::int32_t x, std::int32_t n) {
    return at(x, n + 1) - at(x, n);
  }
};

// Units in front of single heads, in `shared.units`, chunks weighed; by the block, a head a thread.
// False where none is linked. A sample of the gates tells: four or eight tokens a head.
template <bool MakesGates>
__device__ __forceinline__ bool weigh_heads(const Params& p, Shared& shared,
                                            const FewSequences& few) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t heads = p.table.heads;
  const std::int32_t lots = few.count * heads;
  const std::int32_t samples = 8 * lots <= threads ? 8 : 4;
  // How far back a share of usual length would look.
  const std::int32_t lead =
      min(2 * (FewSequences::at(few.chunks, 31) * heads / p.table.blocks) + link_cost,
          segments::most_lead);
  const float fades = fading_sum(samples, lead);
  bool any = false;
#pragma unroll 1
  for (std::int32_t i = thread; i - thread < lots * samples; i += threads) {
    const std::int32_t lot = min(i / samples, lots - 1);
    const std::int32_t n = lot / heads;
    const std::int32_t head = lot - n * heads;
    const std::int32_t start = FewSequences::at(few.start, n);
    const auto tokens = static_cast<std::uint32_t>(FewSequences::of(few.start, n));
    const std::int32_t chunks = FewSequences::of(few.chunks, n);
    const std::int32_t units = FewSequences::of(few.units, n);
    float g = 0.0F;
    if (chunks >= least_weighed) {
      g = sampled_log_decay<MakesGates>(p.g, p.making, start, tokens, i % samples, samples, head);
    }
    for (int step = 1; step < samples; step *= 2) g += __shfl_xor_sync(~0U, g, step);
    // A NaN never fades.
    const bool linked = chunks >= least_weighed && !(g <= fades);
    any = any || linked;
    if (i % samples == 0 && i < lots * samples) {
      shared.units[lot] = linked ? units + (linked_weight - 1) * chunks : units;
      if (linked) {
        atomicMax(&shared.least,
                  static_cast<std::int32_t>(least_linked * sqrtf(static_cast<float>(chunks))));
      }
    }
  }
  if (__syncthreads_or(static_cast<int>(any)) == 0) return false;
  const std::int32_t units = thread < lots ? shared.units[thread] : 0;
  std::int32_t in_front = scan::sum_in_front(units);
  if (thread % 32 == 31) shared.totals[thread / 32] = in_front + units;
  __syncthreads();
  for (std::int32_t warp = 0; warp < thread / 32; ++warp) in_front += shared.totals[warp];
  shared.units[thread] = in_front;
  if (thread == threads - 1) shared.units[threads] = in_front + units;
  __syncthreads();
  return true;
}

// Of few sequences, which every warp finds for itself: a launch of nothing else is mostly barriers
// and instructions that come once. False, and nothing done, where numbers would not fit.
template <bool MakesGates>
__device__ __forceinline__ bool share_few(const Params& p, Shared& shared) {
  const SequenceScan& s = p.scan;
  const ShareTable& table = p.table;
  const auto count = static_cast<std::int32_t>(s.given);
  const scan::Sequence mine = scan::sequence_of_lane(s, count);
  const std::int32_t jobs =
      table.skips ? mine.before.sequences : static_cast<std::int32_t>(mine.number);
  const FewSequences few{count, mine.before.chunks + change_cost * jobs, mine.before.chunks,
                         mine.start};
  const std::int32_t all = FewSequences::at(few.units, 31);
  if (all > INT_MAX / (linked_weight * table.heads * threads)) return false;
  scan::write_few(s, mine);
  const Begin<std::int32_t> uncut =
      find_begin(table.blocks, count, all * table.heads, [&](std::int32_t unit) {
        const std::int32_t n = scan::lane_of(few.units * table.heads, unit);
        return Lot<std::int32_t>{n, 0, FewSequences::at(few.units, n) * table.heads,
                                 FewSequences::of(few.units, n), 1};
      });
  Begin<std::int32_t> cut = uncut;
  const std::int32_t own = __shfl_down_sync(~0U, few.chunks, 1) - few.chunks;
  const std::int32_t lots = count * table.heads;
  // Each block has at least a chunk of the heaviest.
  if (table.cuts && __any_sync(~0U, own >= least_weighed) && lots <= threads &&
      all * table.heads >= linked_weight * table.blocks &&
      weigh_heads<MakesGates>(p, shared, few)) {
    const std::int32_t weighed = shared.units[threads];
    const std::int32_t blocks = max(min(table.blocks, divide(weighed, shared.least)), 1);
    cut = find_begin(blocks, count, weighed, [&](std::int32_t unit) {
      std::int32_t lot = 0;  // the last one that begins at `unit` or in front of it
#pragma unroll 1
      for (std::int32_t step = threads / 2; step > 0; step /= 2) {
        if (lot + step < lots && shared.units[lot + step] <= unit) lot += step;
      }
      const std::int32_t n = lot / table.heads;
      const std::int32_t length = shared.units[lot + 1] - shared.units[lot];
      return Lot<std::int32_t>{n, lot - n * table.heads, shared.units[lot], length,
                               length > FewSequences::of(few.units, n) ? linked_weight : 1};
    });
  } else {
    const std::int32_t length = FewSequences::of(few.chunks, 0);
    const bool alike =
        __all_sync(~0U, own == length || static_cast<std::int32_t>(threadIdx.x % 32) >= count);
    const std::int32_t blocks_of_head = divide(table.blocks, max(lots, 1));
    const std::int32_t shared_out = length - lead_time;
    const std::int32_t spared = shared_out >= long_share * blocks_of_head ? 0 : blocks_of_head;
    if (alike && blocks_of_head > 1 && shared_out >= least_share * blocks_of_head &&
        (shared_out + spared) * table.blocks < all * table.heads * blocks_of_head) {
      cut = begin_by_heads(blocks_of_head, count, table.heads, length);
    }
  }
  share_out(table, shared, count, FewSequences::at(few.chunks, 31), uncut, cut,
            [&](std::int32_t n) {
              const std::int32_t chunks = FewSequences::of(few.chunks, n);
              return span_of(FewSequences::at(few.chunks, n), n < count ? chunks : 0,
                             FewSequences::at(few.start, n), FewSequences::at(few.start, n + 1),
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
  const Begin<std::int64_t> begin =
      find_begin(table.blocks, sequences, begin_of(sequences), [&](std::int64_t unit) {
        std::int32_t sequence = 0;  // the last one that begins at `unit` or in front of it
        std::int32_t behind = sequences;
        while (behind - sequence > 1) {
          const std::int32_t middle = sequence + (behind - sequence) / 2;
          (begin_of(middle) <= unit ? sequence : behind) = middle;
        }
        return Lot<std::int64_t>{sequence, 0, begin_of(sequence),
                                 units[sequence + 1] - units[sequence], 1};
      });
  share_out(table, shared, sequences, end.before.chunks, begin, begin, [&](std::int32_t n) {
    return n < sequences ? span_of(offsets, starts, p.scan.prefix_lens, p.scan.wide_index, n)
                         : Span{};
  });
}

template <bool MakesGates>
__global__ void __launch_bounds__(threads) share_kernel(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  device::allow_successors();
  device::wait_for_predecessors();
  if (MakesGates && blockIdx.x > 0) {
    make_gates(p.making);
    return;
  }
  const auto block = static_cast<std::int32_t>(threadIdx.x);
  if (block < p.table.blocks) p.table.finished[block] = p.table.left[block] = 0;
  if (block == 0) shared.least = 1;
  __syncthreads();
  if (p.scan.given <= scan::few && share_few<MakesGates>(p, shared)) return;
  share_many(p, shared);
}

}  // namespace

Step share_step(const SequenceScan& scan, const ShareTable& table, const ReadyGates& gates) {
  const std::int64_t beside = gates.making.blocks;
  return programmatic(
      kernel_step("one_pass shares", beside > 0 ? share_kernel<true> : share_kernel<false>,
                  grid_of(1 + beside), {threads}, 0, Params{scan, table, gates.g, gates.making}));
}

}  // namespace gdnflow::stages::one_pass
