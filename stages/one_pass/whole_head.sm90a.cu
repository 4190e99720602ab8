// one_pass, one-pass with value_tile=128 (sm_90a): from the log decay to o in one walk over the
// chunks, a whole head a block. Everything transposed, as register_state.cuh has it, but O too:
//
//   R^T    = beta .* (V^T - gamma .* (S^T K^T))
//   V'_1^T = R_1^T A_1^T                             tokens 0 to 31: 64 x 32, contracted over 32
//   V'_2^T = (R_2^T + V'_1^T L^T) A_2^T              tokens 32 to 63: the same, twice
//   S^T    = gamma_l S^T + (decay .* V'^T) K
//   O^T    = scale gamma .* (S^T Q^T) + V'^T P^T
//   P      = scale tril(exp(gc_i - gc_j) Q K^T)
//
// A_1 and A_2 are the inverses of the halves on the diagonal of I - N, L = N_21 (kkt_solve has N):
// what a whole inverse would have in the place of L costs as much again as both, and the state
// groups have products in which to wait for one product more.
//
//   producers, a warp     q k v by TMA, prefix sums of g and their factors, into a ring of three
//   another               O by TMA, from where the state groups leave it
//   preparing group       Q K^T and K K^T on WGMMA, gates: P, L and N's halves; A_1 and A_2 by two
//                         warps each, in fp32 (pair_tril_inverse.cuh); a chunk ahead
//   two state groups      64 value columns each: K S -> R -> V'_1 -> V'_2 -> S, and Q S + P V'
//
// Two state groups keep the tensor cores busy for each other while one rounds and scales: nothing
// of S or V' goes through shared memory, and neither waits for the other.
//
// A block: 512 threads; 32, 96 and 192 registers a thread of producers, preparing and state groups;
// 225 KiB of shared memory.

#include <gdnflow/stage.hpp>

#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/mma.cuh"
#include "device/pair_tril_inverse.cuh"
#include "device/wgmma.cuh"
#include "fused_prefill/register_state.cuh"
#include "one_pass/one_pass.cuh"

#include <cstdint>

namespace gdnflow::stages::one_pass {
namespace {

struct Shape {
  static constexpr int groups = 2;  // that keep a state
  static constexpr bool solves = true;
  static constexpr int tile = dim;
  static constexpr int threads = (2 + groups) * group_threads;
  static constexpr int key_stages = 3;   // of q, k, v and gates
  static constexpr int pair_stages = 2;  // of P and A
  static constexpr int output_stages = 2;
  static constexpr bool one_ring = true;
  static constexpr int query_bytes = (2 + groups) * panel_bytes;
  static constexpr int key_bytes = 2 * panel_bytes + query_bytes;
  // setmaxnreg: at most 512 in sum.
  static constexpr int producer_registers = 32;
  static constexpr int preparing_registers = 96;
  static constexpr int state_registers = 192;
  static constexpr int held_factors = 2;  // of R, ahead of their use
  static_assert(producer_registers + preparing_registers + groups * state_registers <= 512);
};

struct Shared {
  struct alignas(1024) Keys {
    std::byte k[2 * panel_bytes];
  };
  struct alignas(1024) Queries {
    std::byte q[2 * panel_bytes], v[Shape::groups * panel_bytes];
  };
  struct alignas(1024) Pair {
    std::byte a[panel_bytes];  // A_1, L and A_2, where they lie in I - N
    std::byte p[panel_bytes];
  };
  Keys keys[Shape::key_stages];
  Queries queries[Shape::key_stages];
  Pair pairs[Shape::pair_stages];
  std::byte output[Shape::output_stages][Shape::groups][panel_bytes];
  Gates gates[Shape::key_stages];
  device::PairTrilInverse::Storage inverse[2];  // of A_1 and A_2
  Barrier full_keys[Shape::key_stages], empty_keys[Shape::key_stages];
  Barrier scored[Shape::pair_stages];  // P is there,
  Barrier solved[Shape::pair_stages];  // A is,
  Barrier used[Shape::pair_stages];    // and both may be overwritten
  Barrier written[Shape::output_stages], stored[Shape::output_stages];
  Barrier loaded_keys;  // of short chunks, before what lies past their end is cleared
  Task task;            // as the whole block has found it
  bool again;           // and whether there is another one behind it
};
static_assert(sizeof(Shared) <= shared_limit);
static_assert(sizeof(PlanStorage<Shape>) <= sizeof(Shared::output));

// Named barriers; 0 is __syncthreads.
enum Meeting : int {
  among_preparing = 1,
  pair_stored,                   // two warps of the preparing group each
  pair_made = pair_stored + 2,   // the same
  all_but_last = pair_made + 2,  // three groups
  state_groups,
};

// Where chunk i of a block lies in a ring: nothing more to keep in registers than its number.
template <int Stages>
__device__ __forceinline__ Slot slot_of(int i) {
  return {i % Stages, static_cast<std::uint32_t>(i / Stages % 2)};
}

// f(barrier, arrivals) for each. Every thread of a group arrives: racecheck follows no less.
template <class F>
__device__ __forceinline__ void for_each_barrier(Shared& shared, F&& f) {
  constexpr int readers = Shape::groups * group_threads;
  for (int i = 0; i < Shape::key_stages; ++i) {
    f(shared.full_keys[i], 1 + 32);  // the announced bytes, and every lane of the producer
    f(shared.empty_keys[i], readers + group_threads);
  }
  for (int i = 0; i < Shape::pair_stages; ++i) {
    f(shared.scored[i], group_threads);
    f(shared.solved[i], group_threads);
    f(shared.used[i], readers);
  }
  for (int i = 0; i < Shape::output_stages; ++i) {
    f(shared.written[i], readers);
    f(shared.stored[i], 32);
  }
  f(shared.loaded_keys, 1);
}

// ---------------------------------------------------------------------------------------------
// Preparing group.

// A value of this thread's that stays in a register.
__device__ __forceinline__ int kept(int x) {
  int y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(y) : "r"(x), "r"(threadIdx.x % 32));
  return y;
}

template <class Element, Form form>
__device__ void prepare(const Params& p, const Task& w, Shared& shared) {
  // Through shuffles: what comes straight from the thread's number is asked for anew, which takes
  // longer than all that is done with it.
  int own = kept(static_cast<int>(threadIdx.x % 32));
  int own_warp = kept(static_cast<int>(threadIdx.x % group_threads / 32));
  const int chunks = w.chunks;

  // What lies above the diagonals stays zero.
  for (auto& pair : shared.pairs) {
#pragma unroll 1
    for (int i = threadIdx.x % group_threads; i < 2 * panel_bytes / 16; i += group_threads) {
      reinterpret_cast<uint4*>(pair.a)[i] = uint4{0, 0, 0, 0};
    }
  }
  device::named_sync(among_preparing, group_threads);

  if (chunks == 0) return;
  float gram[rows / 2];
  float scores[rows / 2];
  const auto multiply_keys = [&](float(&d)[rows / 2], const std::byte* with, int stage) {
    const std::uint64_t x = device::descriptor_k_major(device::shared_address(with));
    const std::uint64_t k =
        device::descriptor_k_major(device::shared_address(shared.keys[stage].k));
#pragma unroll
    for (int step = 0; step < steps_of_dim; ++step) {
      device::wgmma_step<Element, false, false>(d, device::descriptor_at(x, dim_offset(step)),
                                                device::descriptor_at(k, dim_offset(step)),
                                                step > 0);
    }
    device::wgmma_commit();
  };
  Slot slot;
  Slot pair;
  float log2_growth = 0.0F;
  shared.full_keys[0].wait(0);
  device::wgmma_fence();
  multiply_keys(gram, shared.keys[0].k, 0);
  multiply_keys(scores, shared.queries[0].q, 0);
  device::wgmma_wait<0>();
  device::hold(gram);
  device::hold(scores);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    // Addresses are made anew in each turn: kept over all of them, they would not fit.
    asm volatile("" : "+r"(own), "+r"(own_warp));
    const int lane = own;
    const int warp = own_warp;
    auto& inverse = shared.inverse[warp / 2];
    const int row = lane / 4;
    const int column = lane % 4 * 2;
    // This warp's 16x16 block at column 0 of a panel, by rows.
    const std::uint32_t block_row = (16 * warp + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    const auto store_block = [&](std::uint32_t panel, int block, const device::FragmentA& x) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       (panel + block_row) ^ (block * 32)),
                   "r"(x.x[0]), "r"(x.x[1]), "r"(x.x[2]), "r"(x.x[3])
                   : "memory");
    };
    const Gates& gates = shared.gates[slot.index];
    const float gc_row[2] = {gates.log2_gamma[16 * warp + row],
                             gates.log2_gamma[16 * warp + row + 8]};
    // beta of this thread's rows: halves of pairs.
    const float* const betas = &gates.residual[8 * warp + row / 2].z + row % 2;
    const float minus_beta[2] = {-betas[0], -betas[4 * 4]};
    if constexpr (cuts<form>) {
      if (i < w.lead) log2_growth += log2_growth_of(gram, gates, warp);
    }
    shared.used[pair.index].wait(pair.phase ^ 1);
    const std::uint32_t a = device::shared_address(shared.pairs[pair.index].a);
    const std::uint32_t weights = device::shared_address(shared.pairs[pair.index].p);

    // Blocks of 16 columns on and below the diagonal: of P, and of N.
    const auto gate = [&]<bool Diagonal>(int block) {
      device::Slab<2> n;
      device::Slab<2> weight;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int j = 2 * block + part;
        const float2 gc_column =
            *reinterpret_cast<const float2*>(&gates.log2_gamma[8 * j + column]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int e = 2 * h + c;
            const float gc = c == 0 ? gc_column.x : gc_column.y;
            const float decay = device::exp2_approximate(gc_row[h] - gc);
            const float score = p.scale * scores[4 * j + e] * decay;
            // By selection: what is masked may be anything, a NaN included.
            weight.x[part][e] = !Diagonal || 8 * part + column + c <= row + 8 * h ? score : 0.0F;
            n.x[part][e] = minus_beta[h] * gram[4 * j + e] * decay;
          }
        }
      }
      store_block(weights, block, device::to_a<Element>(weight, 0));
      if constexpr (Diagonal) {
        inverse.diagonal[warp % 2].store(lane, n);
      } else if (block < 2 && warp >= 2) {
        store_block(a, block, device::to_a<Element>(n, 0));
      } else {
        inverse.below.store(lane, n);
      }
    };
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block < warp) {
        gate.template operator()<false>(block);
      } else if (block == warp) {
        gate.template operator()<true>(block);
      }
    }
    shared.empty_keys[slot.index].arrive();
    device::fence_async_proxy();
    shared.scored[pair.index].arrive();

    using Inverse = device::PairTrilInverse;
    const auto emit = [&](int r, int c, int of_block, int half, const float* x) {
      const int at = 32 * (warp / 2) + 16 * r + of_block;
      const int part = 4 * (warp / 2) + 2 * c + half;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(a + at * 128 +
                                                                    ((part ^ of_block % 8) << 4)),
                   "r"(device::pack<Element>(x[0], x[1])), "r"(device::pack<Element>(x[2], x[3])),
                   "r"(device::pack<Element>(x[4], x[5])), "r"(device::pack<Element>(x[6], x[7]))
                   : "memory");
    };
    Inverse::begin(inverse, warp % 2, lane, pair_stored + warp / 2, pair_made + warp / 2, emit);

    Inverse::end(inverse, warp % 2, lane, emit);
    device::fence_async_proxy();
    shared.solved[pair.index].arrive();
    // The next chunk's products; behind the last chunk the same once more, for nothing.
    if (i + 1 < chunks) slot.advance(Shape::key_stages);
    shared.full_keys[slot.index].wait(slot.phase);
    device::forget(gram);
    device::forget(scores);
    device::wgmma_fence();
    multiply_keys(gram, shared.keys[slot.index].k, slot.index);
    multiply_keys(scores, shared.queries[slot.index].q, slot.index);
    pair.advance(Shape::pair_stages);
    device::wgmma_wait<0>();
    device::hold(gram);
    device::hold(scores);
  }
  if constexpr (cuts<form>) {
    log2_growth = segments::sum_of_warp(log2_growth);
    if (own == 0) p.segments.log2_growth[4 * w.entry + own_warp] = log2_growth;
  }
}

// Stores what the state groups leave in shared memory, by a warp. The first that they leave is that
// of no chunk; of those in front of a segment only the state counts.
template <class Element>
__device__ void store_outputs(const Params& p, Shared& shared) {
  const Task& w = shared.task;
  const int lane = threadIdx.x % 32;
  int left = w.chunks;
  if (left == 0) return;
  int token = w.chunk.first_token;
  int tokens = w.chunk.tokens;
  Slot slot;
  shared.written[0].wait(0);
  shared.stored[0].arrive();
  for (; left > 0; --left) {
    slot.advance(Shape::output_stages);
    shared.written[slot.index].wait(slot.phase);
    if (left <= w.chunks - w.lead) {
      store_output_tile<Element, Shape::groups, 32>(p.o, p.o_rows, w, shared.output[slot.index][0],
                                                    token, tokens, lane);
      if (lane == 0) device::store_wait_read();
    }
    shared.stored[slot.index].arrive();
    token += tokens;
    tokens = min(rows, w.end_token - token);
  }
  if (lane == 0) device::store_wait();
}

// ---------------------------------------------------------------------------------------------
// State groups.

// This thread's number among those of the state groups; for what is wanted rarely, so that nothing
// that is made from it has to be kept until then.
__device__ __forceinline__ int state_thread() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number - 2 * group_threads;
}

using Half = float[rows / 4];  // 64 value columns x 32 tokens

template <class Element, Form form>
__device__ void keep_state(const Params& p, const Task& w, Shared& shared, int group) {
  constexpr int held = Shape::held_factors;
  const auto part = [] { return state_thread() / 32; };  // of a mark
  const auto column = [] {
    const int thread = state_thread();
    return thread / 32 * 16 + thread % 32 / 4;
  };
  const std::uint32_t value_offset =
      kept(static_cast<int>(value_address_offset(state_thread()) + group * panel_bytes));

  State state;
  Accumulators ks, o;
  Half first, second;                // V'^T of the halves
  std::uint32_t s[steps_of_dim][4];  // S^T as A operands
  Fragments residual;                // V^T, then R^T
  Fragments plain;                   // V'^T
  load_state(p.state, w, column(), state);
  if constexpr (cuts<form>) {
    if (w.chunks > 0) record_state(p, w, 0, part(), state);
  }

  const auto pack_state = [&](int half) {
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; ++step) {
      pack_step<Element>(s[step], &state[step / 4][step % 4 * 8]);
    }
  };
  // S^T x^T for q or k.
  const auto multiply_state = [&](Accumulators& d, std::uint64_t x, int half) {
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; ++step) {
      multiply_step<Element, false>(d, s[step], device::descriptor_at(x, dim_offset(step)),
                                    step > 0);
    }
  };
  Fragments rounded = {};  // O^T of the chunk before; before the first, one that is not stored
  const auto wait_stored = [&](int i) {
    const Slot slot = slot_of<Shape::output_stages>(i);
    shared.stored[slot.index].wait(slot.phase ^ 1);
  };
  const auto copy_output = [&](int i) {
    const std::uint32_t to =
        device::shared_address(shared.output[i % Shape::output_stages][0]) + value_offset;
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       to + step * 2048),
                   "r"(rounded[step][0]), "r"(rounded[step][1]), "r"(rounded[step][2]),
                   "r"(rounded[step][3])
                   : "memory");
    }
  };
  const auto announce_output = [&](int i) {
    device::fence_async_proxy();
    shared.written[i % Shape::output_stages].arrive();
  };
#pragma unroll 1
  for (int i = 0; i < w.chunks; ++i) {
    const int quad = value_offset / 128 % 4;  // the thread's number % 4
    const Slot slot = slot_of<Shape::key_stages>(i);
    const Slot pair = slot_of<Shape::pair_stages>(i);
    const Gates& gates = shared.gates[slot.index];
    const std::uint64_t keys =
        device::descriptor_k_major(device::shared_address(shared.keys[slot.index].k));
    const std::uint64_t k =
        device::descriptor_mn_major(device::shared_address(shared.keys[slot.index].k), panel_bytes);
    const std::uint64_t q =
        device::descriptor_k_major(device::shared_address(shared.queries[slot.index].q));
    const std::uint64_t a =
        device::descriptor_k_major(device::shared_address(shared.pairs[pair.index].a));
    const std::uint64_t weights =
        device::descriptor_k_major(device::shared_address(shared.pairs[pair.index].p));

    // K S and Q S.
    wait_stored(i);
    shared.full_keys[slot.index].wait(slot.phase);
    device::wgmma_wait<0>();
    device::hold(state[0]);
    device::hold(state[1]);
    device::forget(ks);
    pack_state(0);
    multiply_state(ks, keys, 0);
    pack_state(1);
    multiply_state(ks, keys, 1);
    device::wgmma_commit();
    copy_output(i);
    device::forget(o);
    multiply_state(o, q, 0);
    device::wgmma_commit();
    {
      const float fade = gates.fade;
#pragma unroll
      for (auto& half : state) {
#pragma unroll
        for (float& x : half) x *= fade;
      }
    }
    const std::uint32_t v = device::shared_address(shared.queries[slot.index].v) + value_offset;
    load_value_step(residual[0], v);
    load_value_step(residual[1], v + 2048);
    float4 factor[held];
#pragma unroll
    for (int j = 0; j < held; ++j) factor[j] = gates.residual[4 * j + quad];
    const auto next_factors = [&](int step) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * step + held + j < rows / 8) {
          factor[(2 * step + j) % held] = gates.residual[4 * (2 * step + held + j) + quad];
        }
      }
    };
    shared.solved[pair.index].wait(pair.phase);
    device::wgmma_wait<1>();
    device::hold(ks);

    // R and V'_1 = A_1 R_1
    device::forget(first);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      make_residual<Element>(residual[step], ks, &factor[2 * step % held], step);
      next_factors(step);
      multiply_step<Element, false>(first, residual[step], device::descriptor_at(a, step * 32),
                                    step > 0);
    }
    device::wgmma_commit();
    load_value_step(residual[2], v + 2 * 2048);
    load_value_step(residual[3], v + 3 * 2048);
    multiply_state(o, q, 1);
    device::wgmma_commit();
#pragma unroll
    for (int step = 2; step < 4; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float4& f = factor[(2 * step + e / 2) % held];
        const float2 v = device::unpack<Element>(residual[step][e]);
        second[8 * (step - 2) + 2 * e] = f.z * v.x - f.x * ks[8 * step + 2 * e];
        second[8 * (step - 2) + 2 * e + 1] = f.w * v.y - f.y * ks[8 * step + 2 * e + 1];
      }
      next_factors(step);
    }
    float2 decay[rows / 16];  // of one half
    const auto load_decays = [&](int half) {
#pragma unroll
      for (int j = 0; j < rows / 16; ++j) {
        decay[j] = gates.decay[4 * (rows / 16 * half + j) + quad];
      }
    };
    Fragments decayed;
    const auto decay_values = [&](int half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2& f = decay[2 * step + e / 2];
          decayed[2 * half + step][e] = device::pack<Element>(f.x * first[8 * step + 2 * e],
                                                              f.y * first[8 * step + 2 * e + 1]);
        }
      }
    };
    const auto pack_values = [&](int half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        pack_step<Element>(plain[2 * half + step], &first[8 * step]);
      }
    };
    const auto update = [&](int half, int begin, int end) {
#pragma unroll
      for (int step = begin; step < end; ++step) {
        multiply_step<Element, true>(state[half], decayed[step],
                                     device::descriptor_at(k, half * panel_bytes + step * 2048));
      }
    };
    load_decays(0);
    device::wgmma_wait<1>();
    device::hold(first);

    // L V'_1
    pack_values(0);
    decay_values(0);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      multiply_step<Element, false>(second, plain[step],
                                    device::descriptor_at(a, 4096 + step * 32));
    }
    device::wgmma_commit();
    update(0, 0, 2);
    update(1, 0, 2);
    device::wgmma_commit();
    load_decays(1);
    announce_output(i);
    device::wgmma_wait<1>();
    device::hold(second);
    device::hold(o);

    // V'_2 = A_2 (R_2 + L V'_1)
    device::forget(first);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      pack_step<Element>(residual[2 + step], &second[8 * step]);
      multiply_step<Element, false>(first, residual[2 + step],
                                    device::descriptor_at(a, 4096 + 64 + step * 32), step > 0);
    }
    device::wgmma_commit();
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(&gates.query[8 * j + 2 * quad]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        o[4 * j + 2 * h] *= x.x;
        o[4 * j + 2 * h + 1] *= x.y;
      }
    }
    {
      int number = i;
      asm volatile("" : "+r"(number));
      const Slot again = slot_of<Shape::pair_stages>(number);
      shared.scored[again.index].wait(again.phase);
    }
    device::wgmma_wait<0>();
    device::hold(first);
    device::hold(state[0]);
    device::hold(state[1]);

    // S and P V'
    decay_values(1);
    update(0, 2, 4);
    device::wgmma_commit();
    pack_values(1);
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step) {
      multiply_step<Element, false>(o, plain[step], device::descriptor_at(weights, step * 32));
    }
    device::wgmma_commit();
    update(1, 2, 4);
    device::wgmma_commit();
    device::wgmma_wait<1>();
    device::hold(o);
    shared.used[pair.index].arrive();
#pragma unroll
    for (int step = 0; step < steps_of_rows; ++step)
      pack_step<Element>(rounded[step], &o[8 * step]);
    device::wgmma_wait<0>();
    device::hold(state[0]);
    device::hold(state[1]);
    shared.empty_keys[slot.index].arrive();
    if constexpr (cuts<form>) record_state(p, w, i + 1, part(), state);
    if constexpr (stores_checkpoints<form>) {
      if (!cuts<form> || i >= w.lead) store_checkpoint(p, w, i, column(), state);
    }
  }
  if (w.chunks > 0) {
    wait_stored(w.chunks);
    copy_output(w.chunks);
    announce_output(w.chunks);
  }
  if (!w.to_end) return;
  if (w.waiting_row >= 0) {
    store_state(p.waiting, w.waiting_row, w, column(), state);
  } else {
    store_state(p.state.final, p.state.final_row(w.sequence), w, column(), state);
  }
}

// ---------------------------------------------------------------------------------------------

// Segments are checked by the block that is the last of a sequence's and head's to be done: where
// what was cut off has not faded, it computes the head again in one piece; else it hands on a final
// state that had to wait. By one thread.
__device__ void find_next_task(const Params& p, Shared& shared) {
  Task& task = shared.task;
  shared.again = false;
  // A place for each cut sequence, as for waiting states.
  const int place = task.first_slot + task.segments - 2 - task.sequence;
  __threadfence();
  if (atomicAdd(&p.finished[std::int64_t{place} * p.heads.v + task.head], 1) + 1 < task.segments) {
    return;
  }
  __threadfence();
  const int count = task.segments;
  task.chunks = 0;
  task.lead = 0;
  task.from_start = true;
  task.to_end = true;
  task.waiting_row = -1;
  task.segments = 1;
  if (!find_repair(p, task.first_slot, count, task)) return;
  if (task.chunks > 0) {
    task.first_number = chunk_of(p, task.sequence, 0).number;
    find_tokens(p, task);
    for_each_barrier(shared, [](Barrier& barrier, int arrivals) {
      barrier.end();
      barrier.init(arrivals);
    });
    device::fence_barrier_init();
  }
  shared.again = true;
}

// Whether there is another task; by every thread. The first state group, which decides, meets the
// others by two barriers, the first three groups and the state groups: docs/sanitizer.md has what
// the tools say of it.
template <Form form>
__device__ __forceinline__ bool go_on(const Params& p, Shared& shared) {
  if constexpr (!cuts<form>) return false;
  if (__all_sync(~0U, shared.task.segments == 1)) return false;
  const int number = state_thread();
  const int group = (number + 2 * group_threads) / group_threads;
  const auto meet = [&] {
    __syncwarp();
    if (group != 3) device::named_sync(all_but_last, 3 * group_threads);
    if (group >= 2) device::named_sync(state_groups, 2 * group_threads);
  };
  meet();
  if (number == 0) find_next_task(p, shared);
  meet();
  return __any_sync(~0U, shared.again);
}

template <class Element, Form form>
__global__ void __launch_bounds__(Shape::threads, 1)
    whole_head_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for_each_barrier(shared, [](Barrier& barrier, int arrivals) { barrier.init(arrivals); });
    device::fence_barrier_init();
  }
  __syncthreads();
  device::wait_for_predecessors();
  {
    // Through shared memory, so that no role keeps in registers what another needs.
    Task found;
    auto& plan = *reinterpret_cast<PlanStorage<Shape>*>(&shared.output);
    if (!find_task<Shape, form>(p, plan, found)) {
      // A segment without a start of its own counts as done, too.
      if (found.segments == 1) return;
      found.chunks = 0;
      found.to_end = false;
    }
    if (threadIdx.x == 0) {
      find_tokens(p, found);
      shared.task = found;
    }
  }
  __syncthreads();
  const int group = threadIdx.x / group_threads;
  if (group == 0) {
    device::give_registers<Shape::producer_registers>();
    do {
      if (threadIdx.x < 32) {
        produce_keys<Shape>(p, shared.task, shared);
      } else if (threadIdx.x < 64) {
        store_outputs<Element>(p, shared);
      }
    } while (go_on<form>(p, shared));
  } else if (group == 1) {
    device::give_registers<Shape::preparing_registers>();
    do {
      prepare<Element, form>(p, shared.task, shared);
    } while (go_on<form>(p, shared));
  } else {
    device::take_registers<Shape::state_registers>();
    do {
      if (cuts<form> && shared.task.chunks == 0 && shared.task.waiting_row >= 0) {
        hand_state_on<Shape>(p, shared.task, state_thread(), Shape::groups * group_threads);
      } else {
        keep_state<Element, form>(p, shared.task, shared, group - 2);
      }
    } while (go_on<form>(p, shared));
  }
}

}  // namespace

void whole_head(const Params& params, const Problem& problem, bool cut, std::int64_t slots,
                StepList& out) {
  const std::int64_t grid = slots * problem.v_heads;
  add_walk<false>(params, problem, cut, out, [&]<class Element, Form form>(const char* name) {
    return kernel_step(name, whole_head_kernel<Element, form>, grid_of(grid), {Shape::threads},
                       sizeof(Shared), params);
  });
}

}  // namespace gdnflow::stages::one_pass
