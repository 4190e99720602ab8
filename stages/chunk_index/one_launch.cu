// Cuts sequences into chunks in one launch: every block scans all sequences for itself, which for a
// few thousand of them is cheaper than a second launch, and fills its part of the table from what
// the scan leaves in shared memory. The first block writes the offsets. Where the capacity has more
// sequences, the variant `naive` scans them once.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/prefix.cuh"

namespace gdnflow::stages::chunk_index {
namespace {

constexpr std::int64_t most_sequences = 4096;  // four passes of a block

struct Params {
  SequenceScan scan;
  int4* chunk_table;  // [NC]
  std::int64_t rows;  // NC
};

struct SharedStorage {
  scan::SharedStorage scan;
  std::int32_t chunks[scan::Config::per_pass + 1];  // first of each sequence of a pass, and the end
  std::int32_t starts[scan::Config::per_pass + 1];  // first tokens, and the end
};

/// The sequence of a pass over `count` that owns a chunk: the last whose first is not behind it.
__device__ int owner(const SharedStorage& shared, int count, std::int32_t chunk) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (shared.chunks[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ int4 row_of(const SequenceScan& p, const SharedStorage& shared, std::int64_t base,
                       int count, std::int32_t chunk) {
  const int i = owner(shared, count, chunk);
  const std::int64_t prefix = device::safe_prefix(p.prefix_lens, p.wide_index, base + i);
  const auto in_first = static_cast<std::int32_t>(prefix % chunk_tokens);
  const std::int32_t index = chunk - shared.chunks[i];
  const std::int32_t start = shared.starts[i];
  constexpr auto size = static_cast<std::int32_t>(chunk_tokens);
  const std::int32_t first = start + (index == 0 ? 0 : index * size - in_first);
  const std::int32_t most = index == 0 ? size - in_first : size;
  return make_int4(static_cast<std::int32_t>(base + i), first,
                   min(most, shared.starts[i + 1] - first),
                   static_cast<std::int32_t>(prefix / chunk_tokens) + index);
}

__global__ void __launch_bounds__(scan::Config::threads)
    chunk_index_kernel(const __grid_constant__ Params p) {
  __shared__ SharedStorage shared;
  device::allow_successors();
  device::wait_for_predecessors();
  const SequenceScan& scan = p.scan;
  const bool writes_offsets = blockIdx.x == 0;
  const std::int64_t row = std::int64_t{blockIdx.x} * scan::Config::threads + threadIdx.x;
  std::int64_t pass_base = 0;
  int4 mine = make_int4(0, 0, 0, 0);
  std::int32_t reached = 0;  // chunks of the passes before
  const scan::Sequence end = scan::scan_sequences(
      scan, shared.scan,
      [&](const scan::Sequence& sequence) {
        const auto i = static_cast<int>(sequence.number - pass_base);
        shared.chunks[i] = sequence.before.chunks;
        shared.starts[i] = sequence.start;
        if (writes_offsets) scan::write_offsets(scan, sequence);
      },
      [&](const scan::Sequence& next, std::int64_t base) {
        const auto count = static_cast<int>(next.number - base);
        if (threadIdx.x == 0) {
          shared.chunks[count] = next.before.chunks;
          shared.starts[count] = next.start;
        }
        __syncthreads();
        if (row >= reached && row < next.before.chunks) {
          mine = row_of(scan, shared, base, count, static_cast<std::int32_t>(row));
        }
        reached = next.before.chunks;
        pass_base = next.number;
        __syncthreads();  // the next pass writes there
      });
  if (row < p.rows) p.chunk_table[row] = mine;
  if (writes_offsets && threadIdx.x == 0) scan::write_end(scan, end);
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return ceil_div(max_chunks(problem, capacity), scan::Config::threads);
}

Support supports(const VariantQuery& query) {
  if (query.capacity.max_sequences > most_sequences) {
    return Support::no("max_sequences: expected at most " + std::to_string(most_sequences) +
                       ", got " + std::to_string(query.capacity.max_sequences));
  }
  return supports_cuda(query, blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {}); }

void steps(const StageCall& call, StepList& out) {
  Params params{};
  params.scan = sequence_scan(call);
  params.scan.prefix_lens = call["prefix_lens"].data;
  params.scan.chunk_offsets = call["chunk_offsets"].as<std::int32_t>();
  params.scan.checkpoint_offsets = call["checkpoint_offsets"].as<std::int32_t>();
  params.scan.chunk_counts = call["chunk_counts"].as<std::int32_t>();
  params.chunk_table = call["chunk_table"].as<int4>();
  params.rows = max_chunks(call.problem, call.capacity);
  out.push_back(programmatic(kernel_step("chunk_index", chunk_index_kernel,
                                         grid_of(blocks(call.problem, call.capacity)),
                                         {scan::Config::threads}, 0, params)));
}

}  // namespace

Variant one_launch() {
  Variant variant;
  variant.id = "one-launch";
  variant.description = "every block scans the sequences and fills its part of the table";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::chunk_index
