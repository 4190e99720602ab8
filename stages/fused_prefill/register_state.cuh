#pragma once

// The recurrence with everything transposed, so that it passes from one WGMMA to the next in
// registers (sm_90a): state and output groups of the kernels that walk chunks this way.
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
#include "device/gates.cuh"
#include "device/group_tril_inverse.cuh"
#include "device/half.cuh"
#include "device/matrix_io.cuh"
#include "device/state_io.cuh"
#include "device/tma.cuh"
#include "device/views.cuh"
#include "device/wgmma.cuh"
#include "fused_prefill/sm90.cuh"
#include "segments/plan.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace gdnflow::stages::fused_prefill {

using device::Barrier;

inline constexpr int group_columns = 64;  // value columns of a state group
inline constexpr int copies = 2;          // of S^T and V'^T in shared memory

// Named barriers; 0 is __syncthreads. Those of copies come in pairs, one a buffer.
enum Meeting : int {
  state_ready = 1,                // state groups -> output: S^T is in shared memory
  value_ready = state_ready + 2,  // the same for V'^T
  state_read = value_ready + 2,   // output -> state groups: may be overwritten
  value_read = state_read + 2,
  within_output = value_read + 2,
  within_solve,
};

// Segments, as gdnflow/stages.hpp has them.
struct SegmentPlan {
  const segments::Slot* slots;
  const std::int32_t* starts;
  const float* log2_bounds;
  float* log2_growth;     // [NS, Hv, 4]: what keys add to bounds of gates alone; or null
  float* marks;           // [NM, Hv, 8]: max |S| over each 16 value columns
  std::int32_t capacity;  // slots to look at

  static constexpr int parts = dim / 16;  // of a mark, one a warp
  // Number of the mark for max |S| in front of a chunk of a sequence whose first chunk is `first`.
  __device__ __forceinline__ static std::int64_t mark(std::int32_t sequence, std::int32_t first,
                                                      std::int32_t chunk) {
    constexpr auto grain = static_cast<std::int32_t>(segment_grain);
    return std::int64_t{first / grain} + sequence + (chunk - first) / grain;
  }
};

struct RegisterStateParams : Sm90Params {
  device::Scalars<const float> g;  // [T, Hv]: sums over chunks, or terms where the block solves
  SegmentPlan segments;
  // Where final states of cut sequences wait, [U, Hv, 128, 128]: a pool that initial states lie in
  // may be written only when no segment needs them any more. Null: the pools have nothing in
  // common.
  device::StatePool waiting;
};

// What a kernel does besides. Each costs instructions in the loop, which have to stay in the caches
// with those of the other roles, so each is a kernel of its own.
enum class Form : int {
  plain,                 // sequences in one piece
  checkpoints,           // the same, with checkpoints
  segments,              // segments
  segments_checkpoints,  // the same, with checkpoints
  repair,  // in one piece those heads of sequences whose segments do not pass the check
};
template <Form form>
inline constexpr bool cuts = form == Form::segments || form == Form::segments_checkpoints;
template <Form form>
inline constexpr bool stores_checkpoints = form != Form::plain&& form != Form::segments;

// A block's shape: `Groups` state groups, each with 64 value columns of a head; where it solves, A
// is not read but made, by a group of its own.
template <int Groups, bool Solves = false>
struct Config {
  static_assert(!Solves || Groups == 1, "there are registers for four groups");
  static constexpr int groups = Groups;
  static constexpr bool solves = Solves;
  static constexpr bool uses_blocks = false;
  static constexpr int tile = Groups * group_columns;
  static constexpr int threads = (2 + Groups + (Solves ? 1 : 0)) * group_threads;
  // Two rings: k, A and gates, which come further ahead where A has to be made, and q and v.
  static constexpr int key_stages = Solves ? 4 : Groups == 1 ? 3 : 2;
  static constexpr int query_stages = Solves || Groups == 2 ? 2 : 3;
  static constexpr bool one_ring = key_stages == query_stages;  // then they go together
  static constexpr int panel_stride = panel_bytes;              // of q's two panels, and k's
  static constexpr int query_bytes = (2 + Groups) * panel_bytes;
  static constexpr int key_bytes =
      (2 + (Solves ? 0 : 1)) * panel_bytes + (one_ring ? query_bytes : 0);
  static constexpr int meeting_threads = (1 + Groups) * group_threads;
  // setmaxnreg: at most 512 in sum.
  static constexpr int producer_registers = Groups == 2 ? 24 : Solves ? 32 : 40;
  static constexpr int output_registers = Solves || Groups == 2 ? 136 : 152;
  static constexpr int state_registers = Groups == 2 ? 176 : Solves ? 232 : 240;
  static constexpr int held_factors = Groups == 1 ? 8 : 2;  // of R, ahead of their use
  static constexpr int solver_registers = Solves ? 112 : 0;
  static_assert(producer_registers + output_registers + Groups * state_registers +
                    solver_registers <=
                512);
};

// Factors by token. A thread of a state group needs those of pairs of tokens, one of a group that
// makes P or O those of its rows.
struct Gates {
  float4 residual[rows / 2];  // beta gamma of both, beta of both
  float2 decay[rows / 2];
  float log2_gamma[rows];
  float query[rows];  // scale gamma
  float fade;         // gamma of the last token
  int first_token, tokens;
};

// What a block works on.
struct Task : Work {
  int lead = 0;            // chunks in front of the segment, of which only the state is kept
  bool from_start = true;  // first_chunk is the sequence's first: the initial state is the state
  bool to_end = true;      // the last chunk is the sequence's last: the state is the final state
  std::int32_t first = 0;  // the sequence's first chunk
  std::int32_t first_number = 0;  // its number, for checkpoints
  std::int64_t waiting_row = -1;  // of the final state, where it has to wait
  std::int64_t entry = 0;         // the segment's and head's, in tensors [NS, Hv]
  device::Chunk chunk;            // the first one
  int end_token = 0;              // behind the last one

  // This block's number among a head's, each with a group's value columns: that in their cluster.
  __device__ __forceinline__ int rank() const { return first_column / group_columns; }
};

// What a group that makes A needs.
template <int Stages>
struct Solver {
  device::GroupTrilInverse::Storage inverse;
  Barrier solved[Stages];  // A is there
  Barrier room[Stages];    // and may be sent to the other block of the cluster
  Task task;               // as the whole block has found it
};
struct NoSolver {};

template <class Shape>
struct alignas(1024) SharedStorage {
  static constexpr int groups = Shape::groups;
  struct alignas(1024) Keys {
    std::byte k[2 * panel_bytes], a[panel_bytes];
  };
  struct alignas(1024) Queries {
    std::byte q[2 * panel_bytes], v[groups * panel_bytes];
  };
  Keys keys[Shape::key_stages];
  Queries queries[Shape::query_stages];
  // S^T and V'^T: rows are value columns, so that both are K-major right operands of the output
  // group.
  struct alignas(1024) Copy {
    std::byte state[2][groups][panel_bytes];  // by half of d_k
    std::byte value[groups][panel_bytes];
  };
  Copy copy[copies];
  std::byte output[groups][panel_bytes];
  Gates gates[Shape::key_stages];
  Barrier full_keys[Shape::key_stages], empty_keys[Shape::key_stages];
  Barrier full_queries[Shape::query_stages], empty_queries[Shape::query_stages];
  Barrier loaded_keys,
      loaded_values;  // of short chunks, before what lies past their end is cleared
  [[no_unique_address]] std::conditional_t<Shape::solves, Solver<Shape::key_stages>, NoSolver>
      solver;
};
static_assert(sizeof(SharedStorage<Config<1>>) <= shared_limit);
static_assert(sizeof(SharedStorage<Config<2>>) <= shared_limit);
static_assert(sizeof(SharedStorage<Config<1, true>>) <= shared_limit);

// The stage of q and v for chunk i of a block, `keys` that of its keys. Nothing more to keep in
// registers: either the rings are alike, or a division by two says it.
template <class Shape>
__device__ __forceinline__ Slot query_slot_of(int i, const Slot& keys) {
  if constexpr (Shape::one_ring) return keys;
  return {i % Shape::query_stages, static_cast<std::uint32_t>(i / Shape::query_stages % 2)};
}

// By one thread, before a barrier of the block. Every thread of the groups that read arrives:
// racecheck follows no less.
template <class Shape>
__device__ __forceinline__ void init_rings(SharedStorage<Shape>& shared) {
  constexpr int readers = (Shape::groups + 1) * group_threads;
  for (int i = 0; i < Shape::key_stages; ++i) {
    shared.full_keys[i].init(1 + 32);  // the announced bytes, and every lane of the producer
    shared.empty_keys[i].init(readers + (Shape::solves ? group_threads : 0));
  }
  for (int i = 0; i < Shape::query_stages; ++i) {
    shared.full_queries[i].init(1 + 32);
    shared.empty_queries[i].init(readers);
  }
  shared.loaded_keys.init(1);
  shared.loaded_values.init(1);
}

// ---------------------------------------------------------------------------------------------
// Work.

// Whether a segment's start holds: what it cut off is below the resolution of what it has. A NaN
// on either side does not.
__device__ __forceinline__ bool holds(const SegmentPlan& plan, const device::Heads& heads, int head,
                                      int number, std::int32_t first) {
  const std::int64_t entry = std::int64_t{number} * heads.v + head;
  const segments::Slot slot = plan.slots[number];
  const auto most = [&](std::int32_t chunk) {
    const float* const parts =
        plan.marks + (SegmentPlan::mark(slot.sequence, first, chunk) * heads.v + head) *
                         std::int64_t{SegmentPlan::parts};
    std::uint32_t most = 0;  // as bits: a NaN is more than any number
#pragma unroll
    for (int i = 0; i < SegmentPlan::parts; ++i) most = max(most, __float_as_uint(parts[i]));
    return __uint_as_float(most);
  };
  const float before = most(plan.starts[entry]);
  float log2_bound = plan.log2_bounds[entry];
  if (plan.log2_growth != nullptr) {
    for (int i = 0; i < 4; ++i) log2_bound += plan.log2_growth[4 * entry + i];
  }
  return before * exp2f(log2_bound) <= exp2f(segments::log2_resolution) * most(slot.begin);
}

// A row for each cut sequence: the slots in front of its last one that are not a sequence's first.
__device__ __forceinline__ std::int64_t waiting_row(int last_slot, const segments::Slot& slot) {
  return last_slot - slot.sequence - 1;
}

// Whether slot `number` belongs to the same sequence as `slot`.
__device__ __forceinline__ bool follows(const SegmentPlan& plan, const segments::Slot& slot,
                                        int number) {
  return number < plan.capacity && plan.slots[number].sequence == slot.sequence;
}

// What a block of slot `number` has to do behind the segments of a head: one of all blocks of a
// sequence the whole of it where they do not pass the check, or to hand a final state on. False:
// nothing.
__device__ __forceinline__ bool find_repair(const RegisterStateParams& p, int number, Task& task) {
  const SegmentPlan& plan = p.segments;
  const segments::Slot slot = plan.slots[number];
  if (slot.sequence < 0 || slot.number > 0) return false;
  int count = 1;
  while (follows(plan, slot, number + count)) ++count;
  task.sequence = slot.sequence;
  task.first = p.chunks.offsets[slot.sequence];
  bool passed = true;
  bool cut = false;
  for (int i = number + 1; i < number + count; ++i) {
    if (plan.starts[std::int64_t{i} * p.heads.v + task.head] < 0) continue;
    cut = true;
    passed = passed && holds(plan, p.heads, task.head, i, task.first);
  }
  if (passed) {
    if (cut && p.waiting.data != nullptr) task.waiting_row = waiting_row(number + count - 1, slot);
    return task.waiting_row >= 0;
  }
  task.first_chunk = task.first;
  task.chunks = p.chunks.offsets[slot.sequence + 1] - task.first;
  return true;
}

// ---------------------------------------------------------------------------------------------
// Producers, a warp each: of k, A and gates, and of q and v. Of the first, lane 0 starts the copies
// and every lane turns two tokens' gates into factors. What lies past a chunk's end is the
// neighbour's, whatever it holds: no zero must meet it in a product over tokens, so it is cleared
// before the chunk is handed on. Only a sequence's first chunk and its last may be short. Gates are
// fetched a chunk ahead, and a sequence's chunks follow one another, so that nothing stands between
// an empty stage and its copies.

// Rows `first` and on of a tile of 64-column panels, `stride` bytes apart, by `threads` threads.
__device__ __forceinline__ void clear_rows(std::byte* tile, int panels, int first, int thread,
                                           int threads, int stride = panel_bytes) {
  const int vectors = (rows - first) * 8;
#pragma unroll 1
  for (int i = thread; i < panels * vectors; i += threads) {
    *reinterpret_cast<uint4*>(tile + i / vectors * stride + first * 128 + i % vectors * 16) =
        uint4{0, 0, 0, 0};
  }
}

// From the log decays of a lane's two tokens of a chunk to their sums from the chunk's start; past
// token `last` the last one's.
__device__ __forceinline__ void sum_over_chunk(float (&g)[2], int last) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) g[h] = 2 * lane + h <= last ? device::clamp_log_decay(g[h]) : 0.0F;
  float sum = g[0] + g[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(~0U, sum, step);
    if (lane >= step) sum += before;
  }
  const float before = __shfl_up_sync(~0U, sum, 1);
  g[0] += lane > 0 ? before : 0.0F;
  g[1] = sum;
}

template <class Shape, class Queries>
__device__ __forceinline__ void load_queries(const RegisterStateParams& p, const Task& w,
                                             Queries& queries, Barrier& loaded, int token) {
  for (int c = 0; c < Shape::groups; ++c) {
    device::load_box(queries.v + c * panel_bytes, p.v, loaded, w.first_column + 64 * c, w.head,
                     token);
  }
  for (int c = 0; c < 2; ++c) {
    device::load_box(queries.q + c * Shape::panel_stride, p.q, loaded, 64 * c, w.qk_head, token);
  }
}

// A stage of q and v, which may lie beside k.
template <class Shared>
__device__ __forceinline__ auto& queries_at(Shared& shared, int stage) {
  if constexpr (requires { shared.queries; }) {
    return shared.queries[stage];
  } else {
    return shared.keys[stage];
  }
}

template <class Shape, class Shared>
__device__ void produce_keys(const RegisterStateParams& p, const Task& w, Shared& shared,
                             Slot& slot) {
  if (w.chunks == 0) return;
  const int lane = threadIdx.x % 32;
  int first = w.chunk.first_token;
  int tokens = w.chunk.tokens;
  float g[2];  // of a chunk's prefix sums, or its terms where the block solves
  float beta[2];
  const auto fetch = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Past the end the last token's: finite, and what they multiply has been cleared.
      const std::int64_t token = first + min(2 * lane + h, tokens - 1);
      g[h] = p.g.at(token, w.head);
      beta[h] = p.beta.at(token, w.head);
    }
  };
  fetch();
  for (;;) {
    auto& keys = shared.keys[slot.index];
    Gates& gates = shared.gates[slot.index];
    Barrier& full = shared.full_keys[slot.index];
    shared.empty_keys[slot.index].wait(slot.phase ^ 1);
    // A that is made here lies on zeros that stay.
    if constexpr (Shape::solves) {
      device::poison_freed(keys.k);
    } else {
      device::poison_freed(keys);
    }
    if constexpr (Shape::one_ring) device::poison_freed(queries_at(shared, slot.index));
    if (lane == 0) {
      Barrier& loaded = tokens == rows ? full : shared.loaded_keys;
      loaded.arrive_expect(Shape::key_bytes);
      for (int c = 0; c < 2; ++c) {
        device::load_box(keys.k + c * Shape::panel_stride, p.k, loaded, 64 * c, w.qk_head, first);
      }
      if constexpr (!Shape::solves) device::load_box(keys.a, p.a, loaded, 0, w.head, first);
      if constexpr (Shape::one_ring) {
        load_queries<Shape>(p, w, queries_at(shared, slot.index), loaded, first);
      }
    }
    const int last = tokens - 1;
    if constexpr (Shape::solves) {
      sum_over_chunk(g, last);
#pragma unroll
      for (int h = 0; h < 2; ++h) beta[h] = 2 * lane + h <= last ? beta[h] : 0.0F;
    }
    const float gc_last = __shfl_sync(~0U, last % 2 == 0 ? g[0] : g[1], last / 2) * device::log2_e;
    const float log2_gamma[2] = {g[0] * device::log2_e, g[1] * device::log2_e};
    const float2 gamma = {device::exp2_approximate(log2_gamma[0]),
                          device::exp2_approximate(log2_gamma[1])};
    const float2 decay = {device::exp2_approximate(gc_last - log2_gamma[0]),
                          device::exp2_approximate(gc_last - log2_gamma[1])};
    gates.residual[lane] = {beta[0] * gamma.x, beta[1] * gamma.y, beta[0], beta[1]};
    gates.decay[lane] = decay;
    *reinterpret_cast<float2*>(&gates.query[2 * lane]) = {p.scale * gamma.x, p.scale * gamma.y};
    *reinterpret_cast<float2*>(&gates.log2_gamma[2 * lane]) = {log2_gamma[0], log2_gamma[1]};
    if constexpr (Shape::uses_blocks) {
      const float end = __shfl_sync(~0U, log2_gamma[1], lane | 7);
      *reinterpret_cast<float2*>(&shared.to_block_end[slot.index][2 * lane]) = {
          device::exp2_approximate(end - log2_gamma[0]),
          device::exp2_approximate(end - log2_gamma[1])};
    }
    if (lane == 0) {
      gates.fade = device::exp2_approximate(gc_last);
      gates.first_token = first;
      gates.tokens = tokens;
    }
    if (tokens < rows) {
      shared.loaded_keys.wait_and_reset();
      clear_rows(keys.k, 2, tokens, lane, 32, Shape::panel_stride);
      if constexpr (!Shape::solves) clear_rows(keys.a, 1, tokens, lane, 32);
      if constexpr (Shape::one_ring) {
        clear_rows(queries_at(shared, slot.index).v, Shape::groups, tokens, lane, 32);
      }
      device::fence_async_proxy();
      if (lane == 0) full.arrive();
    }
    full.arrive();
    slot.advance(Shape::key_stages);
    first += tokens;
    if (first >= w.end_token) return;
    tokens = min(rows, w.end_token - first);
    fetch();
  }
}

template <class Shape>
__device__ void produce_queries(const RegisterStateParams& p, const Task& w,
                                SharedStorage<Shape>& shared) {
  int token = w.chunk.first_token;
  int tokens = w.chunk.tokens;
  Slot slot;
  for (int left = w.chunks; left > 0; --left) {
    auto& queries = shared.queries[slot.index];
    Barrier& full = shared.full_queries[slot.index];
    shared.empty_queries[slot.index].wait(slot.phase ^ 1);
    device::poison_freed(queries);
    Barrier& loaded = tokens == rows ? full : shared.loaded_values;
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      loaded.arrive_expect(Shape::query_bytes);
      load_queries<Shape>(p, w, queries, loaded, token);
      if constexpr (Shape::solves) {
        // The solving group waits for keys: the next to be loaded shall come from L2, for both
        // blocks of the cluster. Past the tensor's end nothing happens.
        constexpr int ahead = Shape::key_stages - Shape::query_stages + 1;
        device::prefetch_box(p.k, 64 * w.rank(), w.qk_head, token + ahead * rows);
      }
    }
    if (tokens < rows) {
      shared.loaded_values.wait_and_reset();
      clear_rows(queries.v, Shape::groups, tokens, lane, 32);
      device::fence_async_proxy();
      if (lane == 0) full.arrive();
    }
    full.arrive();
    slot.advance(Shape::query_stages);
    token += tokens;
    tokens = min(rows, w.end_token - token);
  }
}

// ---------------------------------------------------------------------------------------------
// State groups.

using Accumulators = float[rows / 2];               // 64 value columns x 64
using State = float[2][rows / 2];                   // S^T: 64 value columns x 64 of d_k, twice
using Fragments = std::uint32_t[steps_of_rows][4];  // 64 value columns x 64 tokens as A operands

// f(x, y, offset) for the state elements that a thread holds, two rows of d_k at a time; from row k
// and column `column` on.
template <class F>
__device__ __forceinline__ void for_each_state_pair(const device::StateMatrix& matrix, int k,
                                                    int column, State& state, F&& f) {
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
  for_each_state_pair(
      matrix, threadIdx.x % 4 * 2, column, state, [&](float& x, float& y, std::int64_t offset) {
        x = device::load_element(matrix.data, matrix.dtype, offset);
        y = device::load_element(matrix.data, matrix.dtype, offset + matrix.k_stride);
      });
}

__device__ __forceinline__ void store_state(const device::StatePool& pool, std::int64_t row,
                                            const Work& w, int column, State& state) {
  if (row < 0) return;
  const device::StateMatrix matrix = pool.matrix(row, w.head);
  for_each_state_pair(
      matrix, threadIdx.x % 4 * 2, column, state, [&](float& x, float& y, std::int64_t offset) {
        device::store_element(matrix.data, matrix.dtype, offset, x);
        device::store_element(matrix.data, matrix.dtype, offset + matrix.k_stride, y);
      });
}

// The checkpoint behind chunk i, if there is one, of a thread's state at `column`.
__device__ __forceinline__ void store_checkpoint(const RegisterStateParams& p, const Task& w, int i,
                                                 int column, State& state) {
  const device::Chunk chunk{w.sequence, 0, 0, w.first_number + (w.first_chunk - w.first) + i};
  store_state(p.state.checkpoints,
              checkpoint_row(p.state, p.checkpoint_offsets, chunk, w.first_number), w, column,
              state);
}

// max |S| in front of chunk i, for the check of segments; `part` is that of the warp.
__device__ __forceinline__ void record_state(const RegisterStateParams& p, const Task& w, int i,
                                             int part, const State& state) {
  const std::int32_t chunk = w.first_chunk + i;
  if (i < w.lead || i == w.chunks || (chunk - w.first) % static_cast<int>(segment_grain) != 0) {
    return;
  }
  std::uint32_t most = 0;  // as bits: a NaN is more than any number
#pragma unroll
  for (const auto& half : state) {
#pragma unroll
    for (const float x : half) most = max(most, __float_as_uint(fabsf(x)));
  }
  const std::uint32_t bits = __reduce_max_sync(~0U, most);
  if (threadIdx.x % 32 == 0) {
    const std::int64_t mark = SegmentPlan::mark(w.sequence, w.first, chunk);
    p.segments.marks[(mark * p.heads.v + w.head) * SegmentPlan::parts + part] =
        __uint_as_float(bits);
  }
}

// Step `step` of d (+)= x y, x in registers, y in shared memory; the fence covers what the warp has
// written to x since the last one.
template <class Element, bool TransposeB, int Count>
__device__ __forceinline__ void multiply_step(float (&d)[Count], const std::uint32_t (&x)[4],
                                              std::uint64_t y, bool accumulate = true) {
  device::wgmma_fence();
  device::wgmma_step<Element, TransposeB>(d, x, y, accumulate);
}

// Offset of d_k = 16 step in q or k, whose d_k is contiguous.
__device__ constexpr std::uint32_t dim_offset(int step, int stride = panel_bytes) {
  return step / 4 * stride + step % 4 * 32;
}

// The accumulators from `x` on, rounded, as the A operand of a step.
template <class Element>
__device__ __forceinline__ void pack_step(std::uint32_t (&to)[4], const float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = device::pack<Element>(x[2 * i], x[2 * i + 1]);
}

// Where a lane reads this warp's 16 columns of a panel of V, for load_values.
__device__ __forceinline__ std::uint32_t value_address_offset(int thread) {
  const int lane = thread % 32;
  const int token = lane / 16 * 8 + lane % 8;
  const int part = 2 * (thread % group_threads / 32) + lane / 8 % 2;
  return token * 128 + ((part ^ token % 8) << 4);
}

// V^T of this warp's 16 columns and a step's tokens, in the order of the accumulators.
__device__ __forceinline__ void load_value_step(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_values(Fragments& to, std::uint32_t address) {
#pragma unroll
  for (int step = 0; step < steps_of_rows; ++step) load_value_step(to[step], address + step * 2048);
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

template <class Element, class Shape, Form form>
__device__ void keep_state(const RegisterStateParams& p, const Task& w,
                           SharedStorage<Shape>& shared, int group) {
  constexpr int Groups = Shape::groups;
  constexpr int held_factors = Shape::held_factors;
  const int warp = threadIdx.x % group_threads / 32;
  const int column = w.first_column + group * group_columns + warp * 16 + threadIdx.x % 32 / 4;
  const int part = w.first_column / 16 + group * 4 + warp;  // of a mark
  // Kept in registers: asking for the thread's number anew costs a chunk more than the registers.
  int quad = threadIdx.x % 4;
  std::uint32_t value_offset = value_address_offset(static_cast<int>(threadIdx.x));
  asm volatile("" : "+r"(quad), "+r"(value_offset));
  // In the copies of the current chunk and, later in a turn, of the next: two sets, because a
  // register of a store that waits behind WGMMAs cannot be written before it is through.
  using Copy = typename SharedStorage<Shape>::Copy;
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
  float4 factor[held_factors];
  float fade;
  load_state(p.state, w, column, state);

  const auto wait_for = [&](const Slot& slot, const Slot& value_slot) {
    shared.full_keys[slot.index].wait(slot.phase);
    if constexpr (!Shape::one_ring) shared.full_queries[value_slot.index].wait(value_slot.phase);
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
  const auto load_next = [&](const auto& queries, const Gates& gates) {
    load_values(residual, device::shared_address(queries.v + group * panel_bytes) + value_offset);
#pragma unroll
    for (int j = 0; j < held_factors; ++j) factor[j] = gates.residual[4 * j + quad];
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
  const auto update_state = [&](const Slot& slot) {
    const auto& keys = shared.keys[slot.index];
    const Gates& gates = shared.gates[slot.index];
    const std::uint64_t a = device::descriptor_k_major(device::shared_address(keys.a));
    const std::uint64_t k =
        device::descriptor_mn_major(device::shared_address(keys.k), panel_bytes);
    float2 decay[rows / 8];
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) decay[j] = gates.decay[4 * j + quad];
    if constexpr (Shape::solves) shared.solver.solved[slot.index].wait(slot.phase);
    device::forget(values);
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      const int held = 2 * step % held_factors;
      make_residual<Element>(residual[step], ks, &factor[held], step);
      if (2 * step + held_factors < rows / 8) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          factor[held + j] = gates.residual[4 * (2 * step + held_factors + j) + quad];
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

  // Checkpoint behind chunk i, and what the check of segments needs of the state there.
  const auto look_at_state = [&](int i) {
    if constexpr (stores_checkpoints<form>) {
      if (!cuts<form> || i >= w.lead) store_checkpoint(p, w, i, column, state);
    }
    if constexpr (cuts<form>) record_state(p, w, i + 1, part, state);
  };

  if (w.chunks > 0) {
    Slot slot;
    wait_for(slot, query_slot_of<Shape>(0, slot));
    if constexpr (cuts<form>) record_state(p, w, 0, part, state);
    const std::uint64_t first_k =
        device::descriptor_k_major(device::shared_address(shared.keys[0].k));
    load_next(shared.queries[0], shared.gates[0]);
    device::forget(ks);
    multiply_keys(first_k, 0);
    multiply_keys(first_k, 1);
    finish_keys(0);
    if constexpr (!Shape::one_ring) shared.empty_queries[0].arrive();

#pragma unroll 1
    for (int i = 1; i < w.chunks; ++i) {
      Slot next = slot;
      next.advance(Shape::key_stages);
      const Slot value_slot = query_slot_of<Shape>(i, next);
      wait_for(next, value_slot);
      turn_copies(i);
      update_state(slot);
      if constexpr (Groups == 2) copy_values(i - 1);  // registers are too few to keep V' longer
      const std::uint64_t k =
          device::descriptor_k_major(device::shared_address(shared.keys[next.index].k));
      if (i >= copies) device::named_sync(state_read + i % copies, Shape::meeting_threads);
      device::forget(ks);
      device::wgmma_wait<1>();
      device::hold(state[0]);
      multiply_keys(k, 0);
      if constexpr (Groups == 1) copy_values(i - 1);
      device::wgmma_wait<1>();
      device::hold(state[1]);
      announce_values(i - 1);
      shared.empty_keys[slot.index].arrive();
      load_next(shared.queries[value_slot.index], shared.gates[next.index]);
      multiply_keys(k, 1);
      look_at_state(i - 1);
      finish_keys(i);
      if constexpr (!Shape::one_ring) shared.empty_queries[value_slot.index].arrive();
      slot = next;
    }

    turn_copies(w.chunks);
    update_state(slot);
    copy_values(w.chunks - 1);
    announce_values(w.chunks - 1);
    device::wgmma_wait<0>();
    device::hold(state[0]);
    device::hold(state[1]);
    look_at_state(w.chunks - 1);
  }
  if (!w.to_end) return;
  if (w.waiting_row >= 0) {
    store_state(p.waiting, w.waiting_row, w, column, state);
  } else {
    store_state(p.state.final, p.state.final_row(w.sequence), w, column, state);
  }
}

// A final state that has waited, this block's columns of it; by thread `thread` of `threads`.
template <class Shape>
__device__ void hand_state_on(const RegisterStateParams& p, const Task& w, int thread,
                              int threads) {
  const std::int64_t row = p.state.final_row(w.sequence);
  if (row < 0) return;
  const device::StateMatrix from = p.waiting.matrix(w.waiting_row, w.head);
  const device::StateMatrix to = p.state.final.matrix(row, w.head);
  constexpr int columns = Shape::tile;
  for (int i = thread; i < dim * columns; i += threads) {
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

template <class Element, class Shape, Form form>
__device__ void make_output(const RegisterStateParams& p, const Task& w,
                            SharedStorage<Shape>& shared) {
  constexpr int Groups = Shape::groups;
  constexpr int count = Shape::tile / 2;  // accumulators a thread
  const int thread = threadIdx.x % group_threads;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  Slot slot;
  int i = 0;
  // In front of a segment only the state counts.
#pragma unroll 1
  for (; cuts<form> && i < w.lead; ++i) {
    const int copy = i % copies;
    const Slot query_slot = query_slot_of<Shape>(i, slot);
    shared.full_keys[slot.index].wait(slot.phase);
    shared.empty_keys[slot.index].arrive();
    if constexpr (!Shape::one_ring) {
      shared.full_queries[query_slot.index].wait(query_slot.phase);
      shared.empty_queries[query_slot.index].arrive();
    }
    device::named_sync(state_ready + copy, Shape::meeting_threads);
    if (i + copies < w.chunks) device::named_arrive(state_read + copy, Shape::meeting_threads);
    device::named_sync(value_ready + copy, Shape::meeting_threads);
    if (i + copies < w.chunks) device::named_arrive(value_read + copy, Shape::meeting_threads);
    slot.advance(Shape::key_stages);
  }
#pragma unroll 1
  for (; i < w.chunks; ++i) {
    const Slot query_slot = query_slot_of<Shape>(i, slot);
    const auto& queries = shared.queries[query_slot.index];
    const Gates& gates = shared.gates[slot.index];
    const int copy = i % copies;
    shared.full_keys[slot.index].wait(slot.phase);
    if constexpr (!Shape::one_ring) shared.full_queries[query_slot.index].wait(query_slot.phase);

    // Q K^T, then Q S behind it
    float scores[rows / 2];
    float acc[count];
    Decays decays;
    decays.load(gates, row, column);
    const float query[2] = {gates.query[row], gates.query[row + 8]};
    const std::uint64_t q = device::descriptor_k_major(device::shared_address(queries.q));
    const std::uint64_t k =
        device::descriptor_k_major(device::shared_address(shared.keys[slot.index].k));
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
    const int first_token = gates.first_token;
    const int tokens = gates.tokens;
    if constexpr (!Shape::one_ring) shared.empty_keys[slot.index].arrive();

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
    if constexpr (Shape::one_ring) {
      shared.empty_keys[slot.index].arrive();
    } else {
      shared.empty_queries[query_slot.index].arrive();
    }
    if (i + copies < w.chunks) device::named_arrive(state_read + copy, Shape::meeting_threads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
        acc[4 * j + 2 * h] *= query[h];
        acc[4 * j + 2 * h + 1] *= query[h];
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
    slot.advance(Shape::key_stages);

    // The thread that started the last store says when its buffer is free.
    if (thread == 0) device::store_wait_read();
    device::named_sync(within_output, group_threads);
    device::store_accumulators<Element>(shared.output[0], acc, 0, panel_bytes);
    device::fence_async_proxy();
    device::named_sync(within_output, group_threads);
    store_output_tile<Element, Groups>(p.o, p.o_rows, w, shared.output[0], first_token, tokens,
                                       thread);
  }
  if (thread == 0) device::store_wait();
}

// ---------------------------------------------------------------------------------------------
// On the host.

inline constexpr std::int64_t state_elements = std::int64_t{dim} * dim;
inline constexpr std::int64_t state_bytes = state_elements * static_cast<int>(sizeof(float));

// Whether the memory of two tensors has anything in common.
inline bool may_share(const TensorView& a, const TensorView& b) {
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

// Final states wait in scratch where they may not be stored at once.
inline device::StatePool waiting_states(const StageCall& call, const TensorView& scratch) {
  device::StatePool pool;
  if (!call.has("initial_state") || !call.has("final_state")) return pool;
  if (!may_share(call["initial_state"], call["final_state"])) return pool;
  pool.data = scratch.data;
  pool.head_stride = std::int64_t{dim} * dim;
  pool.pool_stride = pool.head_stride * call.problem.v_heads;
  pool.row_stride = dim;
  pool.rows = scratch.extents[0] / (pool.pool_stride * static_cast<int>(sizeof(float)));
  return pool;
}

/// Of a kernel that works on segments.
inline OptionSpec segments_option() {
  return {"segments",
          "1: few heads' sequences are cut where their past has faded, 0: never",
          1,
          {0, 1}};
}

/// Whether sequences are cut: where halves of the heads leave room for two segments of each.
inline bool segmented(const VariantQuery& query) {
  return query.problem.mode == Mode::fastest && option_or(query.options, "segments", 1) != 0 &&
         segments::useful_segments(query.problem, query.device) > 1;
}

/// Slots that blocks are started for: without cuts, sequences.
inline std::int64_t slots_to_run(const VariantQuery& query) {
  return segmented(query) ? segments::slot_count(query.problem, query.capacity, query.device)
                          : query.capacity.max_sequences;
}

/// Scratch of a kernel that works on segments: marks, and final states of cut sequences, of which
/// there are at most as many as there are cuts.
inline std::vector<ScratchSpec> segment_scratch(const VariantQuery& query) {
  const Problem& problem = query.problem;
  const std::int64_t marks =
      max_chunks(problem, query.capacity) / segment_grain + query.capacity.max_sequences + 1;
  std::vector<ScratchSpec> scratch{
      {"marks", marks * problem.v_heads * SegmentPlan::parts * static_cast<int>(sizeof(float))}};
  if (problem.initial_state && problem.final_state) {
    const std::int64_t cuts =
        segments::slot_count(problem, query.capacity, query.device) - query.capacity.max_sequences;
    scratch.push_back({"waiting", cuts * problem.v_heads * state_bytes});
  }
  return scratch;
}

}  // namespace gdnflow::stages::fused_prefill
