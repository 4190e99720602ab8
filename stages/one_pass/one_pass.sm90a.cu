// one_pass, one-pass (sm_90a): from the log decay to o in one walk over the chunks. The recurrence
// of register_state.cuh, with a group more that works ahead of it:
//
//   producers, a warp     k by TMA, prefix sums of g and their factors, into a ring
//   each                  q v by TMA, into another
//                         A to the other block of the head; room for its A
//   solving group         K K^T on WGMMA, gates, the inverse A by blocks (group_tril_inverse.cuh),
//                         into the keys' ring
//   state group           64 value columns of a head: K S -> R -> A R -> V' -> S
//   output group          P, Q S and P V'
//
// Neither the sums nor A go through memory: 16 KiB less a chunk and head, and two launches less.
// The two blocks of a head are a cluster, whose solving groups take turns: each makes every second
// A and sends it to the other.
//
// Where heads are few, a block finds its segment by itself (segments/block_plan.cuh): it looks back
// from the segment's begin, by the gates alone, until the past has faded. What keys that are not
// normalised add to the bound is found by the solving group on the way, from the diagonal of K K^T,
// and enters the check behind, in the second launch, which computes again what does not pass it.
//
// A block: 512 threads; 32, 136, 232 and 112 registers a thread of producers, output, state and
// solving group; 226 KiB of shared memory.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "cuda_variant.hpp"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/prefix.cuh"
#include "device/wgmma.cuh"
#include "fused_prefill/register_state.cuh"
#include "segments/block_plan.cuh"
#include "segments/plan.hpp"

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace gdnflow::stages::one_pass {
namespace {

using namespace fused_prefill;

using Shape = Config<1, true>;
using Shared = SharedStorage<Shape>;

constexpr int warps = Shape::threads / 32;
constexpr int splits = dim / Shape::tile;  // blocks of a cluster
// Each block makes A for every second stage of the ring.
static_assert(splits == 2 && Shape::key_stages % splits == 0);

struct Params : RegisterStateParams {
  const std::int32_t* starts;  // [N+1]: first token of each sequence
  const void* prefix_lens;     // [N], or null
  bool wide_index;
  std::int32_t sequences;  // N
  std::int32_t useful;     // segments that fill the machine
  segments::Slot* slots;   // [NS], for the second launch
  std::int32_t* segment_starts;
  float* log2_bounds;
};

// ---------------------------------------------------------------------------------------------
// Work.

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

struct PlanStorage {
  segments::BlockPlan<Shape::threads>::Storage plan;
  float sums[warps];
};

// This block's segment, by the whole block.
__device__ bool find_segment(const Params& p, PlanStorage& shared, int number, Task& task) {
  using Plan = segments::BlockPlan<Shape::threads>;
  const segments::Sequences sequences{p.chunks.offsets, p.sequences, p.chunks.counts[3], p.useful};
  const segments::Cut cut = Plan::cut(sequences, shared.plan);
  Plan::find_slot(sequences, cut, number, shared.plan);
  const segments::Slot slot = shared.plan.slot;
  const std::int32_t first = shared.plan.first;
  const std::int32_t chunks = shared.plan.chunks;
  const bool speaks = threadIdx.x == 0 && task.first_column == 0;  // for all blocks of the segment
  if (speaks && task.head == 0) p.slots[number] = slot;
  if (slot.sequence < 0) return false;
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
  const segments::Start start = start_of(slot.begin);
  task.entry = std::int64_t{number} * p.heads.v + task.head;
  if (speaks) {
    p.segment_starts[task.entry] = start.chunk;
    p.log2_bounds[task.entry] = start.log2_bound;
  }
  if (start.chunk < 0) return false;
  // Segments behind that have no start of their own are this one's.
  const std::int32_t count = cut.segments(chunks);
  std::int32_t next = slot.number + 1;
  std::int32_t last = slot.end;
  while (next < count && start_of(last).chunk < 0) {
    last = first + segments::Cut::border(chunks, count, ++next);
  }
  task.sequence = slot.sequence;
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

// False: this block has nothing to do.
template <Form form>
__device__ __forceinline__ bool find_task(const Params& p, Shared& shared, Task& task) {
  if constexpr (form == Form::plain || form == Form::checkpoints) {
    static_cast<Work&>(task) = work_of_block<Shape::tile>(p.chunks, p.heads);
    task.first = task.first_chunk;
  } else {
    const unsigned entry = blockIdx.x / splits;
    task.head = static_cast<int>(entry % p.heads.v);
    task.qk_head = p.heads.qk_of(task.head);
    task.first_column = static_cast<int>(blockIdx.x % splits) * Shape::tile;
    const int number = static_cast<int>(entry / p.heads.v);
    if constexpr (form == Form::repair) {
      if (!find_repair(p, number, task)) return false;
    } else {
      // Where copies for the output group lie later.
      if (!find_segment(p, *reinterpret_cast<PlanStorage*>(&shared.copy), number, task)) {
        return false;
      }
      __syncthreads();
    }
  }
  if constexpr (form != Form::plain) {
    if (task.chunks > 0) task.first_number = chunk_of(p, task.sequence, 0).number;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------
// Solving group. Of a sequence's chunks it makes every second A, for both blocks of the cluster;
// the others come from there.

// Sends what the solving group has made to the other block; by a warp.
__device__ void send_inverses(const Task& w, Shared& shared) {
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    if (i % 2 == w.rank()) {
      Barrier& solved = shared.solver.solved[slot.index];
      solved.wait(slot.phase);
      if (threadIdx.x % 32 == 0) {
        device::send(shared.keys[slot.index].a, panel_bytes, solved, 1 - w.rank());
      }
    }
    slot.advance(Shape::key_stages);
  }
}

// Tells the other block when there is room for what it makes; by a warp.
__device__ void make_room(const Task& w, Shared& shared) {
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    if (i % 2 != w.rank()) {
      shared.empty_keys[slot.index].wait(slot.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        shared.solver.solved[slot.index].arrive_expect(panel_bytes);
        device::arrive_in(shared.solver.room[slot.index], 1 - w.rank());
      }
    }
    slot.advance(Shape::key_stages);
  }
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

template <class Element, Form form>
__device__ void solve(const Params& p, const Task& w, Shared& shared) {
  using Inverse = device::GroupTrilInverse;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0U, threadIdx.x % group_threads / 32, 0);  // alike in all lanes
  const int row = lane / 4;         // of a block of N^T: rows row and row + 8
  const int column = lane % 4 * 2;  // columns column, column + 1 and the same + 8
  auto& solver = shared.solver;

  // What lies above the diagonal of A stays zero.
  for (int stage = w.rank(); stage < Shape::key_stages; stage += 2) {
#pragma unroll 1
    for (int i = threadIdx.x % group_threads; i < panel_bytes / 16; i += group_threads) {
      reinterpret_cast<uint4*>(shared.keys[stage].a)[i] = uint4{0, 0, 0, 0};
    }
  }
  device::named_sync(within_solve, group_threads);

  const std::uint32_t block_row = (lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
  float log2_growth = 0.0F;
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    shared.full_keys[slot.index].wait(slot.phase);
    if (i % 2 != w.rank()) {
      shared.empty_keys[slot.index].arrive();
      slot.advance(Shape::key_stages);
      continue;
    }
    // Addresses are made anew in each turn: kept over all of them, they would not fit beside the
    // Gram matrix.
    int opaque_zero = 0;
    asm volatile("" : "+r"(opaque_zero));
    auto& inverse = *reinterpret_cast<Inverse::Storage*>(
        reinterpret_cast<std::byte*>(&solver.inverse) + opaque_zero);
    const Gates& gates = shared.gates[slot.index];
    const float gc_row[2] = {gates.log2_gamma[16 * warp + row],
                             gates.log2_gamma[16 * warp + row + 8]};

    float2 gc_column[rows / 8];
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      gc_column[j] = *reinterpret_cast<const float2*>(&gates.log2_gamma[8 * j + column]);
    }
    float gram[rows / 2];
    const std::uint64_t k =
        device::descriptor_k_major(device::shared_address(shared.keys[slot.index].k));
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps_of_dim; ++step) {
      device::wgmma_step<Element, false, false>(gram, device::descriptor_at(k, dim_offset(step)),
                                                device::descriptor_at(k, dim_offset(step)),
                                                step > 0);
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::hold(gram);

    if constexpr (cuts<form>) {
      if (i < w.lead) log2_growth += log2_growth_of(gram, gates, warp);
    }
    // The Gram matrix is symmetric: this warp's rows of it are its columns of N.
    Inverse::take(inverse, warp, [&](int block) {
      device::Slab<2> n_transposed;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int j = 2 * block + n;
        const float2 beta = *reinterpret_cast<const float2*>(&gates.residual[4 * j + column / 2].z);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* const g = &gram[4 * j + 2 * h];
          n_transposed.x[n][2 * h] =
              -beta.x * device::exp2_approximate(gc_column[j].x - gc_row[h]) * g[0];
          n_transposed.x[n][2 * h + 1] =
              -beta.y * device::exp2_approximate(gc_column[j].y - gc_row[h]) * g[1];
        }
      }
      return n_transposed;
    });
    shared.empty_keys[slot.index].arrive();

    // What was made here before in this place has been sent and read.
    solver.room[slot.index].wait(slot.phase);
    const std::uint32_t a = device::shared_address(shared.keys[slot.index].a) + block_row;
    Inverse::invert<Element>(
        inverse, warp, i / 2 % 2, within_solve, [&](int r, int c, const device::FragmentA& block) {
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           (a ^ (c * 32)) + r * 2048),
                       "r"(block.x[0]), "r"(block.x[1]), "r"(block.x[2]), "r"(block.x[3])
                       : "memory");
        });
    device::fence_async_proxy();
    solver.solved[slot.index].arrive();
    slot.advance(Shape::key_stages);
  }
  if constexpr (cuts<form>) {
    log2_growth = segments::sum_of_warp(log2_growth);
    if (lane == 0 && w.first_column == 0) {
      p.segments.log2_growth[4 * w.entry + warp] = log2_growth;
    }
  }
}

// ---------------------------------------------------------------------------------------------

template <class Element, Form form>
__global__ void __cluster_dims__(splits, 1, 1) __launch_bounds__(Shape::threads, 1)
    one_pass_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    init_rings(shared);
    for (int i = 0; i < Shape::key_stages; ++i) {
      // A is made by every thread of the solving group, or comes in one piece.
      shared.solver.solved[i].init(i % 2 == static_cast<int>(blockIdx.x % splits) ? group_threads
                                                                                  : 1);
      shared.solver.room[i].init(1);
    }
    device::fence_barrier_init();
  }
  device::cluster_sync();
  device::wait_for_predecessors();
  {
    // Through shared memory, so that no role keeps in registers what another needs.
    Task found;
    if (!find_task<form>(p, shared, found)) return;
    if (threadIdx.x == 0) shared.solver.task = found;
  }
  __syncthreads();
  Task w = shared.solver.task;
  if constexpr (form == Form::repair) {
    if (w.waiting_row >= 0) {
      hand_state_on<Shape>(p, w);
      return;
    }
  }
  const int group = threadIdx.x / group_threads;
  if (group == 0) {
    device::give_registers<Shape::producer_registers>();
    if (threadIdx.x < 32) {
      find_tokens(p, w);
      produce_keys<Shape>(p, w, shared);
    } else if (threadIdx.x < 64) {
      find_tokens(p, w);
      produce_queries<Shape>(p, w, shared);
    } else if (threadIdx.x < 96) {
      send_inverses(w, shared);
    } else {
      make_room(w, shared);
    }
  } else if (group == 1) {
    device::take_registers<Shape::output_registers>();
    make_output<Element, Shape, form>(p, w, shared);
  } else if (group == 2) {
    device::take_registers<Shape::state_registers>();
    keep_state<Element, Shape, form>(p, w, shared, 0);
    device::cluster_sync();  // what the other block sent has been read, and the same there
  } else {
    device::give_registers<Shape::solver_registers>();
    solve<Element, form>(p, w, shared);
    device::cluster_sync();
  }
}

// ---------------------------------------------------------------------------------------------

std::int64_t blocks(const VariantQuery& query) {
  return slots_to_run(query) * query.problem.v_heads * splits;
}

Support supports(const VariantQuery& query) { return supports_sm90(query, blocks(query)); }

Support accepts(const StageCall& call) { return accepts_tiles(call, {"q", "k", "v", "o"}); }

// Pieces of the call's scratch, in this order.
enum Piece : int {
  starts,
  chunk_offsets,
  checkpoint_offsets,
  counts,
  plan_slots,
  plan_starts,
  plan_bounds,
  plan_growth,
  marks
};

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  const std::int64_t sequences = sequence_starts_bytes(query.capacity.max_sequences);
  std::vector<ScratchSpec> pieces{{"starts", sequences},
                                  {"chunk_offsets", sequences},
                                  {"checkpoint_offsets", sequences},
                                  {"counts", 4 * sizeof(std::int32_t)}};
  if (!segmented(query)) return pieces;
  const std::int64_t entries = slots_to_run(query) * query.problem.v_heads;
  pieces.push_back(
      {"slots", slots_to_run(query) * static_cast<std::int64_t>(sizeof(segments::Slot))});
  pieces.push_back({"segment_starts", entries * static_cast<std::int64_t>(sizeof(std::int32_t))});
  pieces.push_back({"segment_bounds", entries * static_cast<std::int64_t>(sizeof(float))});
  pieces.push_back({"segment_growth", entries * 4 * static_cast<std::int64_t>(sizeof(float))});
  for (ScratchSpec& piece : segment_scratch(query)) pieces.push_back(std::move(piece));
  return pieces;
}

Params params_of(const StageCall& call, const VariantQuery& query) {
  Params params{};
  static_cast<Sm90Params&>(params) = sm90_tensors(call);
  params.g = device::Scalars<const float>(call["g"]);
  params.starts = call.scratch[starts].as<const std::int32_t>();
  params.chunks.offsets = call.scratch[chunk_offsets].as<const std::int32_t>();
  params.chunks.counts = call.scratch[counts].as<const std::int32_t>();
  params.checkpoint_offsets = call.scratch[checkpoint_offsets].as<const std::int32_t>();
  params.prefix_lens = call["prefix_lens"].data;
  params.wide_index = call.problem.index == DType::i64;
  params.sequences = static_cast<std::int32_t>(call.capacity.max_sequences);
  if (!segmented(query)) return params;
  params.useful = static_cast<std::int32_t>(segments::useful_segments(query.problem, query.device));
  params.slots = call.scratch[plan_slots].as<segments::Slot>();
  params.segment_starts = call.scratch[plan_starts].as<std::int32_t>();
  params.log2_bounds = call.scratch[plan_bounds].as<float>();
  params.segments.slots = params.slots;
  params.segments.starts = params.segment_starts;
  params.segments.log2_bounds = params.log2_bounds;
  params.segments.log2_growth = call.scratch[plan_growth].as<float>();
  params.segments.marks = call.scratch[marks].as<float>();
  params.segments.capacity = static_cast<std::int32_t>(slots_to_run(query));
  params.waiting = waiting_states(call, call.scratch.back());
  return params;
}

template <class Element, Form form>
Step launch(const char* name, const Params& params, std::int64_t grid) {
  Step step = kernel_step(name, one_pass_kernel<Element, form>, grid_of(grid), {Shape::threads},
                          sizeof(Shared), params);
  std::get<KernelLaunch>(step.work).programmatic = true;
  return step;
}

template <class Element>
void launches(const Params& params, const VariantQuery& query, StepList& out) {
  const std::int64_t grid = blocks(query);
  if (segmented(query)) {
    out.push_back(params.state.checkpoint_chunks > 0
                      ? launch<Element, Form::segments_checkpoints>("one_pass", params, grid)
                      : launch<Element, Form::segments>("one_pass", params, grid));
    out.push_back(launch<Element, Form::repair>("one_pass repair", params, grid));
  } else if (params.state.checkpoint_chunks > 0) {
    out.push_back(launch<Element, Form::checkpoints>("one_pass", params, grid));
  } else {
    out.push_back(launch<Element, Form::plain>("one_pass", params, grid));
  }
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  SequenceScan scan = sequence_scan(call);
  scan.prefix_lens = call["prefix_lens"].data;
  scan.starts = call.scratch[starts].as<std::int32_t>();
  scan.chunk_offsets = call.scratch[chunk_offsets].as<std::int32_t>();
  scan.checkpoint_offsets = call.scratch[checkpoint_offsets].as<std::int32_t>();
  scan.chunk_counts = call.scratch[counts].as<std::int32_t>();
  out.push_back(sequence_scan_step(scan));
  const Params params = params_of(call, query);
  if (call.problem.activation == DType::bf16) {
    launches<__nv_bfloat16>(params, query, out);
  } else {
    launches<__half>(params, query, out);
  }
}

}  // namespace

Variant one_pass() {
  Variant variant;
  variant.id = "one-pass";
  variant.description = "sums, inverse and recurrence in one walk, in registers where it can be";
  variant.target = DeviceType::cuda;
  variant.options = {segments_option()};
  variant.supports = supports;
  variant.scratch = scratch;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::one_pass
