// Segments: one block a slot and head walks backwards from the segment's begin, sixteen chunks at a
// time, a warp a chunk, until the bound is small enough.
//
// Of g_cumsum it reads a value a chunk and head; of k, unless it is L2-normalised, the chunks that
// it walks over.

#include "cuda_tiles.cuh"
#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/half.cuh"
#include "segments/block_plan.cuh"
#include "segments/plan.hpp"

#include <string>

namespace gdnflow::stages::segments {
namespace {

struct Config {
  static constexpr int warps = 16;
  static constexpr int threads = 32 * warps;
};

template <class T>
struct Params {
  device::Rows<const T> k;                // [T, Hqk, D]
  device::Scalars<const float> g_cumsum;  // [T, Hv]
  device::Scalars<const float> beta;      // [T, Hv]
  device::ChunkTable chunks;
  device::Heads heads;
  Slot* slots;             // [NS]
  std::int32_t* starts;    // [NS, Hv]
  float* bounds;           // [NS, Hv]
  std::int32_t sequences;  // N
  std::int32_t useful;     // segments that fill the machine
  bool unit_keys;          // k is L2-normalised
};

using Plan = BlockPlan<Config::threads>;

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
  growth = sum_of_warp(growth);
  const std::int64_t last = std::int64_t{chunk.first_token} + chunk.tokens - 1;
  return growth + p.g_cumsum.at(last, head) * device::log2_e;
}

template <class T, int D>
__global__ void __launch_bounds__(Config::threads, 1)
    segments_kernel(const __grid_constant__ Params<T> p) {
  __shared__ typename Plan::Storage shared;
  __shared__ float sums[Config::warps];
  device::wait_for_predecessors();
  device::allow_successors();
  const auto number = static_cast<std::int32_t>(blockIdx.x / p.heads.v);
  const auto head = static_cast<std::int32_t>(blockIdx.x % p.heads.v);
  const Sequences sequences{p.chunks.offsets, p.sequences, p.chunks.counts[3], p.useful};
  Plan::find_slot(sequences, Plan::cut(sequences, shared), number, shared);
  const Slot slot = shared.slot;
  Start start{0, -__int_as_float(0x7f800000)};
  if (slot.sequence >= 0) {
    start = find_start(shared.first, slot.begin, sums, [&](std::int32_t chunk) {
      return log2_bound_of_chunk<T, D>(p, chunk, head);
    });
  }
  if (threadIdx.x == 0) {
    if (head == 0) p.slots[number] = slot;
    p.starts[blockIdx.x] = start.chunk;
    p.bounds[blockIdx.x] = start.log2_bound;
  }
}

std::int64_t blocks(const VariantQuery& query) {
  return slot_count(query.problem, query.capacity, query.device) * query.problem.v_heads;
}

Support supports(const VariantQuery& query) {
  if (Support mode = supports_mode(query); !mode) return mode;
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
  params.sequences = static_cast<std::int32_t>(call.capacity.max_sequences);
  params.useful = static_cast<std::int32_t>(useful_segments(query.problem, query.device));
  params.unit_keys = call.problem.qk_norm;
  return programmatic(kernel_step("segments", segments_kernel<T, D>, grid_of(blocks(query)),
                                  {Config::threads}, 0, params));
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
