// fused_prefill, register-state (sm_90a): everything recurrent is transposed, so that it passes
// from one WGMMA to the next in registers.
//
//   R^T  = beta .* (V^T - gamma .* (S^T K^T))       64 x  64, contracted over d_k      state groups
//   V'^T = R^T A^T                                  64 x  64, contracted over tokens
//   S^T  = gamma_l S^T + (decay .* V'^T) K          64 x 128, contracted over tokens
//   P    = scale tril(exp(gc_i - gc_j) Q K^T)       64 x  64, contracted over d_k      output group
//   O    = scale gamma .* (Q S) + P V'              64 x tile, contracted over d_k, then tokens
//
//   gamma = exp(gc), decay = exp(gc_l - gc), gc_l that of the chunk's last token
//
// The idea over warp-specialized: there S, R, V' and their kin go through shared memory from one
// warp group to the next, and the chain of a chunk has four rendezvous. Transposed, the rows of a
// product are value columns, and each is the left operand of the next product: accumulators,
// rounded and packed in pairs, are the fragments of WGMMA's A operand. A *state group* owns 64
// value columns of a head, has the whole chain in its registers, and waits for no other warp group:
//
//   producer (one warp)   q k v A by TMA, gates, into a ring
//   state group(s)        K S -> R -> A R -> V' -> S; one: half a head a block; two: a whole head
//   output group          P, Q S and P V', untransposed, from copies of S^T and V'^T that the state
//                         groups leave in shared memory on their way; trails behind
//
// A warp's WGMMAs wait in one queue with its accesses to shared memory, so a load issued behind
// them comes when the tensor cores have taken them. What a step needs from shared memory is
// therefore loaded before the WGMMAs in front of it. A chunk of a state group, in order:
//
//   R by steps of 16 tokens, each with its step of A R
//   V'd = decay .* V' by steps, each with its step of the lower half of S += V'd K; the upper half
//   next chunk, when the lower half of S is done: round and copy it, its half of K S; copy V'
//   when the upper half is done: load V and factors, round and copy it, its half of K S; fade S

#include <gdnflow/stage.hpp>

#include "checkpoints.cuh"
#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/half.cuh"
#include "device/matrix_io.cuh"
#include "device/state_io.cuh"
#include "device/tma.cuh"
#include "device/views.cuh"
#include "device/wgmma.cuh"
#include "segments/plan.hpp"
#include "sm90.cuh"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace gdnflow::stages::fused_prefill {
namespace {

using device::Barrier;

constexpr int group_columns = 64;  // value columns of a state group
constexpr int copies = 2;          // of S^T and V'^T in shared memory

// Named barriers; 0 is __syncthreads. Those of copies come in pairs, one a buffer.
enum Meeting : int {
  state_ready = 1,                // state groups -> output: S^T is in shared memory
  value_ready = state_ready + 2,  // the same for V'^T
  state_read = value_ready + 2,   // output -> state groups: may be overwritten
  value_read = state_read + 2,
  within_states = value_read + 2,
  within_output,
};

// Segments, as gdnflow/stages.hpp has them.
struct SegmentPlan {
  const segments::Slot* slots;
  const std::int32_t* starts;
  const float* log2_bounds;
  std::uint32_t* marks;
  std::int32_t capacity;  // slots to look at

  // Where max |S| in front of a chunk of a sequence is recorded, for head 0.
  __device__ __forceinline__ static std::int64_t mark(std::int32_t sequence, std::int32_t first,
                                                      std::int32_t chunk) {
    constexpr auto grain = static_cast<std::int32_t>(segment_grain);
    return std::int64_t{first / grain} + sequence + (chunk - first) / grain;
  }
};

struct Params : Sm90Params {
  SegmentPlan segments;
  // Where final states of cut sequences wait, [U, Hv, 128, 128]: a pool that initial states lie in
  // may be written only when no segment needs them any more. Null: the pools have nothing in
  // common.
  device::StatePool waiting;
};

// What a kernel does besides. Each costs instructions in the loop, so each is a kernel of its own.
enum class Form : int {
  plain,        // sequences in one piece
  checkpoints,  // the same, with checkpoints
  segments,     // segments, with checkpoints where there are any
  repair,       // in one piece those heads of sequences whose segments do not pass the check
};

template <int Groups>
struct Config {
  static constexpr int tile = Groups * group_columns;
  static constexpr int threads = (2 + Groups) * group_threads;
  static constexpr int stages = Groups == 1 ? 3 : 2;                 // of the ring
  static constexpr int load_bytes = (4 + 1 + Groups) * panel_bytes;  // q and k, A, v
  static constexpr int meeting_threads = (1 + Groups) * group_threads;
  // setmaxnreg: at most 512 in sum.
  static constexpr int producer_registers = 24;
  static constexpr int output_registers = Groups == 1 ? 152 : 136;
  static constexpr int state_registers = Groups == 1 ? 240 : 176;
  static constexpr int held_factors = Groups == 1 ? 8 : 2;  // of R, ahead of their use
  static_assert(producer_registers + output_registers + Groups * state_registers <= 512);
};

// Factors by token. A thread of a state group needs those of pairs of tokens, one of the output
// group those of its rows.
struct Gates {
  float4 residual[rows / 2];  // beta gamma of both, beta of both
  float2 decay[rows / 2];
  float log2_gamma[rows], gamma[rows];
  float fade;  // gamma of the last token
  device::Chunk chunk;
};

template <int Groups>
struct alignas(1024) SharedStorage {
  static constexpr int stages = Config<Groups>::stages;
  struct alignas(1024) Stage {
    std::byte q[2 * panel_bytes], k[2 * panel_bytes], a[panel_bytes];
    std::byte v[Groups * panel_bytes];
  };
  Stage stage[stages];
  // S^T and V'^T: rows are value columns, so that both are K-major right operands of the output
  // group.
  struct alignas(1024) Copy {
    std::byte state[2][Groups][panel_bytes];  // by half of d_k
    std::byte value[Groups][panel_bytes];
  };
  Copy copy[copies];
  std::byte output[Groups][panel_bytes];
  Gates gates[stages];
  Barrier full[stages], empty[stages];
};
static_assert(sizeof(SharedStorage<1>) <= shared_limit);
static_assert(sizeof(SharedStorage<2>) <= shared_limit);

// ---------------------------------------------------------------------------------------------
// Work.

struct Task : Work {
  int lead = 0;            // chunks in front of the segment, of which only the state is kept
  bool from_start = true;  // first_chunk is the sequence's first: the initial state is the state
  bool to_end = true;      // the last chunk is the sequence's last: the state is the final state
  std::int32_t first = 0;  // the sequence's first chunk
  std::int32_t first_number = 0;  // of the sequence's first chunk
  std::int64_t waiting_row = -1;  // of the final state, where it has to wait
};

// Whether a segment's start holds: what it cut off is below the resolution of what it has. A NaN
// on either side does not.
__device__ __forceinline__ bool holds(const SegmentPlan& plan, const device::Heads& heads, int head,
                                      int number, std::int32_t first) {
  const std::int64_t entry = std::int64_t{number} * heads.v + head;
  const segments::Slot slot = plan.slots[number];
  const auto most = [&](std::int32_t chunk) {
    return __uint_as_float(
        plan.marks[SegmentPlan::mark(slot.sequence, first, chunk) * heads.v + head]);
  };
  const float before = most(plan.starts[entry]);
  return before * exp2f(plan.log2_bounds[entry]) <=
         exp2f(segments::log2_resolution) * most(slot.begin);
}

// A row for each cut sequence: the slots in front of its last one that are not a sequence's first.
__device__ __forceinline__ std::int64_t waiting_row(int last_slot, const segments::Slot& slot) {
  return last_slot - slot.sequence - 1;
}

// False: this block has nothing to do.
template <int Tile, Form form>
__device__ __forceinline__ bool find_task(const Params& p, Task& task) {
  if constexpr (form == Form::plain || form == Form::checkpoints) {
    static_cast<Work&>(task) = work_of_block<Tile>(p.chunks, p.heads);
  } else {
    constexpr int splits = dim / Tile;
    const SegmentPlan& plan = p.segments;
    const unsigned entry = blockIdx.x / splits;
    task.head = static_cast<int>(entry % p.heads.v);
    int number = static_cast<int>(entry / p.heads.v);
    const segments::Slot slot = plan.slots[number];
    if (slot.sequence < 0) return false;
    task.sequence = slot.sequence;
    task.qk_head = p.heads.qk_of(task.head);
    task.first_column = static_cast<int>(blockIdx.x % splits) * Tile;
    const auto entry_of = [&](int i) { return std::int64_t{i} * p.heads.v + task.head; };
    const auto follows = [&](int i) {
      return i < plan.capacity && plan.slots[i].sequence == slot.sequence;
    };
    const std::int32_t first = p.chunks.offsets[slot.sequence];
    const std::int32_t end = p.chunks.offsets[slot.sequence + 1];
    if constexpr (form == Form::repair) {
      if (slot.number > 0) return false;
      bool passed = true;
      bool cut = false;
      while (follows(++number)) {
        if (plan.starts[entry_of(number)] < 0) continue;
        cut = true;
        passed = passed && holds(plan, p.heads, task.head, number, first);
      }
      if (passed) {
        if (cut && p.waiting.data != nullptr) task.waiting_row = waiting_row(number - 1, slot);
        return task.waiting_row >= 0;
      }
      task.first_chunk = first;
      task.chunks = end - first;
    } else {
      const std::int32_t start = plan.starts[entry_of(number)];
      if (start < 0) return false;
      std::int32_t last = slot.end;
      while (follows(++number) && plan.starts[entry_of(number)] < 0) last = plan.slots[number].end;
      task.first_chunk = start;
      task.chunks = last - start;
      task.lead = slot.begin - start;
      task.from_start = start == first;
      task.to_end = last == end;
      if (task.to_end && !(task.from_start && task.lead == 0) && p.waiting.data != nullptr) {
        task.waiting_row = waiting_row(number - 1, slot);
      }
    }
    task.first = first;
    if (task.chunks > 0) task.first_number = p.chunks.at(first).number;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------
// Producer: one warp. Lane 0 starts the copies; every lane turns two tokens' gates into factors.
// Gates are fetched a chunk ahead, and a sequence's chunks follow one another, so that nothing
// stands between an empty stage and its copies.

template <int Groups>
__device__ void produce(const Params& p, const Work& w, SharedStorage<Groups>& shared) {
  if (w.chunks == 0) return;
  const int lane = threadIdx.x % 32;
  device::Chunk chunk = p.chunks.at(w.first_chunk);
  const device::Chunk final = p.chunks.at(w.first_chunk + w.chunks - 1);
  const int end = final.first_token + final.tokens;
  float gc[2];
  float beta[2];
  const auto fetch = [&](int first_token, int tokens) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Past the end the last token's: finite, and what they multiply has been cleared.
      const std::int64_t token = first_token + min(2 * lane + h, tokens - 1);
      gc[h] = p.g_cumsum.at(token, w.head);
      beta[h] = p.beta.at(token, w.head);
    }
  };
  fetch(chunk.first_token, chunk.tokens);
  Slot slot;
  for (int left = w.chunks; left > 0; --left) {
    auto& stage = shared.stage[slot.index];
    Gates& gates = shared.gates[slot.index];
    Barrier& full = shared.full[slot.index];
    shared.empty[slot.index].wait(slot.phase ^ 1);
    device::poison_freed(stage);
    if (lane == 0) {
      full.arrive_expect(Config<Groups>::load_bytes);
      for (int c = 0; c < 2; ++c) {
        device::load_box(stage.k + c * panel_bytes, p.k, full, 64 * c, w.qk_head,
                         chunk.first_token);
        device::load_box(stage.q + c * panel_bytes, p.q, full, 64 * c, w.qk_head,
                         chunk.first_token);
      }
      for (int c = 0; c < Groups; ++c) {
        device::load_box(stage.v + c * panel_bytes, p.v, full, w.first_column + 64 * c, w.head,
                         chunk.first_token);
      }
      device::load_box(stage.a, p.a, full, 0, w.head, chunk.first_token);
    }
    const int last = chunk.tokens - 1;
    const float gc_last =
        __shfl_sync(~0U, last % 2 == 0 ? gc[0] : gc[1], last / 2) * device::log2_e;
    float log2_gamma[2];
    float gamma[2];
    float decay[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      log2_gamma[h] = gc[h] * device::log2_e;
      gamma[h] = device::exp2_approximate(log2_gamma[h]);
      decay[h] = device::exp2_approximate(gc_last - log2_gamma[h]);
    }
    gates.residual[lane] = {beta[0] * gamma[0], beta[1] * gamma[1], beta[0], beta[1]};
    gates.decay[lane] = {decay[0], decay[1]};
    *reinterpret_cast<float2*>(&gates.gamma[2 * lane]) = {gamma[0], gamma[1]};
    *reinterpret_cast<float2*>(&gates.log2_gamma[2 * lane]) = {log2_gamma[0], log2_gamma[1]};
    if (lane == 0) {
      gates.fade = device::exp2_approximate(gc_last);
      gates.chunk = chunk;
    }
    full.arrive();
    slot.advance(Config<Groups>::stages);
    chunk.first_token += chunk.tokens;
    chunk.tokens = min(rows, end - chunk.first_token);
    ++chunk.number;
    if (left > 1) fetch(chunk.first_token, chunk.tokens);
  }
}

// ---------------------------------------------------------------------------------------------
// State groups.

using Accumulators = float[rows / 2];               // 64 value columns x 64
using State = float[2][rows / 2];                   // S^T: 64 value columns x 64 of d_k, twice
using Fragments = std::uint32_t[steps_of_rows][4];  // 64 value columns x 64 tokens as A operands

// f(x, y, offset) for the state elements that this thread holds, two rows of d_k at a time.
template <class F>
__device__ __forceinline__ void for_each_state_pair(const device::StateMatrix& matrix, int column,
                                                    State& state, F&& f) {
  const int k = threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    std::int64_t offset = matrix.offset + k * matrix.k_stride + (column + 8 * h) * matrix.v_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        f(state[half][4 * j + 2 * h], state[half][4 * j + 2 * h + 1], offset);
        offset += 8 * matrix.k_stride;
        // One offset at a time: all of them at once would not fit beside the state.
        asm volatile("" : "+l"(offset));
      }
    }
  }
}

__device__ __forceinline__ void load_state(const device::StatePorts& ports, const Task& w,
                                           int column, State& state) {
  const std::int64_t row = w.from_start ? ports.initial_row(w.sequence) : -1;
  if (row < 0) {
#pragma unroll
    for (auto& half : state) {
#pragma unroll
      for (float& x : half) x = 0.0F;
    }
    return;
  }
  const device::StateMatrix matrix = ports.initial.matrix(row, w.head);
  for_each_state_pair(matrix, column, state, [&](float& x, float& y, std::int64_t offset) {
    x = device::load_element(matrix.data, matrix.dtype, offset);
    y = device::load_element(matrix.data, matrix.dtype, offset + matrix.k_stride);
  });
}

__device__ __forceinline__ void store_state(const device::StatePool& pool, std::int64_t row,
                                            const Work& w, int column, State& state) {
  if (row < 0) return;
  const device::StateMatrix matrix = pool.matrix(row, w.head);
  for_each_state_pair(matrix, column, state, [&](float& x, float& y, std::int64_t offset) {
    device::store_element(matrix.data, matrix.dtype, offset, x);
    device::store_element(matrix.data, matrix.dtype, offset + matrix.k_stride, y);
  });
}

// Step `step` of d (+)= x y, x in registers, y in shared memory; the fence covers what the warp has
// written to x since the last one.
template <class Element, bool TransposeB>
__device__ __forceinline__ void multiply_step(Accumulators& d, const std::uint32_t (&x)[4],
                                              std::uint64_t y, bool accumulate = true) {
  device::wgmma_fence();
  device::wgmma_step<Element, TransposeB>(d, x, y, accumulate);
}

// Offset of d_k = 16 step in q or k, whose d_k is contiguous.
__device__ constexpr std::uint32_t dim_offset(int step) {
  return step / 4 * panel_bytes + step % 4 * 32;
}

// The accumulators from `x` on, rounded, as the A operand of a step.
template <class Element>
__device__ __forceinline__ void pack_step(std::uint32_t (&to)[4], const float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = device::pack<Element>(x[2 * i], x[2 * i + 1]);
}

// Where a lane reads this warp's 16 columns of a panel of V, for load_values.
__device__ __forceinline__ std::uint32_t value_address_offset() {
  const int lane = threadIdx.x % 32;
  const int token = lane / 16 * 8 + lane % 8;
  const int part = 2 * (threadIdx.x % group_threads / 32) + lane / 8 % 2;
  return token * 128 + ((part ^ token % 8) << 4);
}

// V^T of this warp's 16 columns, in the order of the accumulators.
__device__ __forceinline__ void load_values(Fragments& to, std::uint32_t address) {
#pragma unroll
  for (int step = 0; step < steps_of_rows; ++step) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[step][0]), "=r"(to[step][1]), "=r"(to[step][2]), "=r"(to[step][3])
                 : "r"(address + step * 2048)
                 : "memory");
  }
}

// Where a lane stores fragments in a panel, by step of 16 columns.
using FragmentAddresses = std::uint32_t[4];

// Fragments of 64 rows x 64 columns to the panel that lies `offset` bytes behind `to`.
__device__ __forceinline__ void store_fragments(const std::uint32_t (*x)[4],
                                                const FragmentAddresses& to, std::uint32_t offset) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to[step] + offset),
        "r"(x[step][0]), "r"(x[step][1]), "r"(x[step][2]), "r"(x[step][3])
        : "memory");
  }
}

// R^T of the tokens of a step from V^T, in place, and S^T K^T.
template <class Element>
__device__ __forceinline__ void make_residual(std::uint32_t (&v)[4], const Accumulators& ks,
                                              const float4* factor, int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4& f = factor[i / 2];
    const float2 x = device::unpack<Element>(v[i]);
    v[i] = device::pack<Element>(f.z * x.x - f.x * ks[8 * step + 2 * i],
                                 f.w * x.y - f.y * ks[8 * step + 2 * i + 1]);
  }
}

// V'^T of the tokens of a step, times their factors.
template <class Element>
__device__ __forceinline__ void pack_decayed(std::uint32_t (&to)[4], const Accumulators& values,
                                             const float2* factor, int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2& f = factor[i / 2];
    to[i] =
        device::pack<Element>(f.x * values[8 * step + 2 * i], f.y * values[8 * step + 2 * i + 1]);
  }
}

// Rows `first` and on of a tile of 64-column panels, by `threads` threads.
__device__ __forceinline__ void clear_rows(std::byte* tile, int panels, int first, int thread,
                                           int threads) {
  const int vectors = (rows - first) * 8;
#pragma unroll 1
  for (int i = thread; i < panels * vectors; i += threads) {
    *reinterpret_cast<uint4*>(tile + i / vectors * panel_bytes + first * 128 + i % vectors * 16) =
        uint4{0, 0, 0, 0};
  }
}

template <class Element, int Groups, Form form>
__device__ void keep_state(const Params& p, const Task& w, SharedStorage<Groups>& shared,
                           int group) {
  using Shape = Config<Groups>;
  const int warp = threadIdx.x % group_threads / 32;
  const int column = w.first_column + group * group_columns + warp * 16 + threadIdx.x % 32 / 4;
  // Kept in registers: asking for the thread's number anew costs a chunk more than the registers.
  int quad = threadIdx.x % 4;
  std::uint32_t value_offset = value_address_offset();
  asm volatile("" : "+r"(quad), "+r"(value_offset));
  // In the copies of the current chunk and, later in a turn, of the next: two sets, because a
  // register of a store that waits behind WGMMAs cannot be written before it is through.
  using Copy = typename SharedStorage<Groups>::Copy;
  FragmentAddresses value_copy;
  FragmentAddresses state_copy;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    state_copy[step] = device::block_address(device::shared_address(shared.copy[0].state[0][group]),
                                             0, 16 * step, 0);
  }
  const auto turn_copies = [&](int i) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      value_copy[step] = state_copy[step];
      state_copy[step] += i % copies == 0 ? -static_cast<std::uint32_t>(sizeof(Copy))
                                          : static_cast<std::uint32_t>(sizeof(Copy));
      asm volatile("" : "+r"(value_copy[step]), "+r"(state_copy[step]));
    }
  };
  constexpr std::uint32_t half_offset = Groups * panel_bytes;
  constexpr std::uint32_t value_panel = 2 * half_offset;  // behind the group's panel of S^T

  State state;
  Accumulators ks, values;
  std::uint32_t s[steps_of_dim][4];  // S^T as A operands
  Fragments residual;                // V^T, then R^T
  float4 factor[Shape::held_factors];
  float fade;
  load_state(p.state, w, column, state);

  // What lies past a chunk's end is the neighbour's, whatever it holds: no zero must meet it in a
  // product over tokens. Only the first chunk of a sequence and the last may be short.
  const auto wait_for = [&](const Slot& slot, bool may_be_short) {
    shared.full[slot.index].wait(slot.phase);
    if (!may_be_short) return;
    const int length = shared.gates[slot.index].chunk.tokens;
    if (length == rows) return;
    auto& stage = shared.stage[slot.index];
    const int thread = group * group_threads + threadIdx.x % group_threads;
    clear_rows(stage.k, 2, length, thread, Groups * group_threads);
    clear_rows(stage.v, Groups, length, thread, Groups * group_threads);
    clear_rows(stage.a, 1, length, thread, Groups * group_threads);
    device::fence_async_proxy();
    device::named_sync(within_states, Groups * group_threads);
  };

  // K S over one half of d_k, when the state is done there; the copy of that half in front.
  const auto multiply_keys = [&](std::uint64_t k, int half) {
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; ++step)
      pack_step<Element>(s[step], &state[step / 4][step % 4 * 8]);
    store_fragments(&s[4 * half], state_copy, half * half_offset);
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; ++step) {
      multiply_step<Element, false>(ks, s[step], device::descriptor_at(k, dim_offset(step)),
                                    step > 0);
    }
    device::wgmma_commit();
  };
  const auto load_next = [&](const auto& stage, const Gates& gates) {
    load_values(residual, device::shared_address(stage.v + group * panel_bytes) + value_offset);
#pragma unroll
    for (int j = 0; j < Shape::held_factors; ++j) factor[j] = gates.residual[4 * j + quad];
    fade = gates.fade;
  };
  // Under K S. On return it is done.
  const auto finish_keys = [&](int i) {
#pragma unroll
    for (auto& half : state) {
#pragma unroll
      for (float& x : half) x *= fade;
    }
    device::fence_async_proxy();
    device::named_arrive(state_ready + i % copies, Shape::meeting_threads);
    device::wgmma_wait<0>();
    device::hold(ks);
  };

  // From K S to the update, which is running on return.
  const auto update_state = [&](const auto& stage, const Gates& gates) {
    const std::uint64_t a = device::descriptor_k_major(device::shared_address(stage.a));
    const std::uint64_t k =
        device::descriptor_mn_major(device::shared_address(stage.k), panel_bytes);
    float2 decay[rows / 8];
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) decay[j] = gates.decay[4 * j + quad];
    device::forget(values);
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      const int held = 2 * step % Shape::held_factors;
      make_residual<Element>(residual[step], ks, &factor[held], step);
      if (2 * step + Shape::held_factors < rows / 8) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          factor[held + j] = gates.residual[4 * (2 * step + Shape::held_factors + j) + quad];
        }
      }
      multiply_step<Element, false>(values, residual[step], device::descriptor_at(a, step * 32),
                                    step > 0);
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::hold(values);
    device::hold(state[0]);
    device::hold(state[1]);
    Fragments decayed;
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      pack_decayed<Element>(decayed[step], values, &decay[2 * step], step);
      multiply_step<Element, true>(state[0], decayed[step], device::descriptor_at(k, step * 2048));
    }
    device::wgmma_commit();
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      multiply_step<Element, true>(state[1], decayed[step],
                                   device::descriptor_at(k, panel_bytes + step * 2048));
    }
    device::wgmma_commit();
  };
  // The copy of V'^T.
  const auto copy_values = [&](int i) {
    device::hold(values);
    if (i >= copies) device::named_sync(value_read + i % copies, Shape::meeting_threads);
    Fragments plain;
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      pack_step<Element>(plain[step], &values[8 * step]);
    }
    store_fragments(plain, value_copy, value_panel);
  };
  // Copies are announced well behind their stores: the fence waits for these.
  const auto announce_values = [&](int i) {
    device::fence_async_proxy();
    device::named_arrive(value_ready + i % copies, Shape::meeting_threads);
  };

  // max |S| in front of chunk i, for the check of segments.
  const auto record_state = [&](int i) {
    const std::int32_t chunk = w.first_chunk + i;
    if (i < w.lead || (chunk - w.first) % static_cast<int>(segment_grain) != 0) return;
    std::uint32_t most = 0;  // as bits: a NaN is more than any number
#pragma unroll
    for (const auto& half : state) {
#pragma unroll
      for (const float x : half) most = max(most, __float_as_uint(fabsf(x)));
    }
    const std::uint32_t bits = __reduce_max_sync(~0U, most);
    const std::int64_t mark = SegmentPlan::mark(w.sequence, w.first, chunk);
    if (threadIdx.x % 32 == 0) atomicMax(&p.segments.marks[mark * p.heads.v + w.head], bits);
  };
  // Checkpoint behind chunk i, and what the check of segments needs of the state there.
  const auto look_at_state = [&](const device::Chunk& chunk, int i, std::int32_t first_number) {
    if constexpr (form != Form::plain) {
      if (form == Form::checkpoints || (p.state.checkpoint_chunks > 0 && i >= w.lead)) {
        store_state(p.state.checkpoints,
                    checkpoint_row(p.state, p.checkpoint_offsets, chunk, first_number), w, column,
                    state);
      }
    }
    if constexpr (form == Form::segments) record_state(i + 1);
  };

  if (w.chunks > 0) {
    Slot slot;
    wait_for(slot, true);
    const std::int32_t first_number = form == Form::segments || form == Form::repair
                                          ? w.first_number
                                          : shared.gates[0].chunk.number;
    if constexpr (form == Form::segments) record_state(0);
    const std::uint64_t first_k =
        device::descriptor_k_major(device::shared_address(shared.stage[0].k));
    load_next(shared.stage[0], shared.gates[0]);
    device::forget(ks);
    multiply_keys(first_k, 0);
    multiply_keys(first_k, 1);
    finish_keys(0);

#pragma unroll 1
    for (int i = 1; i < w.chunks; ++i) {
      const Gates& gates = shared.gates[slot.index];
      Slot next = slot;
      next.advance(Config<Groups>::stages);
      wait_for(next, i + 1 == w.chunks);
      turn_copies(i);
      update_state(shared.stage[slot.index], gates);
      if constexpr (Groups == 2) copy_values(i - 1);  // registers are too few to keep V' longer
      const device::Chunk chunk = gates.chunk;
      const auto& stage = shared.stage[next.index];
      const std::uint64_t k = device::descriptor_k_major(device::shared_address(stage.k));
      if (i >= copies) device::named_sync(state_read + i % copies, Shape::meeting_threads);
      device::forget(ks);
      device::wgmma_wait<1>();
      device::hold(state[0]);
      multiply_keys(k, 0);
      if constexpr (Groups == 1) copy_values(i - 1);
      device::wgmma_wait<1>();
      device::hold(state[1]);
      announce_values(i - 1);
      shared.empty[slot.index].arrive();
      load_next(stage, shared.gates[next.index]);
      multiply_keys(k, 1);
      look_at_state(chunk, i - 1, first_number);
      finish_keys(i);
      slot = next;
    }

    turn_copies(w.chunks);
    update_state(shared.stage[slot.index], shared.gates[slot.index]);
    copy_values(w.chunks - 1);
    announce_values(w.chunks - 1);
    device::wgmma_wait<0>();
    device::hold(state[0]);
    device::hold(state[1]);
    look_at_state(shared.gates[slot.index].chunk, w.chunks - 1, first_number);
  }
  if (!w.to_end) return;
  if (w.waiting_row >= 0) {
    store_state(p.waiting, w.waiting_row, w, column, state);
  } else {
    store_state(p.state.final, p.state.final_row(w.sequence), w, column, state);
  }
}

// A final state that has waited, this block's columns of it.
template <int Groups>
__device__ void hand_state_on(const Params& p, const Task& w) {
  const std::int64_t row = p.state.final_row(w.sequence);
  if (row < 0) return;
  const device::StateMatrix from = p.waiting.matrix(w.waiting_row, w.head);
  const device::StateMatrix to = p.state.final.matrix(row, w.head);
  constexpr int columns = Config<Groups>::tile;
  for (int i = static_cast<int>(threadIdx.x); i < dim * columns; i += Config<Groups>::threads) {
    const int v = w.first_column + i % columns;
    to.store(i / columns, v, from.load(i / columns, v));
  }
}

// ---------------------------------------------------------------------------------------------
// Output group: P and O; the store of a chunk runs while the next one is computed.

// scale exp(gc_i - gc_j) of this thread's elements of P, without Q K^T, hence under it.
struct Decays {
  float x[rows / 2];

  float gate[2];        // log2 gamma of this thread's rows
  float2 at[rows / 8];  // and of its columns

  __device__ __forceinline__ void load(const Gates& gates, int row, int column) {
    gate[0] = gates.log2_gamma[row];
    gate[1] = gates.log2_gamma[row + 8];
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      at[j] = *reinterpret_cast<const float2*>(&gates.log2_gamma[8 * j + column]);
    }
  }

  __device__ __forceinline__ void make(float scale, int row, int column) {
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      const int c = 8 * j + column;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row + 8 * h;
        // Above the diagonal the exponent would be positive.
        x[4 * j + 2 * h] = scale * device::exp2_approximate(c <= r ? gate[h] - at[j].x : 0.0F);
        x[4 * j + 2 * h + 1] =
            scale * device::exp2_approximate(c + 1 <= r ? gate[h] - at[j].y : 0.0F);
      }
    }
  }
};

template <class Element, int Groups>
__device__ void make_output(const Params& p, const Task& w, SharedStorage<Groups>& shared) {
  using Shape = Config<Groups>;
  constexpr int count = Shape::tile / 2;  // accumulators a thread
  const int thread = threadIdx.x % group_threads;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    auto& stage = shared.stage[slot.index];
    const Gates& gates = shared.gates[slot.index];
    const int copy = i % copies;
    shared.full[slot.index].wait(slot.phase);
    if (i < w.lead) {
      // Only the state counts here.
      device::named_sync(state_ready + copy, Shape::meeting_threads);
      if (i + copies < w.chunks) device::named_arrive(state_read + copy, Shape::meeting_threads);
      device::named_sync(value_ready + copy, Shape::meeting_threads);
      if (i + copies < w.chunks) device::named_arrive(value_read + copy, Shape::meeting_threads);
      shared.empty[slot.index].arrive();
      slot.advance(Config<Groups>::stages);
      continue;
    }
    const device::Chunk chunk = gates.chunk;

    // Q K^T, then Q S behind it
    float scores[rows / 2];
    float acc[count];
    Decays decays;
    decays.load(gates, row, column);
    const float gamma[2] = {p.scale * gates.gamma[row], p.scale * gates.gamma[row + 8]};
    const std::uint64_t q = device::descriptor_k_major(device::shared_address(stage.q));
    const std::uint64_t k = device::descriptor_k_major(device::shared_address(stage.k));
    const std::uint64_t s =
        device::descriptor_k_major(device::shared_address(shared.copy[copy].state[0][0]));
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps_of_dim; ++step) {
      device::wgmma_step<Element, false, false>(scores, device::descriptor_at(q, dim_offset(step)),
                                                device::descriptor_at(k, dim_offset(step)),
                                                step > 0);
    }
    device::wgmma_commit();
    decays.make(p.scale, row, column);
    device::named_sync(state_ready + copy, Shape::meeting_threads);
#pragma unroll
    for (int step = 0; step < steps_of_dim; ++step) {
      const std::uint32_t offset = step / 4 * Groups * panel_bytes + step % 4 * 32;
      device::wgmma_step<Element, false, false>(acc, device::descriptor_at(q, dim_offset(step)),
                                                device::descriptor_at(s, offset), step > 0);
    }
    device::wgmma_commit();
    device::wgmma_wait<1>();
    device::hold(scores);

    // P, as the A operand of P V'. By selection: what is masked may be anything, a neighbour's NaN
    // included.
    Fragments weights;
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      const int c = 8 * j + column;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row + 8 * h;
        const int e = 4 * j + 2 * h;
        weights[j / 2][j % 2 * 2 + h] =
            device::pack<Element>(c <= r ? decays.x[e] * scores[e] : 0.0F,
                                  c + 1 <= r ? decays.x[e + 1] * scores[e + 1] : 0.0F);
      }
    }
    device::wgmma_wait<0>();
    device::hold(acc);
    if (i + copies < w.chunks) device::named_arrive(state_read + copy, Shape::meeting_threads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
        acc[4 * j + 2 * h] *= gamma[h];
        acc[4 * j + 2 * h + 1] *= gamma[h];
      }
    }

    // P V'
    device::named_sync(value_ready + copy, Shape::meeting_threads);
    const std::uint64_t value =
        device::descriptor_k_major(device::shared_address(shared.copy[copy].value[0]));
    device::hold(acc);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      device::wgmma_step<Element, false>(acc, weights[step],
                                         device::descriptor_at(value, step * 32));
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::hold(acc);
    if (i + copies < w.chunks) device::named_arrive(value_read + copy, Shape::meeting_threads);
    shared.empty[slot.index].arrive();
    slot.advance(Config<Groups>::stages);

    // The thread that started the last store says when its buffer is free.
    if (thread == 0) device::store_wait_read();
    device::named_sync(within_output, group_threads);
    device::store_accumulators<Element>(shared.output[0], acc, 0, panel_bytes);
    device::fence_async_proxy();
    device::named_sync(within_output, group_threads);
    store_output_tile<Element, Groups>(p.o, p.o_rows, w, shared.output[0], chunk.first_token,
                                       chunk.tokens);
  }
  if (thread == 0) device::store_wait();
}

// ---------------------------------------------------------------------------------------------

template <class Element, int Groups, Form form>
__global__ void __launch_bounds__(Config<Groups>::threads, 1)
    register_state_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Groups>*>(raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config<Groups>::stages; ++s) {
      shared.full[s].init(1 + 32);  // the announced bytes, and the producer's lanes
      shared.empty[s].init((Groups + 1) *
                           group_threads);  // every thread: racecheck follows no less
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  device::wait_for_predecessors();
  Task w;
  if (!find_task<Config<Groups>::tile, form>(p, w)) return;
  if constexpr (form == Form::repair) {
    if (w.waiting_row >= 0) {
      hand_state_on<Groups>(p, w);
      return;
    }
  }
  const int group = threadIdx.x / group_threads;
  if (group == 0) {
    device::give_registers<Config<Groups>::producer_registers>();
    if (threadIdx.x < 32) produce<Groups>(p, w, shared);
  } else if (group == 1) {
    if constexpr (Config<Groups>::output_registers * Config<Groups>::threads > 65536) {
      device::take_registers<Config<Groups>::output_registers>();
    } else {
      device::give_registers<Config<Groups>::output_registers>();
    }
    make_output<Element, Groups>(p, w, shared);
  } else {
    device::take_registers<Config<Groups>::state_registers>();
    keep_state<Element, Groups, form>(p, w, shared, group - 2);
  }
}

// ---------------------------------------------------------------------------------------------

// Whether sequences are cut: where halves of the heads leave room for two segments of each.
bool segmented(const VariantQuery& query) {
  return option_or(query.options, "segments", 1) != 0 &&
         segments::useful_segments(query.problem, query.device) > 1;
}

int value_tile(const VariantQuery& query) {
  const std::int64_t chosen = option_or(query.options, "value_tile", 0);
  if (chosen != 0) return static_cast<int>(chosen);
  if (segmented(query)) return group_columns;
  // The width that should finish first: a half's chunk takes about 4/7 of the time of a whole one.
  const std::int64_t tasks = query.capacity.max_sequences * query.problem.v_heads;
  const std::int64_t width = std::max(query.device.multiprocessors, 1);
  return ceil_div(2 * tasks, width) * 4 < ceil_div(tasks, width) * 7 ? group_columns : dim;
}

std::int64_t blocks(const VariantQuery& query) {
  const int tile = value_tile(query);
  if (!segmented(query)) return sm90_blocks(query, tile);
  return segments::slot_count(query.problem, query.capacity, query.device) * query.problem.v_heads *
         (dim / tile);
}

Support supports(const VariantQuery& query) { return supports_sm90(query, blocks(query)); }

constexpr std::int64_t state_bytes = std::int64_t{dim} * dim * static_cast<int>(sizeof(float));

// Final states of cut sequences, of which there are at most as many as there are cuts.
std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  const Problem& problem = query.problem;
  if (!segmented(query) || !problem.initial_state || !problem.final_state) return {};
  return {{"waiting",
           segments::useful_segments(problem, query.device) * problem.v_heads * state_bytes}};
}

// Whether the memory of two tensors has anything in common.
bool may_share(const TensorView& a, const TensorView& b) {
  const auto span = [](const TensorView& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) {
      if (view.extents[i] == 0) return std::pair<const char*, const char*>{};
      last += (view.extents[i] - 1) * std::max<std::int64_t>(view.strides[i], 0);
    }
    const auto* begin = static_cast<const char*>(view.data);
    return std::pair{begin, begin + (last + 1) * size_of(view.dtype)};
  };
  const auto [a_begin, a_end] = span(a);
  const auto [b_begin, b_end] = span(b);
  return a_begin < b_end && b_begin < a_end;
}

// Final states wait in the call's scratch where they may not be stored at once.
device::StatePool waiting_states(const StageCall& call) {
  device::StatePool pool;
  if (!call.has("initial_state") || !call.has("final_state")) return pool;
  if (!may_share(call["initial_state"], call["final_state"])) return pool;
  const TensorView& scratch = call.scratch.back();
  pool.data = scratch.data;
  pool.head_stride = std::int64_t{dim} * dim;
  pool.pool_stride = pool.head_stride * call.problem.v_heads;
  pool.row_stride = dim;
  pool.rows = scratch.extents[0] / (pool.pool_stride * static_cast<int>(sizeof(float)));
  return pool;
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
Step launch(const char* name, const Params& params, std::int64_t grid) {
  Step step = kernel_step(name, register_state_kernel<Element, Groups, form>, grid_of(grid),
                          {Config<Groups>::threads}, sizeof(SharedStorage<Groups>), params);
  std::get<KernelLaunch>(step.work).programmatic = true;
  return step;
}

SegmentPlan segment_plan(const StageCall& call) {
  SegmentPlan plan{};
  plan.slots = call["segment_slots"].as<const segments::Slot>();
  plan.starts = call["segment_starts"].as<const std::int32_t>();
  plan.log2_bounds = call["segment_bounds"].as<const float>();
  plan.marks = call["segment_marks"].as<std::uint32_t>();
  plan.capacity =
      static_cast<std::int32_t>(segments::slot_count(call.problem, call.capacity, call.device));
  return plan;
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  Params params{sm90_params(call), {}, {}};
  const bool cut = segmented(query) && call.has("segment_slots");
  if (cut) {
    params.segments = segment_plan(call);
    params.waiting = waiting_states(call);
  }
  with_form(query, [&]<class Element, int Groups>() {
    const std::int64_t grid = cut ? blocks(query) : sm90_blocks(query, Config<Groups>::tile);
    if (cut) {
      out.push_back(launch<Element, Groups, Form::segments>("fused_prefill", params, grid));
      out.push_back(launch<Element, Groups, Form::repair>("fused_prefill repair", params, grid));
    } else if (params.state.checkpoint_chunks > 0) {
      out.push_back(launch<Element, Groups, Form::checkpoints>("fused_prefill", params, grid));
    } else {
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
      {"segments",
       "1: few heads' sequences are cut where their past has faded, 0: never",
       1,
       {0, 1}},
  };
  variant.supports = supports;
  variant.scratch = scratch;
  variant.working_type = activation_type;
  variant.accepts = accepts_sm90;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::fused_prefill
