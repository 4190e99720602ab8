// fused_prefill, warp-specialized (sm_90a): four warp groups of one block walk a sequence's chunks
// for one value head, or for half of its value columns.
//
//   R  = beta .* (V - gamma .* (K S))        value group     64 x tile x 128
//   V' = A R                                 value group     64 x tile x  64
//   S  = gamma_l S + K^T (decay .* V')       state group    128 x tile x  64
//   P  = scale tril(exp(gc_i - gc_j) Q K^T)  output group    64 x   64 x 128
//   O  = scale gamma .* (Q S) + P V'         output group    64 x tile x 128, then x 64
//
//   gamma = exp(gc), decay = exp(gc_l - gc), gc_l that of the chunk's last token
//
//            q k v A g beta
//                 | producer: TMA and gates, a chunk ahead in a ring of two stages
//        +--------+----------+
//        v        v          v
//      state -S-> value -R-> A R          S: bf16 copy of the state in shared memory
//        ^  \       |   \                 V'd: decayed V', all that the state group waits for
//        |   +-S--> | V' +--> output -> o through shared memory and TMA, while the next
//        +---V'd----+         ^            chunk begins
//                   +---------+
//
// One barrier a dependence and direction, named, between exactly the two groups that it concerns;
// mbarriers for the ring. The state stays in fp32 registers of the state group from the first chunk
// to the last: 2 x 64 rows x tile columns.
//
// A chunk and head: 5.24 M multiply-adds (2560 tensor clocks), 64 KiB read and 16 KiB written at a
// tile of 128; at a tile of 64 K, Q, A, P are loaded and made twice, for half the chain's length.
//
// Rows past a chunk's end: TMA brings the neighbour's rows. R and V' are zeroed there by selection,
// never by a product, and the state group clears K's rows before it reduces over them.

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
#include "sm90.cuh"

#include <algorithm>
#include <cstdint>
#include <string>

namespace gdnflow::stages::fused_prefill {
namespace {

using device::Barrier;

constexpr int block_threads = 4 * group_threads;
constexpr int most_stages = 2;

// Named barriers; 0 is __syncthreads.
enum Meeting : int {
  state_for_value = 1,  // state -> value: S is in shared memory
  state_for_output,     // state -> output: the same
  decay_ready,          // value -> state: V'd is in shared memory
  value_ready,          // value -> output: V' is in shared memory
  state_read,           // output -> state: Q S is done, S may be overwritten
  value_read,           // output -> value: P V' is done, V' may be overwritten
  within_state,
  within_value,
  within_output,
};

struct Params : Sm90Params {
  int stages;         // of the ring: 1 or 2
  bool convert_a;     // fold beta into A instead of R
  bool split_finish;  // the state group waits for V'd alone, not for V' as well
};

template <int Tile>
struct Config {
  static constexpr int panels = Tile / 64;  // of value columns
  static constexpr int tile_bytes = panels * panel_bytes;
  static constexpr int accumulators = Tile / 2;  // a thread, for 64 rows
  static constexpr int load_bytes = 4 * panel_bytes + tile_bytes + panel_bytes;  // q, k, v, A
  // setmaxnreg: producer, state, value, output; 512 in sum.
  static constexpr int producer_registers = 24;
  static constexpr int state_registers = 200;
  static constexpr int value_registers = 136;
  static constexpr int output_registers = 152;
  static_assert(producer_registers + state_registers + value_registers + output_registers <= 512);
};

struct Gates {
  float log2_gamma[rows], gamma[rows], decay[rows], beta[rows];
  device::Chunk chunk;
};

template <int Tile>
struct alignas(1024) SharedStorage {
  struct alignas(1024) Stage {
    std::byte q[2 * panel_bytes], k[2 * panel_bytes], a[panel_bytes];
    std::byte v[Config<Tile>::tile_bytes];
  };
  Stage stage[most_stages];
  std::byte state[2 * Config<Tile>::tile_bytes];  // panels of 128 rows (d_k) x 64 columns
  std::byte residual[Config<Tile>::tile_bytes];
  std::byte value[Config<Tile>::tile_bytes];
  std::byte decayed[Config<Tile>::tile_bytes];
  std::byte output[Config<Tile>::tile_bytes];
  Gates gates[most_stages];
  Barrier full[most_stages], empty[most_stages];
};
static_assert(sizeof(SharedStorage<128>) <= shared_limit);

// ---------------------------------------------------------------------------------------------
// Producer: one warp. Lane 0 starts the copies; every lane turns two tokens' gates into factors.

template <int Tile>
__device__ void produce(const Params& p, const Work& w, SharedStorage<Tile>& shared) {
  const int lane = threadIdx.x % 32;
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    const device::Chunk chunk = p.chunks.at(w.first_chunk + i);
    float gc[2];
    float beta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane + 32 * h;
      const std::int64_t token = chunk.first_token + min(row, chunk.tokens - 1);
      gc[h] = p.g_cumsum.at(token, w.head);
      beta[h] = p.beta.at(token, w.head);
    }
    const int last = chunk.tokens - 1;
    const float gc_last = __shfl_sync(~0U, last < 32 ? gc[0] : gc[1], last % 32);

    auto& stage = shared.stage[slot.index];
    Gates& gates = shared.gates[slot.index];
    Barrier& full = shared.full[slot.index];
    shared.empty[slot.index].wait(slot.phase ^ 1);
    device::poison_freed(stage);
    if (lane == 0) {
      full.arrive_expect(Config<Tile>::load_bytes);
      for (int c = 0; c < 2; ++c) {
        device::load_box(stage.k + c * panel_bytes, p.k, full, 64 * c, w.qk_head,
                         chunk.first_token);
      }
      for (int c = 0; c < Config<Tile>::panels; ++c) {
        device::load_box(stage.v + c * panel_bytes, p.v, full, w.first_column + 64 * c, w.head,
                         chunk.first_token);
      }
      device::load_box(stage.a, p.a, full, 0, w.head, chunk.first_token);
      for (int c = 0; c < 2; ++c) {
        device::load_box(stage.q + c * panel_bytes, p.q, full, 64 * c, w.qk_head,
                         chunk.first_token);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane + 32 * h;
      gates.log2_gamma[row] = gc[h] * device::log2_e;
      gates.gamma[row] = device::exp2_approximate(gc[h] * device::log2_e);
      gates.decay[row] = device::exp2_approximate((gc_last - gc[h]) * device::log2_e);
      gates.beta[row] = beta[h];
    }
    if (lane == 0) gates.chunk = chunk;
    full.arrive();
    slot.advance(p.stages);
  }
}

// ---------------------------------------------------------------------------------------------
// State group: keeps S, publishes its bf16 copy, adds K^T V'd.

template <int Tile>
using State = float[2][Config<Tile>::accumulators];  // rows 64 m .. 64 m + 63 of d_k

// f(x, y, offset) for the state elements that this thread holds, two value columns at a time.
template <int Tile, class F>
__device__ void for_each_state_pair(const device::StateMatrix& matrix, const Work& w,
                                    State<Tile>& state, F&& f) {
  const int thread = threadIdx.x % group_threads;
  const int k = thread / 32 * 16 + thread % 32 / 4;
  const int v = w.first_column + thread % 4 * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::int64_t offset =
          matrix.offset + (64 * m + 8 * h + k) * matrix.k_stride + v * matrix.v_stride;
#pragma unroll
      for (int j = 0; j < Config<Tile>::accumulators / 4; ++j) {
        f(state[m][4 * j + 2 * h], state[m][4 * j + 2 * h + 1], offset);
        offset += 8 * matrix.v_stride;
        // One offset at a time: all of them at once would not fit beside the state.
        asm volatile("" : "+l"(offset));
      }
    }
  }
}

template <int Tile>
__device__ void load_state(const Params& p, const Work& w, State<Tile>& state) {
  const std::int64_t row = p.state.initial_row(w.sequence);
  if (row < 0) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (float& x : state[m]) x = 0.0F;
    }
    return;
  }
  const device::StateMatrix matrix = p.state.initial.matrix(row, w.head);
  for_each_state_pair<Tile>(matrix, w, state, [&](float& x, float& y, std::int64_t offset) {
    x = device::load_element(matrix.data, matrix.dtype, offset);
    y = device::load_element(matrix.data, matrix.dtype, offset + matrix.v_stride);
  });
}

template <int Tile>
__device__ void store_state(const device::StatePool& pool, std::int64_t row, const Work& w,
                            State<Tile>& state) {
  if (row < 0) return;
  const device::StateMatrix matrix = pool.matrix(row, w.head);
  for_each_state_pair<Tile>(matrix, w, state, [&](float& x, float& y, std::int64_t offset) {
    device::store_element(matrix.data, matrix.dtype, offset, x);
    device::store_element(matrix.data, matrix.dtype, offset + matrix.v_stride, y);
  });
}

template <class Element, int Tile>
__device__ void publish_state(const float (&state)[2][Config<Tile>::accumulators],
                              SharedStorage<Tile>& shared) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    device::store_accumulators<Element>(shared.state, state[m], 64 * m, 2 * panel_bytes);
  }
  device::fence_async_proxy();
}

template <class Element, int Tile>
__device__ void keep_state(const Params& p, const Work& w, SharedStorage<Tile>& shared) {
  constexpr int count = Config<Tile>::accumulators;
  const int thread = threadIdx.x % group_threads;
  State<Tile> state;
  load_state<Tile>(p, w, state);
  std::int32_t first_number = 0;
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    if (i > 0) device::named_sync(state_read, 2 * group_threads);
    publish_state<Element, Tile>(state, shared);
    device::named_arrive(state_for_value, 2 * group_threads);
    device::named_arrive(state_for_output, 2 * group_threads);

    auto& stage = shared.stage[slot.index];
    shared.full[slot.index].wait(slot.phase);
    const device::Chunk chunk = shared.gates[slot.index].chunk;
    const int length = chunk.tokens;
    if (i == 0) first_number = chunk.number;
    if (length < rows) {
      // The reduction runs over these rows: whatever the neighbour holds must not meet a zero.
      for (int row = length + thread / 16; row < rows; row += group_threads / 16) {
        const int part = thread % 16;
        *reinterpret_cast<uint4*>(stage.k + (part / 8) * panel_bytes + row * 128 +
                                  (part % 8) * 16) = uint4{0, 0, 0, 0};
      }
      device::fence_async_proxy();
      device::named_sync(within_state, group_threads);
    }
    const float fade = shared.gates[slot.index].gamma[length - 1];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < count; ++j) state[m][j] *= fade;
    }
    device::named_sync(decay_ready, p.split_finish ? 2 * group_threads : 3 * group_threads);
    device::hold(state[0]);
    device::hold(state[1]);
    device::wgmma_fence();
    const std::uint32_t k = device::shared_address(stage.k);
    const std::uint32_t decayed = device::shared_address(shared.decayed);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int step = 0; step < rows / 16; ++step) {
        device::wgmma_step<Element, true, true>(
            state[m], device::descriptor_mn_major(k + m * panel_bytes + step * 2048, panel_bytes),
            device::descriptor_mn_major(decayed + step * 2048, panel_bytes));
      }
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::hold(state[0]);
    device::hold(state[1]);
    shared.empty[slot.index].arrive();
    slot.advance(p.stages);
    if (p.state.checkpoint_chunks != 0) {
      const std::int64_t row = checkpoint_row(p.state, p.checkpoint_offsets, chunk, first_number);
      store_state<Tile>(p.state.checkpoints, row, w, state);
    }
  }
  store_state<Tile>(p.state.final, p.state.final_row(w.sequence), w, state);
}

// ---------------------------------------------------------------------------------------------
// Value group: R from K S, V' from A R.

// A <- A diag(beta), in place.
template <class Element>
__device__ void fold_beta(std::byte* a, const float* beta) {
  const int thread = threadIdx.x % group_threads;
#pragma unroll
  for (int i = 0; i < rows * 8 / group_threads; ++i) {
    const int row = thread / 8 + i * (group_threads / 8);
    const int column = thread % 8 * 8;
    auto* at = reinterpret_cast<std::uint32_t*>(a + device::panel_offset(row, column));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = device::unpack<Element>(at[j]);
      at[j] = device::pack<Element>(x.x * beta[column + 2 * j], x.y * beta[column + 2 * j + 1]);
    }
  }
  device::fence_async_proxy();
}

template <class Element, int Tile>
__device__ void make_values(const Params& p, const Work& w, SharedStorage<Tile>& shared) {
  constexpr int count = Config<Tile>::accumulators;
  const int thread = threadIdx.x % group_threads;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    auto& stage = shared.stage[slot.index];
    const Gates& gates = shared.gates[slot.index];
    shared.full[slot.index].wait(slot.phase);
    const int length = gates.chunk.tokens;
    if (p.convert_a) {
      fold_beta<Element>(stage.a, gates.beta);
      device::named_sync(within_value, group_threads);
    }
    device::named_sync(state_for_value, 2 * group_threads);

    // K S
    float ks[count];
    const std::uint32_t k = device::shared_address(stage.k);
    const std::uint32_t s = device::shared_address(shared.state);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      device::wgmma_step<Element, false, true>(
          ks, device::descriptor_k_major(k + step / 4 * panel_bytes + step % 4 * 32),
          device::descriptor_mn_major(s + step * 2048, 2 * panel_bytes), step > 0);
    }
    device::wgmma_commit();
    std::uint32_t pairs[count / 2];  // V, then R, then V'
    device::load_pairs(stage.v, pairs, 0, panel_bytes);
    device::wgmma_wait<0>();
    device::hold(ks);

    // R
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h;
      const bool valid = r < length;
      const float gamma = gates.gamma[r];
      const float beta = p.convert_a ? 1.0F : gates.beta[r];
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
        const float2 v = device::unpack<Element>(pairs[2 * j + h]);
        const float x = beta * (v.x - gamma * ks[4 * j + 2 * h]);
        const float y = beta * (v.y - gamma * ks[4 * j + 2 * h + 1]);
        pairs[2 * j + h] = valid ? device::pack<Element>(x, y) : 0U;
      }
    }
    device::store_pairs(shared.residual, pairs, 0, panel_bytes);
    device::fence_async_proxy();
    device::named_sync(within_value, group_threads);

    // A R
    float values[count];
    const std::uint32_t a = device::shared_address(stage.a);
    const std::uint32_t r = device::shared_address(shared.residual);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < rows / 16; ++step) {
      device::wgmma_step<Element, false, true>(
          values, device::descriptor_k_major(a + step * 32),
          device::descriptor_mn_major(r + step * 2048, panel_bytes), step > 0);
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::hold(values);

    // V'd first: the state group waits for it. V' is kept as pairs meanwhile.
    std::uint32_t decayed[count / 2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool valid = row + 8 * h < length;
      const float decay = gates.decay[row + 8 * h];
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
        const float x = values[4 * j + 2 * h];
        const float y = values[4 * j + 2 * h + 1];
        pairs[2 * j + h] = valid ? device::pack<Element>(x, y) : 0U;
        decayed[2 * j + h] = valid ? device::pack<Element>(decay * x, decay * y) : 0U;
      }
    }
    device::store_pairs(shared.decayed, decayed, 0, panel_bytes);
    if (p.split_finish) {
      device::fence_async_proxy();
      device::named_arrive(decay_ready, 2 * group_threads);
    }
    if (i > 0) device::named_sync(value_read, 2 * group_threads);
    device::store_pairs(shared.value, pairs, 0, panel_bytes);
    device::fence_async_proxy();
    if (p.split_finish) {
      device::named_arrive(value_ready, 2 * group_threads);
    } else {
      device::named_arrive(decay_ready, 3 * group_threads);
    }
    shared.empty[slot.index].arrive();
    slot.advance(p.stages);
  }
}

// ---------------------------------------------------------------------------------------------
// Output group: P and O; the store of a chunk runs while the next one is computed.

// An element of P. Masked twice, both times by selection: the exponent, so that no positive one is
// raised, and the product, because a masked score may be anything, a neighbour's NaN included.
__device__ __forceinline__ float weight(bool visible, float log2_decay, float score) {
  const float decay = device::exp2_approximate(visible ? log2_decay : 0.0F);
  return visible ? decay * score : 0.0F;
}

template <class Element, int Tile>
__device__ void make_output(const Params& p, const Work& w, SharedStorage<Tile>& shared) {
  constexpr int count = Config<Tile>::accumulators;
  const int thread = threadIdx.x % group_threads;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  Slot slot;
  for (int i = 0; i < w.chunks; ++i) {
    auto& stage = shared.stage[slot.index];
    const Gates& gates = shared.gates[slot.index];
    shared.full[slot.index].wait(slot.phase);
    const device::Chunk chunk = gates.chunk;

    // Q K^T, then Q S behind it
    float scores[rows / 2];
    float acc[count];
    const std::uint32_t q = device::shared_address(stage.q);
    const std::uint32_t k = device::shared_address(stage.k);
    const std::uint32_t s = device::shared_address(shared.state);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      const std::uint32_t offset = step / 4 * panel_bytes + step % 4 * 32;
      device::wgmma_step<Element, false, false>(scores, device::descriptor_k_major(q + offset),
                                                device::descriptor_k_major(k + offset), step > 0);
    }
    device::wgmma_commit();
    device::named_sync(state_for_output, 2 * group_threads);
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      device::wgmma_step<Element, false, true>(
          acc, device::descriptor_k_major(q + step / 4 * panel_bytes + step % 4 * 32),
          device::descriptor_mn_major(s + step * 2048, 2 * panel_bytes), step > 0);
    }
    device::wgmma_commit();
    device::wgmma_wait<1>();
    device::hold(scores);

    // P, as the A operand of P V'
    std::uint32_t weights[rows / 16][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h;
      const float gate = gates.log2_gamma[r];
#pragma unroll
      for (int j = 0; j < rows / 8; ++j) {
        const int c = 8 * j + column;
        const float2 at = *reinterpret_cast<const float2*>(&gates.log2_gamma[c]);
        const float x = weight(c <= r, gate - at.x, p.scale * scores[4 * j + 2 * h]);
        const float y = weight(c + 1 <= r, gate - at.y, p.scale * scores[4 * j + 2 * h + 1]);
        weights[j / 2][j % 2 * 2 + h] = device::pack<Element>(x, y);
      }
    }
    device::wgmma_wait<0>();
    device::hold(acc);
    if (i + 1 < w.chunks) device::named_arrive(state_read, 2 * group_threads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float gamma = p.scale * gates.gamma[row + 8 * h];
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
        acc[4 * j + 2 * h] *= gamma;
        acc[4 * j + 2 * h + 1] *= gamma;
      }
    }

    // P V'
    if (p.split_finish) {
      device::named_sync(value_ready, 2 * group_threads);
    } else {
      device::named_sync(decay_ready, 3 * group_threads);
    }
    const std::uint32_t value = device::shared_address(shared.value);
    device::hold(acc);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < rows / 16; ++step) {
      device::wgmma_step<Element, true>(
          acc, weights[step], device::descriptor_mn_major(value + step * 2048, panel_bytes));
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::hold(acc);
    if (i + 1 < w.chunks) device::named_arrive(value_read, 2 * group_threads);
    shared.empty[slot.index].arrive();
    slot.advance(p.stages);

    // The thread that started the last store says when its buffer is free.
    if (thread == 0) device::store_wait_read();
    device::named_sync(within_output, group_threads);
    device::store_accumulators<Element>(shared.output, acc, 0, panel_bytes);
    device::fence_async_proxy();
    device::named_sync(within_output, group_threads);
    store_output_tile<Element, Config<Tile>::panels>(p.o, p.o_rows, w, shared.output,
                                                     chunk.first_token, chunk.tokens, thread);
  }
  if (thread == 0) device::store_wait();
}

// ---------------------------------------------------------------------------------------------

template <class Element, int Tile>
__global__ void __launch_bounds__(block_threads, 1)
    warp_specialized_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Tile>*>(raw);
  const Work w = work_of_block<Tile>(p.chunks, p.heads);
  if (threadIdx.x == 0) {
    for (int s = 0; s < most_stages; ++s) {
      shared.full[s].init(1 + 32);              // the announced bytes, and the producer's lanes
      shared.empty[s].init(3 * group_threads);  // every thread: racecheck follows no less
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / group_threads;
  if (group == 0) {
    device::give_registers<Config<Tile>::producer_registers>();
    if (threadIdx.x < 32) {
      produce<Tile>(p, w, shared);
      device::allow_successors();
    }
  } else if (group == 1) {
    device::take_registers<Config<Tile>::state_registers>();
    keep_state<Element, Tile>(p, w, shared);
  } else if (group == 2) {
    device::take_registers<Config<Tile>::value_registers>();
    make_values<Element, Tile>(p, w, shared);
  } else {
    device::take_registers<Config<Tile>::output_registers>();
    make_output<Element, Tile>(p, w, shared);
  }
}

// ---------------------------------------------------------------------------------------------

int value_tile(const VariantQuery& query) {
  const std::int64_t chosen = option_or(query.options, "value_tile", 0);
  if (chosen != 0) return static_cast<int>(chosen);
  if (query.problem.mode == Mode::batch_invariant) return 64;
  // Whole heads when they fill the machine; halves of the chain's length when they do not.
  const std::int64_t tasks = query.capacity.max_sequences * query.problem.v_heads;
  return 2 * tasks > query.device.multiprocessors ? dim : 64;
}

std::int64_t blocks(const VariantQuery& query) { return sm90_blocks(query, value_tile(query)); }

Support supports(const VariantQuery& query) { return supports_sm90(query, blocks(query)); }

template <class Element, int Tile>
Step launch(const Params& params, std::int64_t grid) {
  return kernel_step("fused_prefill", warp_specialized_kernel<Element, Tile>, grid_of(grid),
                     {block_threads}, sizeof(SharedStorage<Tile>), params);
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  const Params params{sm90_params(call), static_cast<int>(call.option("stages", most_stages)),
                      call.option("convert_a", 0) != 0, call.option("split_finish", 1) != 0};
  const bool bf16 = call.problem.activation == DType::bf16;
  const bool whole = value_tile(query) == dim;
  const std::int64_t grid = blocks(query);
  if (bf16) {
    out.push_back(whole ? launch<__nv_bfloat16, 128>(params, grid)
                        : launch<__nv_bfloat16, 64>(params, grid));
  } else {
    out.push_back(whole ? launch<__half, 128>(params, grid) : launch<__half, 64>(params, grid));
  }
}

}  // namespace

Variant warp_specialized() {
  Variant variant;
  variant.id = "warp-specialized";
  variant.description = "TMA producer, state, value and output warp groups";
  variant.target = DeviceType::cuda;
  variant.options = {
      {"value_tile", "value columns of a block; 0: by the number of heads", 0, {0, 64, 128}},
      {"stages", "depth of the ring of q, k, v, A and gates", 2, {1, 2}},
      {"convert_a", "1: fold beta into A in shared memory, 0: into the residual", 0, {0, 1}},
      {"split_finish", "1: the state group waits for decayed values alone, 0: for all", 1, {0, 1}},
  };
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts_sm90;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::fused_prefill
