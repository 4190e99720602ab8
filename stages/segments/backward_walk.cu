// Segments: one block a slot and head walks backwards from the segment's begin, sixteen chunks at a
// time, a warp a chunk, until the bound is small enough. Each block cuts the sequences for itself,
// which is cheaper than a launch more: lengths are a few loads from L2.
//
// Of g_cumsum it reads a value a chunk and head; of k, unless it is L2-normalised, the chunks that
// it walks over.

#include "cuda_tiles.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/half.cuh"
#include "segments/plan.hpp"

#include <string>
#include <variant>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cuda/std/limits>

namespace gdnflow::stages::segments {
namespace {

struct Config {
  static constexpr int warps = 16;
  static constexpr int threads = 32 * warps;
};

constexpr auto grain = static_cast<std::int32_t>(segment_grain);

template <class T>
struct Params {
  device::Rows<const T> k;                // [T, Hqk, D]
  device::Scalars<const float> g_cumsum;  // [T, Hv]
  device::Scalars<const float> beta;      // [T, Hv]
  device::ChunkTable chunks;
  device::Heads heads;
  Slot* slots;           // [NS]
  std::int32_t* starts;  // [NS, Hv]
  float* bounds;         // [NS, Hv]
  std::int32_t* marks;   // [NM, Hv]
  std::int64_t mark_count;
  std::int32_t sequences;  // N
  std::int32_t useful;     // segments that fill the machine
  bool unit_keys;          // k is L2-normalised
};

using Reduce = cub::BlockReduce<std::int32_t, Config::threads>;
using Scan = cub::BlockScan<std::int32_t, Config::threads>;

struct SharedStorage {
  union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  };
  Cut cut;
  Slot slot;
  std::int32_t first;  // chunk of the slot's sequence
  float log2_decay[Config::warps];
};

template <class T>
__device__ Cut cut_sequences(const Params<T>& p, SharedStorage& shared) {
  const std::int32_t* offsets = p.chunks.offsets;
  const std::int32_t total = offsets[p.sequences];
  const std::int32_t running = p.chunks.counts[3];
  if (p.useful <= running || total == 0) return Cut::none();
  const Cut shortest = Cut::into(total, p.useful);
  std::int32_t count = 0;
  for (auto n = static_cast<std::int32_t>(threadIdx.x); n < p.sequences; n += Config::threads) {
    const std::int32_t chunks = offsets[n + 1] - offsets[n];
    count += chunks > 0 ? shortest.segments(chunks) : 0;
  }
  count = Reduce(shared.reduce).Sum(count);
  if (threadIdx.x == 0) {
    // Each sequence may round up by one; where that makes too many, one a sequence is set aside.
    shared.cut = count <= p.useful ? shortest : Cut::into(total, p.useful - running);
  }
  __syncthreads();
  return shared.cut;
}

/// Leaves slot `number` and its sequence's first chunk in shared memory.
template <class T>
__device__ void find_slot(const Params<T>& p, const Cut& cut, std::int32_t number,
                          SharedStorage& shared) {
  const std::int32_t* offsets = p.chunks.offsets;
  if (threadIdx.x == 0) shared.slot = {-1, 0, 0, 0};
  std::int32_t base = 0;
  for (std::int32_t first = 0; first < p.sequences && base <= number; first += Config::threads) {
    const std::int32_t n = first + static_cast<std::int32_t>(threadIdx.x);
    const bool there = n < p.sequences;
    const std::int32_t begin = there ? offsets[n] : 0;
    const std::int32_t chunks = there ? offsets[n + 1] - begin : 0;
    const std::int32_t count = there ? cut.segments(chunks) : 0;
    std::int32_t before = 0;
    std::int32_t sum = 0;
    __syncthreads();
    Scan(shared.scan).ExclusiveSum(count, before, sum);
    const std::int32_t i = number - base - before;
    if (i >= 0 && i < count) {
      shared.slot = {n, begin + Cut::border(chunks, count, i),
                     begin + Cut::border(chunks, count, i + 1), i};
      shared.first = begin;
    }
    base += sum;
  }
  __syncthreads();
}

/// log2 of the bound over a chunk, by a warp.
template <class T, int D>
__device__ float log2_bound_of_chunk(const Params<T>& p, std::int32_t index, std::int32_t head) {
  const device::Chunk chunk = p.chunks.at(index);
  float growth = 0.0F;
  for (auto i = static_cast<int>(threadIdx.x % 32); i < chunk.tokens; i += 32) {
    const std::int64_t token = std::int64_t{chunk.first_token} + i;
    float square = 1.01F;  // normalised keys are rounded afterwards
    if (!p.unit_keys) {
      square = 0.0F;
      const T* row = p.k.row(token, p.heads.qk_of(head));
#pragma unroll 4
      for (int d = 0; d < D; d += 8) {
        float x[8];
        device::load_8(x, row + d);
#pragma unroll
        for (const float y : x) square += y * y;
      }
    }
    growth += log2f(fmaxf(1.0F, fabsf(1.0F - p.beta.at(token, head) * square)));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) growth += __shfl_xor_sync(~0U, growth, step);
  const std::int64_t last = std::int64_t{chunk.first_token} + chunk.tokens - 1;
  return growth + p.g_cumsum.at(last, head) * device::log2_e;
}

struct Start {
  std::int32_t chunk;
  float log2_bound;
};

/// The nearest place in front of the slot where the bound is small enough. A NaN never is.
template <class T, int D>
__device__ Start find_start(const Params<T>& p, std::int32_t head, SharedStorage& shared) {
  const Slot slot = shared.slot;
  const float nothing = -cuda::std::numeric_limits<float>::infinity();
  if (slot.sequence < 0 || slot.number == 0) return {slot.begin, nothing};
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
  const std::int32_t first = shared.first;
  const std::int32_t least = max(first, slot.begin - most_lead);
  float sum = 0.0F;
  for (std::int32_t at = slot.begin - 1; at >= least; at -= Config::warps) {
    if (at - warp >= least) {
      const float x = log2_bound_of_chunk<T, D>(p, at - warp, head);
      if (threadIdx.x % 32 == 0) shared.log2_decay[warp] = x;
    }
    __syncthreads();
    for (std::int32_t i = 0; i < Config::warps && at - i >= least; ++i) {
      sum += shared.log2_decay[i];
      const std::int32_t chunk = at - i;
      if ((chunk - first) % grain == 0 && sum <= log2_resolution + log2_margin) {
        return {chunk, chunk == first ? nothing : sum};
      }
    }
    __syncthreads();
  }
  return {-1, nothing};
}

template <class T, int D>
__global__ void __launch_bounds__(Config::threads, 1)
    segments_kernel(const __grid_constant__ Params<T> p) {
  __shared__ SharedStorage shared;
  device::wait_for_predecessors();
  device::allow_successors();
  const auto number = static_cast<std::int32_t>(blockIdx.x / p.heads.v);
  const auto head = static_cast<std::int32_t>(blockIdx.x % p.heads.v);
  find_slot(p, cut_sequences(p, shared), number, shared);
  const Start start = find_start<T, D>(p, head, shared);
  if (threadIdx.x == 0) {
    if (head == 0) p.slots[number] = shared.slot;
    p.starts[blockIdx.x] = start.chunk;
    p.bounds[blockIdx.x] = start.log2_bound;
  }
  const std::int64_t all = std::int64_t{gridDim.x} * Config::threads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * Config::threads + threadIdx.x; i < p.mark_count;
       i += all) {
    p.marks[i] = 0;
  }
}

std::int64_t blocks(const VariantQuery& query) {
  return slot_count(query.problem, query.capacity, query.device) * query.problem.v_heads;
}

Support supports(const VariantQuery& query) {
  if (useful_segments(query.problem, query.device) == 1) {
    return Support::no("v_heads: expected few enough to leave multiprocessors idle, got " +
                       std::to_string(query.problem.v_heads));
  }
  return supports_tiles(query, blocks(query));
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {"k"}); }

template <class T, int D>
Step step_of(const StageCall& call, const VariantQuery& query) {
  Params<T> params{};
  params.k = device::Rows<const T>(call["k"]);
  params.g_cumsum = device::Scalars<const float>(call["g_cumsum"]);
  params.beta = device::Scalars<const float>(call["beta"]);
  params.chunks = chunk_table(call);
  params.heads = device::Heads(call.problem);
  params.slots = call["segment_slots"].as<Slot>();
  params.starts = call["segment_starts"].as<std::int32_t>();
  params.bounds = call["segment_bounds"].as<float>();
  params.marks = call["segment_marks"].as<std::int32_t>();
  params.mark_count = call["segment_marks"].elements();
  params.sequences = static_cast<std::int32_t>(call.capacity.max_sequences);
  params.useful = static_cast<std::int32_t>(useful_segments(query.problem, query.device));
  params.unit_keys = call.problem.qk_norm;
  Step step = kernel_step("segments", segments_kernel<T, D>, grid_of(blocks(query)),
                          {Config::threads}, 0, params);
  std::get<KernelLaunch>(step.work).programmatic = call.device.capability >= 90;
  return step;
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  with_type_and_dim(call.problem,
                    [&]<class T, int D>() { out.push_back(step_of<T, D>(call, query)); });
}

}  // namespace

Variant backward_walk() {
  Variant variant;
  variant.id = "backward-walk";
  variant.description = "a block a segment and head, a warp a chunk, from the segment backwards";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::segments
