// one_pass, one-pass with value_tile=64 (sm_90a): from the log decay to o in one walk over the
// chunks, half a head a block. The recurrence of register_state.cuh, with a group more that works
// ahead of it:
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
// A block: 512 threads; 32, 136, 232 and 112 registers a thread of producers, output, state and
// solving group; 226 KiB of shared memory.

#include <gdnflow/stage.hpp>

#include "cuda_variant.hpp"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/wgmma.cuh"
#include "fused_prefill/register_state.cuh"
#include "one_pass/one_pass.cuh"
#include "one_pass/walks.hpp"
#include "segments/block_plan.cuh"

#include <cstdint>

namespace gdnflow::stages::one_pass {
namespace {

using Shape = Config<1, true>;
using Shared = SharedStorage<Shape>;

// ---------------------------------------------------------------------------------------------
// Work. Where heads are few, the launch in front cuts the sequences (plan.cu), and each block looks
// back from its segment's begin, by the gates alone, until the past has faded. What keys that are
// not normalised add to the bound is found on the way, from the diagonal of K K^T, and enters the
// check of a launch behind, which computes again what does not pass it.

template <class Shape>
struct PlanStorage {
  float sums[Shape::threads / 32];
};

// This block's segment, by the whole block.
template <class Shape>
__device__ bool find_segment(const HalfParams& p, PlanStorage<Shape>& shared, int number,
                             Task& task) {
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
  const segments::Cuts cuts{{*p.longest_segment}, p.segments_alone};
  const std::int32_t count = cuts.segments(chunks);
  task.sequence = slot.sequence;
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
__device__ __forceinline__ bool find_task(const HalfParams& p, PlanStorage<Shape>& shared,
                                          Task& task) {
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

constexpr int splits = dim / Shape::tile;  // blocks of a cluster
// Each block makes A for every second stage of the ring.
static_assert(splits == 2 && Shape::key_stages % splits == 0);
static_assert(sizeof(PlanStorage<Shape>) <= sizeof(Shared::copy));

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

template <class Element, Form form>
__device__ void solve(const HalfParams& p, const Task& w, Shared& shared) {
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
    half_head_kernel(const __grid_constant__ HalfParams p) {
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
    // Where copies for the output group lie later.
    auto& plan = *reinterpret_cast<PlanStorage<Shape>*>(&shared.copy);
    if (!find_task<Shape, form>(p, plan, found)) return;
    if (threadIdx.x == 0) shared.solver.task = found;
  }
  __syncthreads();
  Task w = shared.solver.task;
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

}  // namespace

void half_head(const HalfParams& params, const Problem& problem, bool cut, std::int64_t slots,
               StepList& out) {
  const std::int64_t grid = slots * problem.v_heads * splits;
  const auto add = [&]<class Element, Form form>(const char* name) {
    out.push_back(programmatic(kernel_step(name, half_head_kernel<Element, form>, grid_of(grid),
                                           {Shape::threads}, sizeof(Shared), params)));
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
    add.template operator()<Element, Form::repair>("one_pass repair");
  };
  problem.activation == DType::bf16 ? add_all.template operator()<__nv_bfloat16>()
                                    : add_all.template operator()<__half>();
}

}  // namespace gdnflow::stages::one_pass
