// Cuts sequences into chunks. The scan over sequences runs in one block (sequence_scan.cu); the
// table is then filled by a thread a row, which finds its sequence by bisection in chunk_offsets.
// 16 bytes written a chunk; no host read, so one captured graph serves any lengths.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/prefix.cuh"

namespace gdnflow::stages::chunk_index {
namespace {

struct Config {
  static constexpr int threads = 128;
};

struct Params {
  const std::int32_t* starts;         // [N+1]
  const std::int32_t* chunk_offsets;  // [N+1]
  const void* prefix_lens;            // [N], or null
  int4* chunk_table;                  // [NC]
  std::int64_t rows;                  // NC
  std::int64_t sequences;             // N
  bool wide_index;
};

/// The sequence that owns a chunk: the last whose first chunk is not behind it.
__device__ std::int64_t owner(const Params& p, std::int32_t chunk) {
  std::int64_t low = 0;
  std::int64_t high = p.sequences;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (p.chunk_offsets[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ int4 row_of(const Params& p, std::int32_t chunk) {
  const std::int64_t n = owner(p, chunk);
  const std::int64_t prefix = device::safe_prefix(p.prefix_lens, p.wide_index, n);
  const auto in_first = static_cast<std::int32_t>(prefix % chunk_tokens);
  const std::int32_t index = chunk - p.chunk_offsets[n];
  const std::int32_t start = p.starts[n];
  const std::int32_t end = p.starts[n + 1];
  constexpr auto size = static_cast<std::int32_t>(chunk_tokens);
  const std::int32_t first = start + (index == 0 ? 0 : index * size - in_first);
  const std::int32_t most = index == 0 ? size - in_first : size;
  return make_int4(static_cast<std::int32_t>(n), first, min(most, end - first),
                   static_cast<std::int32_t>(prefix / chunk_tokens) + index);
}

__global__ void __launch_bounds__(Config::threads)
    fill_chunk_table(const __grid_constant__ Params p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * Config::threads + threadIdx.x;
  device::wait_for_predecessors();
  device::allow_successors();
  if (row >= p.rows) return;
  const std::int32_t chunks = p.chunk_offsets[p.sequences];
  p.chunk_table[row] =
      row < chunks ? row_of(p, static_cast<std::int32_t>(row)) : make_int4(0, 0, 0, 0);
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return ceil_div(max_chunks(problem, capacity), Config::threads);
}

Support supports(const VariantQuery& query) {
  return supports_cuda(query, blocks(query.problem, query.capacity));
}

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  return {{"starts", sequence_starts_bytes(query.capacity.max_sequences)}};
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {}); }

void steps(const StageCall& call, StepList& out) {
  SequenceScan scan = sequence_scan(call);
  scan.prefix_lens = call["prefix_lens"].data;
  scan.starts = call.scratch[0].as<std::int32_t>();
  scan.chunk_offsets = call["chunk_offsets"].as<std::int32_t>();
  scan.checkpoint_offsets = call["checkpoint_offsets"].as<std::int32_t>();
  scan.chunk_counts = call["chunk_counts"].as<std::int32_t>();
  out.push_back(sequence_scan_step(scan));

  Params params{};
  params.starts = scan.starts;
  params.chunk_offsets = scan.chunk_offsets;
  params.prefix_lens = scan.prefix_lens;
  params.chunk_table = call["chunk_table"].as<int4>();
  params.rows = max_chunks(call.problem, call.capacity);
  params.sequences = scan.sequences;
  params.wide_index = scan.wide_index;
  out.push_back(programmatic(kernel_step("chunk_index", fill_chunk_table,
                                         grid_of(blocks(call.problem, call.capacity)),
                                         {Config::threads}, 0, params)));
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "block scan over sequences, then a thread a chunk";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.scratch = scratch;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::chunk_index
