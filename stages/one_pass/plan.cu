// In front of a walk by half heads or by tokens: where sequences begin and how they are cut.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "one_pass/plan.hpp"
#include "one_pass/ready_gates.cuh"
#include "segments/block_plan.cuh"

namespace gdnflow::stages::one_pass {
namespace {

struct Params {
  SequenceScan scan;
  SlotTable table;
  device::Scalars<const float> g;  // [T, Hv]; not where gates are made ready here
  GateMaking making;
};

using Plan = segments::BlockPlan<scan::Config::threads>;

static_assert(GateMaking::threads == scan::Config::threads);

/// Whether the past of some head of a long sequence does not fade in front of any segment: such a
/// head is walked through whatever is cut, which then only delays it. By the block; a sample of the
/// gates tells. It is asked for early and looked at late: nothing here is waited for that can be
/// done meanwhile, and few instructions are fetched for it.
template <bool MakesGates>
class FrozenHeads {
 public:
  __device__ __forceinline__ FrozenHeads(const Params& p, std::int32_t chunks, std::int32_t start) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const auto count = static_cast<std::int32_t>(p.scan.given);
    const std::int32_t lot = thread / samples;
    if (p.table.heads == 0 || count * p.table.heads * samples > scan::Config::threads) return;
    const std::int32_t n = count == 1 ? 0 : min(lot / p.table.heads, count);
    const std::int32_t head = lot - n * p.table.heads;
    const std::int32_t begin = __shfl_sync(~0U, start, n);
    const auto tokens = static_cast<std::uint32_t>(__shfl_sync(~0U, start, n + 1) - begin);
    // Of those that take the longest: others are done by then, cut or not.
    const std::int32_t least = max(__reduce_max_sync(~0U, chunks) / 2, std::int32_t{segment_grain});
    asked_ = __shfl_sync(~0U, chunks, n) > least && head < p.table.heads;
    if (asked_) {
      g_ = sampled_log_decay<MakesGates>(p.g, p.making, begin, tokens, thread % samples, samples,
                                         head);
    }
  }
  __device__ __forceinline__ bool any() {
    constexpr float fades = fading_sum(samples, segments::most_lead);
#pragma unroll
    for (int step = 1; step < samples; step *= 2) g_ += __shfl_xor_sync(~0U, g_, step);
    return __syncthreads_or(static_cast<int>(asked_ && !(g_ <= fades))) != 0;  // a NaN never fades
  }

 private:
  static constexpr std::int32_t samples = 8;  // of a head
  bool asked_ = false;
  float g_ = 0.0F;
};

template <bool MakesGates>
__global__ void __launch_bounds__(scan::Config::threads)
    plan_kernel(const __grid_constant__ Params p) {
  __shared__ union {
    scan::SharedStorage scan;
    typename Plan::Storage plan;
  } shared;
  device::allow_successors();
  device::wait_for_predecessors();
  if (MakesGates && blockIdx.x > 0) {
    make_gates(p.making);
    return;
  }
  const SlotTable& table = p.table;
  if (p.scan.given <= scan::few) {
    const auto end = static_cast<int>(p.scan.given);
    const scan::Sequence mine = scan::sequence_of_lane(p.scan, end);
    const std::int32_t first = mine.before.chunks;
    const bool there = static_cast<int>(threadIdx.x % 32) < end;
    const std::int32_t chunks = __shfl_down_sync(~0U, first, 1) - first;
    const segments::WarpPlan plan{first, there ? chunks : 0, there};
    FrozenHeads<MakesGates> frozen(p, plan.chunks, mine.start);
    scan::write_few(p.scan, mine);
    if (table.slots == nullptr) return;
    segments::Cut cut = segments::Cut::none();
    if (table.alone == 0) {
      cut = plan.cut(__shfl_sync(~0U, first, end), __shfl_sync(~0U, mine.before.sequences, end),
                     table.useful);
      if (frozen.any()) cut = segments::Cut::none();
    }
    if (threadIdx.x == 0) *table.longest = cut.length;
    plan.write_slots({cut, table.alone}, table.slots, table.slot_count);
    return;
  }
  const scan::Sequence end = scan::scan_sequences(
      p.scan, shared.scan,
      [&](const scan::Sequence& sequence) { scan::write_offsets(p.scan, sequence); },
      [](const scan::Sequence&, std::int64_t) {});
  if (threadIdx.x == 0) scan::write_end(p.scan, end);
  if (table.slots == nullptr) return;
  __syncthreads();
  const segments::Sequences sequences{p.scan.chunk_offsets,
                                      static_cast<std::int32_t>(p.scan.sequences),
                                      end.before.sequences, table.useful};
  const segments::Cut cut =
      table.alone != 0 ? segments::Cut::none() : Plan::cut(sequences, shared.plan);
  if (threadIdx.x == 0) *table.longest = cut.length;
  Plan::write_slots(sequences, {cut, table.alone}, table.slots, table.slot_count, shared.plan);
}

}  // namespace

Step plan_step(const SequenceScan& scan, const SlotTable& table, const ReadyGates& gates) {
  const std::int64_t beside = gates.making.blocks;
  return programmatic(kernel_step(
      "one_pass plan", beside > 0 ? plan_kernel<true> : plan_kernel<false>, grid_of(1 + beside),
      {scan::Config::threads}, 0, Params{scan, table, gates.g, gates.making}));
}

}  // namespace gdnflow::stages::one_pass
