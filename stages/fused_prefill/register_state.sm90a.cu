// fused_prefill, register-state (sm_90a): the recurrence transposed, in registers from product to
// product (register_state.cuh), for A that kkt_solve has made.
//
//   producer (one warp)   q k v A by TMA, gates, into a ring
//   state group(s)        one: half a head a block; two: a whole head
//   output group          trails behind

#include <gdnflow/stage.hpp>

#include "device/dependent_launch.cuh"
#include "fused_prefill/register_state.cuh"

#include <algorithm>
#include <cstdint>
#include <string>

namespace gdnflow::stages::fused_prefill {
namespace {

// False: this block has nothing to do.
template <int Tile, Form form>
__device__ __forceinline__ bool find_task(const RegisterStateParams& p, Task& task) {
  if constexpr (form == Form::plain || form == Form::checkpoints) {
    static_cast<Work&>(task) = work_of_block<Tile>(p.chunks, p.heads);
    task.first = task.first_chunk;
  } else {
    constexpr int splits = dim / Tile;
    const SegmentPlan& plan = p.segments;
    const unsigned entry = blockIdx.x / splits;
    task.head = static_cast<int>(entry % p.heads.v);
    task.qk_head = p.heads.qk_of(task.head);
    task.first_column = static_cast<int>(blockIdx.x % splits) * Tile;
    int number = static_cast<int>(entry / p.heads.v);
    if constexpr (form == Form::repair) {
      if (!find_repair(p, number, task)) return false;
    } else {
      const segments::Slot slot = plan.slots[number];
      if (slot.sequence < 0) return false;
      const auto start_of = [&](int i) {
        return plan.starts[std::int64_t{i} * p.heads.v + task.head];
      };
      const std::int32_t start = start_of(number);
      if (start < 0) return false;
      task.sequence = slot.sequence;
      task.first = p.chunks.offsets[slot.sequence];
      const std::int32_t end = p.chunks.offsets[slot.sequence + 1];
      std::int32_t last = slot.end;
      while (follows(plan, slot, ++number) && start_of(number) < 0) last = plan.slots[number].end;
      task.first_chunk = start;
      task.chunks = last - start;
      task.lead = slot.begin - start;
      task.from_start = start == task.first;
      task.to_end = last == end;
      if (task.to_end && !(task.from_start && task.lead == 0) && p.waiting.data != nullptr) {
        task.waiting_row = waiting_row(number - 1, slot);
      }
    }
  }
  if constexpr (form != Form::plain) {
    if (task.chunks > 0) task.first_number = p.chunks.at(task.first).number;
  }
  return true;
}

// What the producer needs to know of the tokens.
__device__ __forceinline__ void find_tokens(const RegisterStateParams& p, Task& task) {
  if (task.chunks == 0) return;
  task.chunk = p.chunks.at(task.first_chunk);
  const device::Chunk last = p.chunks.at(task.first_chunk + task.chunks - 1);
  task.end_token = last.first_token + last.tokens;
}

template <class Element, int Groups, Form form>
__global__ void __launch_bounds__(Config<Groups>::threads, 1)
    register_state_kernel(const __grid_constant__ RegisterStateParams p) {
  using Shape = Config<Groups>;
  extern __shared__ __align__(1024) std::byte raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(raw);
  if (threadIdx.x == 0) {
    init_rings(shared);
    device::fence_barrier_init();
  }
  __syncthreads();
  device::wait_for_predecessors();
  Task w;
  if (!find_task<Shape::tile, form>(p, w)) return;
  if constexpr (form == Form::repair) {
    if (w.waiting_row >= 0) {
      hand_state_on<Shape>(p, w, static_cast<int>(threadIdx.x), Shape::threads);
      return;
    }
  }
  const int group = threadIdx.x / group_threads;
  if (group == 0) {
    device::give_registers<Shape::producer_registers>();
    if (threadIdx.x < 32) {
      find_tokens(p, w);
      Slot slot;
      produce_keys<Shape>(p, w, shared, slot);
      device::allow_successors();
    }
  } else if (group == 1) {
    if constexpr (Shape::output_registers * Shape::threads > 65536) {
      device::take_registers<Shape::output_registers>();
    } else {
      device::give_registers<Shape::output_registers>();
    }
    make_output<Element, Shape, form>(p, w, shared);
  } else {
    device::take_registers<Shape::state_registers>();
    keep_state<Element, Shape, form>(p, w, shared, group - 2);
  }
}

// ---------------------------------------------------------------------------------------------

int value_tile(const VariantQuery& query) {
  const std::int64_t chosen = option_or(query.options, "value_tile", 0);
  if (chosen != 0) return static_cast<int>(chosen);
  if (query.problem.mode == Mode::batch_invariant) return group_columns;
  if (segmented(query)) return group_columns;
  // The width that should finish first: a half's chunk takes about 4/7 of the time of a whole one.
  const std::int64_t tasks = query.capacity.max_sequences * query.problem.v_heads;
  const std::int64_t width = std::max(query.device.multiprocessors, 1);
  return ceil_div(2 * tasks, width) * 4 < ceil_div(tasks, width) * 7 ? group_columns : dim;
}

std::int64_t blocks(const VariantQuery& query) {
  return slots_to_run(query) * query.problem.v_heads * (dim / value_tile(query));
}

Support supports(const VariantQuery& query) { return supports_sm90(query, blocks(query)); }

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  return segmented(query) ? segment_scratch(query) : std::vector<ScratchSpec>{};
}

// f.template operator()<Element, Groups>()
template <class F>
void with_form(const VariantQuery& query, F&& f) {
  const bool bf16 = query.problem.activation == DType::bf16;
  if (value_tile(query) == dim) {
    bf16 ? f.template operator()<__nv_bfloat16, 2>() : f.template operator()<__half, 2>();
  } else {
    bf16 ? f.template operator()<__nv_bfloat16, 1>() : f.template operator()<__half, 1>();
  }
}

template <class Element, int Groups, Form form>
Step launch(const char* name, const RegisterStateParams& params, std::int64_t grid) {
  return programmatic(kernel_step(name, register_state_kernel<Element, Groups, form>, grid_of(grid),
                                  {Config<Groups>::threads}, sizeof(SharedStorage<Config<Groups>>),
                                  params));
}

SegmentPlan segment_plan(const StageCall& call) {
  SegmentPlan plan{};
  plan.slots = call["segment_slots"].as<const segments::Slot>();
  plan.starts = call["segment_starts"].as<const std::int32_t>();
  plan.log2_bounds = call["segment_bounds"].as<const float>();
  plan.marks = call.scratch[0].as<float>();
  plan.capacity =
      static_cast<std::int32_t>(segments::slot_count(call.problem, call.capacity, call.device));
  return plan;
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  RegisterStateParams params{};
  static_cast<Sm90Params&>(params) = sm90_params(call);
  params.g = params.g_cumsum;
  const bool cut = segmented(query) && call.has("segment_slots");
  if (cut) {
    params.segments = segment_plan(call);
    params.waiting = waiting_states(call, call.scratch.back());
  }
  with_form(query, [&]<class Element, int Groups>() {
    const std::int64_t grid = cut ? blocks(query) : sm90_blocks(query, Config<Groups>::tile);
    if (cut) {
      out.push_back(
          params.state.checkpoint_chunks > 0
              ? launch<Element, Groups, Form::segments_checkpoints>("fused_prefill", params, grid)
              : launch<Element, Groups, Form::segments>("fused_prefill", params, grid));
      out.push_back(launch<Element, Groups, Form::repair>("fused_prefill repair", params, grid));
    } else if (Groups == 2 || params.state.checkpoint_chunks > 0) {
      // Two state groups leave too few registers for the plain form.
      out.push_back(launch<Element, Groups, Form::checkpoints>("fused_prefill", params, grid));
    } else if constexpr (Groups == 1) {
      out.push_back(launch<Element, Groups, Form::plain>("fused_prefill", params, grid));
    }
  });
}

}  // namespace

Variant register_state() {
  Variant variant;
  variant.id = "register-state";
  variant.description = "the recurrence transposed, in registers from product to product";
  variant.target = DeviceType::cuda;
  variant.options = {
      {"value_tile", "value columns of a block; 0: by the number of heads", 0, {0, 64, 128}},
      segments_option(),
  };
  variant.supports = supports;
  variant.scratch = scratch;
  variant.working_type = activation_type;
  variant.accepts = accepts_sm90;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::fused_prefill
