// In front of a walk by half heads or by tokens: where sequences begin and how they are cut.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "one_pass/beside.cuh"
#include "one_pass/plan.hpp"
#include "segments/block_plan.cuh"

namespace gdnflow::stages::one_pass {
namespace {

struct Params {
  SequenceScan scan;
  SlotTable table;
  Beside beside;
};

using Plan = segments::BlockPlan<scan::Config::threads>;

static_assert(Beside::threads == scan::Config::threads);

template <bool HasBeside>
__global__ void __launch_bounds__(scan::Config::threads)
    plan_kernel(const __grid_constant__ Params p) {
  __shared__ union {
    scan::SharedStorage scan;
    typename Plan::Storage plan;
  } shared;
  device::allow_successors();
  device::wait_for_predecessors();
  if (HasBeside && blockIdx.x > 0) {
    find_beside(p.beside);
    return;
  }
  const SlotTable& table = p.table;
  if (p.scan.given <= scan::few) {
    const auto end = static_cast<int>(p.scan.given);
    const scan::Sequence mine = scan::sequence_of_lane(p.scan, end);
    scan::write_few(p.scan, mine);
    if (table.slots == nullptr) return;
    const std::int32_t first = mine.before.chunks;
    const std::int32_t chunks = __shfl_down_sync(~0U, first, 1) - first;
    const bool there = static_cast<int>(threadIdx.x % 32) < end;
    const segments::WarpPlan plan{first, there ? chunks : 0, there};
    segments::Cut cut = segments::Cut::none();
    if (table.alone == 0) {
      cut = plan.cut(__shfl_sync(~0U, first, end), __shfl_sync(~0U, mine.before.sequences, end),
                     table.useful);
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

Step plan_step(const SequenceScan& scan, const SlotTable& table, const Beside& beside) {
  return programmatic(kernel_step(
      "one_pass plan", beside.blocks > 0 ? plan_kernel<true> : plan_kernel<false>,
      grid_of(1 + beside.blocks), {scan::Config::threads}, 0, Params{scan, table, beside}));
}

}  // namespace gdnflow::stages::one_pass
