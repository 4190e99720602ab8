#pragma once

// What the kernels of one_pass for sm_90a share: parameters, and what a block works on.
//
// Where heads are few, the launch in front cuts the sequences (plan.cu), and each block looks back
// from its segment's begin, by the gates alone, until the past has faded. What keys that are not
// normalised add to the bound is found on the way, from the diagonal of K K^T, and enters the check
// behind, of a second launch (half heads) or of the last block to be done (whole ones), which
// computes again what does not pass it.

#include <gdnflow/stage.hpp>

#include "device/gates.cuh"
#include "device/prefix.cuh"
#include "fused_prefill/register_state.cuh"
#include "segments/block_plan.cuh"
#include "segments/plan.hpp"

#include <cstdint>
#include <utility>
#include <variant>

namespace gdnflow::stages::one_pass {

using namespace fused_prefill;

struct Params : RegisterStateParams {
  const std::int32_t* starts;  // [N+1]: first token of each sequence
  const void* prefix_lens;     // [N], or null
  bool wide_index;
  const std::int32_t* longest_segment;  // [1], in chunks
  std::int32_t* segment_starts;         // what SegmentPlan reads
  float* log2_bounds;
  std::int32_t* finished;  // [U, Hv]: of a cut sequence's segments, how many are done
};

// Chunk `index` of a sequence, counted from its first.
__device__ __forceinline__ device::Chunk chunk_of(const Params& p, int sequence, int index) {
  const std::int64_t prefix = device::safe_prefix(p.prefix_lens, p.wide_index, sequence);
  const auto in_first = static_cast<std::int32_t>(prefix % chunk_tokens);
  const std::int32_t start = p.starts[sequence];
  device::Chunk chunk;
  chunk.sequence = sequence;
  chunk.first_token = start + (index == 0 ? 0 : index * rows - in_first);
  chunk.tokens =
      min(index == 0 ? rows - in_first : rows, p.starts[sequence + 1] - chunk.first_token);
  chunk.number = static_cast<std::int32_t>(prefix / chunk_tokens) + index;
  return chunk;
}

__device__ __forceinline__ void find_tokens(const Params& p, Task& task) {
  if (task.chunks == 0) return;
  const int index = task.first_chunk - p.chunks.offsets[task.sequence];
  task.chunk = chunk_of(p, task.sequence, index);
  const device::Chunk last = chunk_of(p, task.sequence, index + task.chunks - 1);
  task.end_token = last.first_token + last.tokens;
}

template <class Shape>
struct PlanStorage {
  float sums[Shape::threads / 32];
};

// This block's segment, by the whole block.
template <class Shape>
__device__ bool find_segment(const Params& p, PlanStorage<Shape>& shared, int number, Task& task) {
  const segments::Slot slot = p.segments.slots[number];
  if (slot.sequence < 0) return false;
  const std::int32_t first = p.chunks.offsets[slot.sequence];
  const std::int32_t chunks = p.chunks.offsets[slot.sequence + 1] - first;
  const bool speaks = threadIdx.x == 0 && task.first_column == 0;  // for all blocks of the segment
  const auto start_of = [&](std::int32_t begin) {
    return segments::find_start(first, begin, shared.sums, [&](std::int32_t index) {
      const device::Chunk chunk = chunk_of(p, slot.sequence, index - first);
      float sum = 0.0F;
      for (auto i = static_cast<int>(threadIdx.x % 32); i < chunk.tokens; i += 32) {
        sum += device::clamp_log_decay(p.g.at(std::int64_t{chunk.first_token} + i, task.head));
      }
      return segments::sum_of_warp(sum) * device::log2_e;
    });
  };
  const std::int32_t count = segments::Cut{*p.longest_segment}.segments(chunks);
  task.sequence = slot.sequence;
  task.first_slot = number - slot.number;
  task.segments = count;
  const segments::Start start = start_of(slot.begin);
  task.entry = std::int64_t{number} * p.heads.v + task.head;
  if (speaks) {
    p.segment_starts[task.entry] = start.chunk;
    p.log2_bounds[task.entry] = start.log2_bound;
  }
  if (start.chunk < 0) return false;
  // Segments behind that have no start of their own are this one's.
  std::int32_t next = slot.number + 1;
  std::int32_t last = slot.end;
  while (next < count && start_of(last).chunk < 0) {
    last = first + segments::Cut::border(chunks, count, ++next);
  }
  task.first = first;
  task.first_chunk = start.chunk;
  task.chunks = last - start.chunk;
  task.lead = slot.begin - start.chunk;
  task.from_start = start.chunk == first;
  task.to_end = last == first + chunks;
  if (task.to_end && !(task.from_start && task.lead == 0) && p.waiting.data != nullptr) {
    task.waiting_row = waiting_row(number - slot.number + next - 1, slot);
  }
  return true;
}

// What a block works on, by the whole block; `shared` is free again on return. False: nothing.
template <class Shape, Form form>
__device__ __forceinline__ bool find_task(const Params& p, PlanStorage<Shape>& shared, Task& task) {
  if constexpr (form == Form::plain || form == Form::checkpoints) {
    static_cast<Work&>(task) = work_of_block<Shape::tile>(p.chunks, p.heads);
    task.first = task.first_chunk;
  } else {
    constexpr int splits = dim / Shape::tile;
    const unsigned entry = blockIdx.x / splits;
    task.head = static_cast<int>(entry % p.heads.v);
    task.qk_head = p.heads.qk_of(task.head);
    task.first_column = static_cast<int>(blockIdx.x % splits) * Shape::tile;
    const int number = static_cast<int>(entry / p.heads.v);
    if constexpr (form == Form::repair) {
      if (!find_repair(p, number, task)) return false;
    } else {
      if (!find_segment<Shape>(p, shared, number, task)) return false;
      __syncthreads();
    }
  }
  if constexpr (form != Form::plain) {
    if (task.chunks > 0) task.first_number = chunk_of(p, task.sequence, 0).number;
  }
  return true;
}

// log2 of the product of |1 - beta |k|^2| over a lane's tokens of the chunk, those factors that are
// more than one: where they are, the state may grow. `gram` are a warp's rows of K K^T.
__device__ __forceinline__ float log2_growth_of(const float (&gram)[rows / 2], const Gates& gates,
                                                int warp) {
  const int row = threadIdx.x % 32 / 4;
  if (row / 2 != threadIdx.x % 4) return 0.0F;  // has no element of the diagonal
  float growth = 0.0F;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float square = 0.0F;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float* const x = &gram[4 * (2 * block + h) + 2 * h];
      if (block == warp) square = row % 2 == 0 ? x[0] : x[1];
    }
    const float4& pair = gates.residual[8 * warp + row / 2 + 4 * h];
    const float factor = fabsf(1.0F - (row % 2 == 0 ? pair.z : pair.w) * square);
    if (factor > 1.0F) growth += log2f(factor);
  }
  return growth;
}

// Adds the launches of a walk, over segments or whole sequences. launch.operator()<Element,
// Form>(name) makes one; `Repairs`: whether segments are checked by a launch behind.
template <bool Repairs, class Launch>
void add_walk(const Params& params, const Problem& problem, bool cut, StepList& out,
              Launch&& launch) {
  const auto add = [&]<class Element, Form form>(const char* name) {
    Step step = launch.template operator()<Element, form>(name);
    std::get<KernelLaunch>(step.work).programmatic = true;
    out.push_back(std::move(step));
  };
  const bool checkpoints = params.state.checkpoint_chunks > 0;
  const auto add_all = [&]<class Element>() {
    if (!cut) {
      checkpoints ? add.template operator()<Element, Form::checkpoints>("one_pass")
                  : add.template operator()<Element, Form::plain>("one_pass");
      return;
    }
    checkpoints ? add.template operator()<Element, Form::segments_checkpoints>("one_pass")
                : add.template operator()<Element, Form::segments>("one_pass");
    if constexpr (Repairs) add.template operator()<Element, Form::repair>("one_pass repair");
  };
  problem.activation == DType::bf16 ? add_all.template operator()<__nv_bfloat16>()
                                    : add_all.template operator()<__half>();
}

/// Add the launches of a walk, over segments or whole sequences, in so many slots: two blocks a
/// head, each on half of its value columns, or one.
void half_head(const Params& params, const Problem& problem, bool cut, std::int64_t slots,
               StepList& out);
void whole_head(const Params& params, const Problem& problem, bool cut, std::int64_t slots,
                StepList& out);

}  // namespace gdnflow::stages::one_pass
