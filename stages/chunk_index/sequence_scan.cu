// The scan over sequences as a launch of its own, by one block. Few sequences, the usual case, are
// one pass; a million are a thousand passes of some 2 us.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"

namespace gdnflow::stages {
namespace {

__global__ void __launch_bounds__(scan::Config::threads)
    sequence_scan_kernel(const __grid_constant__ SequenceScan p) {
  __shared__ scan::SharedStorage shared;
  device::allow_successors();
  device::wait_for_predecessors();
  const scan::Sequence end = scan::scan_sequences(
      p, shared, [&](const scan::Sequence& sequence) { scan::write_offsets(p, sequence); },
      [](const scan::Sequence&, std::int64_t) {});
  if (threadIdx.x == 0) scan::write_end(p, end);
}

}  // namespace

SequenceScan sequence_scan(const StageCall& call) {
  SequenceScan scan;
  scan.cu_seqlens = call["cu_seqlens"].data;
  scan.wide_index = call.problem.index == DType::i64;
  scan.tokens = call.tokens;
  scan.sequences = call.capacity.max_sequences;
  scan.given = call.sequences;
  scan.checkpoint_interval = call.problem.checkpoint_interval;
  return scan;
}

Step sequence_scan_step(const SequenceScan& scan) {
  return programmatic(kernel_step("sequence_scan", sequence_scan_kernel, grid_of(1),
                                  {scan::Config::threads}, 0, scan));
}

std::int64_t sequence_starts_bytes(std::int64_t sequences) {
  return (sequences + 1) * static_cast<std::int64_t>(sizeof(std::int32_t));
}

}  // namespace gdnflow::stages
