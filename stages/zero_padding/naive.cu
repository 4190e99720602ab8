// Zeroes the rows of o that no sequence owns. Sequences are contiguous, so these stand before the
// first and behind the last; a scan over cu_seqlens finds both ends, as chunk_index does. Blocks
// take padding rows in turn, so a batch that fills its capacity costs two small launches.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/views.cuh"

#include <algorithm>

namespace gdnflow::stages::zero_padding {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int blocks_per_multiprocessor = 4;
};

/// `Word` is an unsigned integer of an element's size: zero is all bits zero in every type.
template <class Word>
struct Params {
  device::Rows<Word> o;        // [T, Hv, D]
  const std::int32_t* starts;  // [N+1]
  std::int64_t sequences;      // N
  std::int64_t tokens;         // rows that there are, at most T
  std::int32_t heads;          // Hv
  std::int32_t dim;            // D
};

template <class Word>
__global__ void __launch_bounds__(Config::threads)
    zero_padding_kernel(const __grid_constant__ Params<Word> p) {
  device::wait_for_predecessors();
  device::allow_successors();
  const std::int64_t before = p.starts[0];
  const std::int64_t end = p.starts[p.sequences];
  const std::int64_t rows = before + p.tokens - end;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t token = row < before ? row : end + row - before;
    for (int i = static_cast<int>(threadIdx.x); i < p.heads * p.dim; i += Config::threads) {
      p.o.row(token, i / p.dim)[i % p.dim] = 0;
    }
  }
}

std::int64_t blocks(const Capacity& capacity, const DeviceInfo& device) {
  return std::min<std::int64_t>(capacity.max_tokens, std::int64_t{device.multiprocessors} *
                                                         Config::blocks_per_multiprocessor);
}

Support supports(const VariantQuery& query) {
  return supports_cuda(query, blocks(query.capacity, query.device));
}

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  return {{"starts", sequence_starts_bytes(query.capacity.max_sequences)}};
}

template <class Word>
void zero_step(const StageCall& call, const SequenceScan& scan, StepList& out) {
  Params<Word> params{};
  params.o = device::Rows<Word>(call["o"]);
  params.starts = scan.starts;
  params.sequences = scan.sequences;
  params.tokens = scan.tokens;
  params.heads = call.problem.v_heads;
  params.dim = call.problem.v_dim;
  out.push_back(programmatic(kernel_step("zero_padding", zero_padding_kernel<Word>,
                                         grid_of(blocks(call.capacity, call.device)),
                                         {Config::threads}, 0, params)));
}

void steps(const StageCall& call, StepList& out) {
  SequenceScan scan = sequence_scan(call);
  scan.starts = call.scratch[0].as<std::int32_t>();
  out.push_back(sequence_scan_step(scan));
  if (size_of(call.problem.activation) == 2) {
    zero_step<std::uint16_t>(call, scan, out);
  } else {
    zero_step<std::uint32_t>(call, scan, out);
  }
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "rows before the first and behind the last sequence";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.scratch = scratch;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::zero_padding
