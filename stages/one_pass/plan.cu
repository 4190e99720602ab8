// In front of the walk by half heads: where sequences begin and how they are cut, by one block.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "one_pass/plan.hpp"
#include "segments/block_plan.cuh"

namespace gdnflow::stages::one_pass {
namespace {

struct Params {
  SequenceScan scan;
  SlotTable table;
};

using Plan = segments::BlockPlan<scan::Config::threads>;

__global__ void __launch_bounds__(scan::Config::threads)
    plan_kernel(const __grid_constant__ Params p) {
  __shared__ union {
    scan::SharedStorage scan;
    typename Plan::Storage plan;
  } shared;
  device::allow_successors();
  device::wait_for_predecessors();
  const SlotTable& table = p.table;
  const scan::Sequence end = scan::scan_sequences(
      p.scan, shared.scan,
      [&](const scan::Sequence& sequence) { scan::write_offsets(p.scan, sequence); },
      [](const scan::Sequence&, std::int64_t) {});
  if (threadIdx.x == 0) scan::write_end(p.scan, end);
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

Step plan_step(const SequenceScan& scan, const SlotTable& table) {
  return programmatic(kernel_step("one_pass plan", plan_kernel, grid_of(1), {scan::Config::threads},
                                  0, Params{scan, table}));
}

}  // namespace gdnflow::stages::one_pass
