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
//   another               jobs
//   another               norms of q, where q and k are to be normalised
//   preparing group       Q K^T and K K^T on WGMMA, gates: P, L and N's halves; A_1 and A_2 in fp32
//                         (halves_tril_inverse.cuh); a chunk ahead
//   two state groups      64 value columns each: K S and Q S, in products that have the rows of
//                         both; R -> V'_1 -> V'_2 -> S, and Q S + P V'
//
// Two state groups keep the tensor cores busy for each other while one rounds and scales: nothing
// of S or V' goes through shared memory, and neither waits for the other.
//
// Where q and k are to be normalised, neither is changed: with r the inverse of a row's norm, r_k,
// from the diagonal of K K^T, becomes a factor of beta, and r_q one of rows of P and of Q S.
//
// Blocks stay: each takes its share of all chunks (shares.cu) as jobs that a producer warp makes
// out (schedule.cuh), and the rings go on from one to the next.
//
// A block: 512 threads; 32, 96 and 192 registers a thread of producers, preparing and state groups;
// 226 KiB of shared memory.

#include <gdnflow/stage.hpp>

#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "device/halves_tril_inverse.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"
#include "fused_prefill/register_state.cuh"
#include "one_pass/one_pass.cuh"
#include "one_pass/schedule.cuh"
#include "one_pass/walks.hpp"
#include "qk_norm/epsilon.hpp"

#include <climits>
#include <cstdint>

namespace gdnflow::stages::one_pass {
namespace {

struct Shape {
  static constexpr int groups = 2;  // that keep a state
  static constexpr bool solves = true;
  static constexpr bool uses_blocks = true;
  static constexpr int tile = dim;
  static constexpr int threads = (2 + groups) * group_threads;
  static constexpr int key_stages = 3;   // of q, k, v and gates
  static constexpr int pair_stages = 2;  // of P and A
  static constexpr int output_stages = 2;
  static constexpr bool one_ring = true;
  static constexpr int panel_stride = 2 * panel_bytes;  // of q's two panels, and k's
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
  // A panel of q, one of k, and the others of both, so that a product can have the rows of both.
  struct alignas(1024) Keys {
    std::byte q[panel_bytes], k[3 * panel_bytes], v[Shape::groups * panel_bytes];
  };
  struct alignas(1024) Pair {
    std::byte a[panel_bytes];  // A_1, L and A_2, where they lie in I - N
    std::byte p[panel_bytes];
  };
  Keys keys[Shape::key_stages];
  Pair pairs[Shape::pair_stages];
  std::byte output[Shape::output_stages][Shape::groups][panel_bytes];
  Gates gates[Shape::key_stages];
  // exp(gc_b - gc) by token, b the last one of its block of 16
  float to_block_end[Shape::key_stages][rows];
  device::HalvesTrilInverse::Storage inverse;  // of A_1 and A_2
  float query_norms[Shape::key_stages][rows];  // r_q
  float log2_growth[group_threads];            // of a thread's tokens (log2_growth_of)
  Barrier full_keys[Shape::key_stages], empty_keys[Shape::key_stages];
  Barrier solved[Shape::pair_stages];  // P and A are there,
  Barrier used[Shape::pair_stages];    // and may be overwritten
  Barrier written[Shape::output_stages], stored[Shape::output_stages];
  Barrier normed[Shape::key_stages];  // r_q is there
  Barrier loaded_keys;                // of short chunks, before what lies past their end is cleared
  JobRing ring;
};
static_assert(sizeof(Shared) <= shared_limit);

// Named barriers; 0 is __syncthreads.
enum Meeting : int {
  among_preparing = 1,
  of_inverse,  // device::HalvesTrilInverse::Meeting
  both_states = of_inverse + device::HalvesTrilInverse::meetings,
  first_linked,  // the first one lets the second have the tensor cores
};

// Where chunk i of a block lies in a ring: nothing more to keep in registers than its number.
template <int Stages>
__device__ __forceinline__ Slot slot_of(int i) {
  return {i % Stages, static_cast<std::uint32_t>(i / Stages % 2)};
}

// Every thread of a group arrives: racecheck follows no less.
template <bool Norm>
__device__ __forceinline__ void init_barriers(Shared& shared) {
  constexpr int readers = Shape::groups * group_threads;
  constexpr int norms = Norm ? 32 : 0;
  for (int i = 0; i < Shape::key_stages; ++i) {
    shared.full_keys[i].init(1 + 32);  // the announced bytes, and every lane of the producer
    shared.empty_keys[i].init(readers + group_threads + norms);
    shared.normed[i].init(32);
  }
  for (int i = 0; i < Shape::pair_stages; ++i) {
    shared.solved[i].init(group_threads);
    shared.used[i].init(readers);
  }
  for (int i = 0; i < Shape::output_stages; ++i) {
    shared.written[i].init(readers);
    shared.stored[i].init(32);
  }
  shared.loaded_keys.init(1);
  shared.ring.init(32 + 32 + norms + group_threads + readers);
}

// Offset of d_k = 16 step in q or k.
__device__ constexpr std::uint32_t tile_offset(int step) {
  return dim_offset(step, Shape::panel_stride);
}

// ---------------------------------------------------------------------------------------------
// Preparing group.

// A value of this thread's that stays in a register.
__device__ __forceinline__ int kept(int x) {
  int y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(y) : "r"(x), "r"(threadIdx.x % 32));
  return y;
}

// Of keys that are to be normalised: r_k of a warp's rows, from the diagonal of K K^T, of which it
// has those rows, into the factors of R, and -beta r_k^2 of a lane's rows, `row` and eight on.
__device__ __forceinline__ void norm_keys(Gates& gates, const float (&gram)[rows / 2], int warp,
                                          int row, int column, float (&minus_beta)[2]) {
  // Addresses are made anew here, too.
  asm volatile("" : "+r"(row), "+r"(column));
  const int pair = row >> 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const factors = &gates.residual[8 * warp + pair + 4 * h].x + (row & 1);
    const float norm =
        device::rsqrt_approximate(diagonal_of(gram, warp, row, h) + qk_norm::epsilon);
    float beta = 0.0F;
    if (2 * pair == column) {  // has the diagonal's element
      beta = factors[2] * norm;
      factors[0] *= norm * norm;
      factors[2] = beta;
    }
    minus_beta[h] = __shfl_sync(~0U, -beta * norm, 4 * row + pair);
  }
}

template <class Element, bool Norm>
__device__ void prepare(const WholeParams& p, Shared& shared) {
  using Inverse = device::HalvesTrilInverse;
  // Through shuffles: what comes straight from the thread's number is asked for anew, which takes
  // longer than all that is done with it.
  int own = kept(static_cast<int>(threadIdx.x % 32));
  int own_warp = kept(static_cast<int>(threadIdx.x % group_threads / 32));

  // What lies above the diagonals stays zero.
  for (auto& pair : shared.pairs) {
#pragma unroll 1
    for (int i = threadIdx.x % group_threads; i < 2 * panel_bytes / 16; i += group_threads) {
      reinterpret_cast<uint4*>(pair.a)[i] = uint4{0, 0, 0, 0};
    }
  }
  device::named_sync(among_preparing, group_threads);

  float gram[rows / 2];
  float scores[rows / 2];
  const auto multiply_keys = [&](float(&d)[rows / 2], const std::byte* with, int stage) {
    const std::uint64_t x = device::descriptor_k_major(device::shared_address(with));
    const std::uint64_t k =
        device::descriptor_k_major(device::shared_address(shared.keys[stage].k));
#pragma unroll
    for (int step = 0; step < steps_of_dim; ++step) {
      device::wgmma_step<Element, false, false>(d, device::descriptor_at(x, tile_offset(step)),
                                                device::descriptor_at(k, tile_offset(step)),
                                                step > 0);
    }
    device::wgmma_commit();
  };
  const auto multiply = [&](const Slot& slot) {
    device::forget(gram);
    device::forget(scores);
    device::wgmma_fence();
    multiply_keys(gram, shared.keys[slot.index].k, slot.index);
    multiply_keys(scores, shared.keys[slot.index].q, slot.index);
  };
  const auto take_products = [&] {
    device::wgmma_wait<0>();
    device::hold(gram);
    device::hold(scores);
  };
  Slot slot;
  Slot pair;
  const auto walk = [&](const Job& w) {
    if (w.chunks == 0) return;
    if (w.kind == Job::link) {
#pragma unroll 1
      for (int left = w.chunks; left > 0; --left) {
        shared.full_keys[slot.index].wait(slot.phase);
        if constexpr (Norm) shared.normed[slot.index].wait(slot.phase);  // to stay in step
        shared.empty_keys[slot.index].arrive();
        shared.used[pair.index].wait(pair.phase ^ 1);
        shared.solved[pair.index].arrive();
        slot.advance(Shape::key_stages);
        pair.advance(Shape::pair_stages);
      }
      return;
    }
    // Of the lead: there, so that it takes no register.
    if (w.lead > 0) shared.log2_growth[32 * own_warp + own] = 0.0F;
    const int none_behind = w.flush ? 1 : 0;  // as many are left where no chunk follows
    if (w.fresh) {
      take_products();  // that nobody looked at
      shared.full_keys[slot.index].wait(slot.phase);
      multiply(slot);
    }
#pragma unroll 1
    for (int left = w.chunks; left > 0; --left) {
      // Addresses are made anew in each turn: kept over all of them, they would not fit.
      asm volatile("" : "+r"(own), "+r"(own_warp));
      const int lane = own;
      const int warp = own_warp;
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
      const auto& to_block_end = shared.to_block_end[slot.index];
      const float gc_row[2] = {gates.log2_gamma[16 * warp + row],
                               gates.log2_gamma[16 * warp + row + 8]};
      float minus_beta[2];  // of this thread's rows
      if constexpr (!Norm) {
        // Halves of pairs.
        const float* const betas = &gates.residual[8 * warp + row / 2].z + row % 2;
        minus_beta[0] = -betas[0];
        minus_beta[1] = -betas[4 * 4];
      }
      shared.used[pair.index].wait(pair.phase ^ 1);
      take_products();
      if constexpr (Norm) {
        norm_keys(shared.gates[slot.index], gram, warp, row, column, minus_beta);
      }
      if (left > w.chunks - w.lead) {  // in the lead
        float& log2_growth = shared.log2_growth[32 * warp + lane];
        if constexpr (Norm) {
          log2_growth += log2_growth_of(gram, warp, [&](int, int h) { return -minus_beta[h]; });
        } else {
          log2_growth += log2_growth_of(gram, gates, warp);
        }
      }
      float scale[2] = {p.scale, p.scale};  // of this thread's rows
      if constexpr (Norm) {
        shared.normed[slot.index].wait(slot.phase);
        const float* const norms = &shared.query_norms[slot.index][16 * warp + row];
        scale[0] *= norms[0];
        scale[1] *= norms[8];
      }
      const std::uint32_t a = device::shared_address(shared.pairs[pair.index].a);
      const std::uint32_t weights = device::shared_address(shared.pairs[pair.index].p);

      // Blocks of 16 columns on and below the diagonal: of P, and of N.
      const auto gate = [&]<bool Diagonal>(int block) {
        device::Slab<2> n;
        device::Slab<2> weight;
        // Off the diagonal the decay is one to the end of the column's block of tokens, and one
        // from there.
        float from_end[2];
        if constexpr (!Diagonal) {
          const float end = gates.log2_gamma[16 * block + 15];
          from_end[0] = device::exp2_approximate(gc_row[0] - end);
          from_end[1] = device::exp2_approximate(gc_row[1] - end);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int j = 2 * block + part;
          const float2 of_columns = *reinterpret_cast<const float2*>(
              &(Diagonal ? gates.log2_gamma : to_block_end)[8 * j + column]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int e = 2 * h + c;
              const float of_column = c == 0 ? of_columns.x : of_columns.y;
              if constexpr (Diagonal) {
                const float decay = device::exp2_approximate(gc_row[h] - of_column);
                // By selection: what is masked may be anything, a NaN included.
                weight.x[part][e] = 8 * part + column + c <= row + 8 * h
                                        ? scale[h] * scores[4 * j + e] * decay
                                        : 0.0F;
                n.x[part][e] = minus_beta[h] * gram[4 * j + e] * decay;
              } else {
                weight.x[part][e] = scale[h] * from_end[h] * (scores[4 * j + e] * of_column);
                n.x[part][e] = minus_beta[h] * from_end[h] * (gram[4 * j + e] * of_column);
              }
            }
          }
        }
        store_block(weights, block, device::to_a<Element>(weight, 0));
        if (!Diagonal && block < 2 && warp >= 2) {
          store_block(a, block, device::to_a<Element>(n, 0));
        } else {
          Inverse::block(shared.inverse, Diagonal ? block : block + 1, block).store(lane, n);
        }
      };
#pragma unroll
      for (int block = 3; block >= 0; --block) {
        if (block < warp) {
          gate.template operator()<false>(block);
        } else if (block == warp) {
          gate.template operator()<true>(block);
        }
        Inverse::announce(warp, block, of_inverse);
      }
      shared.empty_keys[slot.index].arrive();
      const auto emit = [&]<int Count>(int i, int j, int of_block, int column,
                                       const float(&x)[Count]) {
        std::uint32_t words[Count / 2];
#pragma unroll
        for (int c = 0; c < Count / 2; ++c) {
          words[c] = device::pack<Element>(x[2 * c], x[2 * c + 1]);
        }
        const std::uint32_t to = a + (16 * i + of_block) * 128 +
                                 ((2 * j + column / 8 ^ of_block % 8) << 4) + column % 8 * 2;
        if constexpr (Count == 8) {
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                       "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        } else {
          static_assert(Count == 4);
          asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1])
                       : "memory");
        }
      };
      Inverse::run(shared.inverse, warp, lane, of_inverse, emit);
      device::fence_async_proxy();
      shared.solved[pair.index].arrive();
      // The next chunk's products; where there is none yet some that nobody looks at.
      slot.advance(Shape::key_stages);
      if (left > none_behind) shared.full_keys[slot.index].wait(slot.phase);
      multiply(slot);
      pair.advance(Shape::pair_stages);
    }
    if (w.lead > 0 && w.kind == Job::walk) {
      asm volatile("" : "+r"(own), "+r"(own_warp));
      const float sum = segments::sum_of_warp(shared.log2_growth[32 * own_warp + own]);
      if (own == 0) p.segments.log2_growth[4 * blockIdx.x + own_warp] = sum;
    }
  };
  for_each_job(shared.ring, walk);
  take_products();
}

// Stores what the state groups leave in shared memory, by a warp. The first that they leave is that
// of no chunk; of those in front of a share only the state counts.
template <class Element>
__device__ void store_outputs(const WholeParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32;
  Slot slot;
  for_each_job(shared.ring, [&](const Job& w) {
    if (w.chunks == 0 || w.kind == Job::link) return;
    const auto next = [&](auto&& store) {
      shared.written[slot.index].wait(slot.phase);
      store();
      shared.stored[slot.index].arrive();
      slot.advance(Shape::output_stages);
    };
    if (w.fresh) next([] {});
    int token = w.chunk.first_token;
    int tokens = w.chunk.tokens;
#pragma unroll 1
    for (int i = 0; i < w.chunks; ++i) {
      next([&] {
        if (i < w.lead) return;
        store_output_tile<Element, Shape::groups, 32>(
            p.o, p.o_rows, w, shared.output[slot.index][0], token, tokens, lane);
        if (lane == 0) device::store_wait_read();
      });
      token += tokens;
      tokens = min(rows, w.end_token - token);
    }
    // Of a head that may be computed again the rows are to lie before that.
    if (w.first_mark != INT_MAX && lane == 0) device::store_wait();
  });
  if (lane == 0) device::store_wait();
}

__device__ __forceinline__ uint4 load_shared(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// The sums of squares of rows `lane` and `lane` + 32 of a tile of q. Lanes take a row's parts in
// different orders, so that they meet in no bank.
__device__ __forceinline__ float2 square_rows(const std::byte* tile, int lane) {
  std::uint32_t row = device::shared_address(tile) + 128 * lane + 16 * (lane % 8);
  float sums[2][2] = {};
#pragma unroll 1
  for (int panel = 0; panel < 2; ++panel, row += Shape::panel_stride) {
#pragma unroll 1
    for (int part = 0; part < 128; part += 32) {
      uint4 x[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[0][h] = load_shared((row ^ part) + h * 32 * 128);
        x[1][h] = load_shared((row ^ part ^ 16) + h * 32 * 128);
      }
#pragma unroll
      for (int of_row = 0; of_row < 2; ++of_row) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 two = device::unpack<__nv_bfloat16>((&x[of_row][h].x)[word]);
            sums[h][0] += two.x * two.x;
            sums[h][1] += two.y * two.y;
          }
        }
      }
    }
  }
  return {sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]};
}

// r_q, by a warp, two rows a lane, and into the factors of Q S.
__device__ void norm_queries(Shared& shared) {
  const int lane = kept(static_cast<int>(threadIdx.x % 32));
  Slot slot;
  for_each_job(shared.ring, [&](const Job& w) {
#pragma unroll 1
    for (int left = w.chunks; left > 0; --left) {
      shared.full_keys[slot.index].wait(slot.phase);
      if (w.kind != Job::link) {
        const float2 squares = square_rows(shared.keys[slot.index].q, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float norm =
              device::rsqrt_approximate((h == 0 ? squares.x : squares.y) + qk_norm::epsilon);
          shared.query_norms[slot.index][lane + 32 * h] = norm;
          shared.gates[slot.index].query[lane + 32 * h] *= norm;
        }
      }
      shared.normed[slot.index].arrive();
      shared.empty_keys[slot.index].arrive();
      slot.advance(Shape::key_stages);
    }
  });
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

// Of d_k, the first that it has of a state; and the column.
__device__ __forceinline__ int state_row() { return state_thread() % 4 * 2; }
__device__ __forceinline__ int state_column() {
  const int thread = state_thread();
  return thread / 32 * 16 + thread % 32 / 4;
}

// This block's number, in the same way.
__device__ __forceinline__ int block_number() {
  int number;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
  return number;
}

using Half = float[rows / 4];  // 64 value columns x 32 tokens

// States in global memory, the type asked for once a walk rather than once an element: fewer
// instructions to fetch, for which half heads have no registers.

__device__ __forceinline__ void load_typed_state(const device::StatePorts& ports, const Task& w,
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
  device::with_state_type(matrix.dtype, [&]<class T>() {
    const T* const data = static_cast<const T*>(matrix.data);
    for_each_state_pair(matrix, state_row(), column, state,
                        [&](float& x, float& y, std::int64_t offset) {
                          x = static_cast<float>(data[offset]);
                          y = static_cast<float>(data[offset + matrix.k_stride]);
                        });
  });
}

__device__ __forceinline__ void store_typed_state(const device::StatePool& pool, std::int64_t row,
                                                  const Work& w, int column, State& state) {
  if (row < 0) return;
  const device::StateMatrix matrix = pool.matrix(row, w.head);
  device::with_state_type(matrix.dtype, [&]<class T>() {
    T* const data = static_cast<T*>(matrix.data);
    for_each_state_pair(matrix, state_row(), column, state,
                        [&](float x, float y, std::int64_t offset) {
                          data[offset] = static_cast<T>(x);
                          data[offset + matrix.k_stride] = static_cast<T>(y);
                        });
  });
}

// States between shares, in fp32: who stores an element is who loads it in another block, so they
// lie as the threads have them, four elements of one beside those of the next.
using LinkType = __nv_bfloat16;  // of the parts of T and S, whatever the activations' type

__device__ __forceinline__ float4* link_state(const WholeParams& p, int block) {
  return reinterpret_cast<float4*>(p.links.states + block * state_elements) + state_thread();
}
__device__ __forceinline__ void load_link_state(const WholeParams& p, int block, State& state) {
  const float4* from = link_state(p, block);
#pragma unroll
  for (auto& half : state) {
#pragma unroll
    for (int j = 0; j < rows / 2; j += 4, from += Shape::groups * group_threads) {
      const float4 x = __ldcg(from);
      half[j] = x.x;
      half[j + 1] = x.y;
      half[j + 2] = x.z;
      half[j + 3] = x.w;
    }
  }
}
__device__ __forceinline__ void store_link_state(const WholeParams& p, const State& state) {
  float4* to = link_state(p, block_number());
#pragma unroll
  for (const auto& half : state) {
#pragma unroll
    for (int j = 0; j < rows / 2; j += 4, to += Shape::groups * group_threads) {
      *to = {half[j], half[j + 1], half[j + 2], half[j + 3]};
    }
  }
}
// For blocks behind, by both state groups, when both have stored.
__device__ __forceinline__ void announce_left(const WholeParams& p, std::int32_t what) {
  device::named_sync(both_states, Shape::groups * group_threads);
  if (state_thread() == 0) {
    __threadfence();
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p.links.left + block_number()),
                 "r"(what)
                 : "memory");
  }
}
__device__ __forceinline__ void make_identity(int column, State& state) {
  // Offsets that are zero on the diagonal.
  const device::StateMatrix diagonal{nullptr, DType::f32, 0, 1, -1};
  for_each_state_pair(diagonal, state_row(), column, state,
                      [&](float& x, float& y, std::int64_t offset) {
                        x = offset == 0 ? 1.0F : 0.0F;
                        y = offset == -1 ? 1.0F : 0.0F;
                      });
}
// x and y in two parts of 16 bits each.
__device__ __forceinline__ uint2 split(float x, float y) {
  const std::uint32_t high = device::pack<LinkType>(x, y);
  const float2 rounded = device::unpack<LinkType>(high);
  return {high, device::pack<LinkType>(x - rounded.x, y - rounded.y)};
}
// T, which the state groups have as if it were a state, for `link` to load: the high parts and then
// the low ones, each as two tiles of keys, whose tokens are the columns.
__device__ __forceinline__ void store_transfer(const WholeParams& p, int column, State& state) {
  const int swizzle = column % 8 << 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int v = column + 8 * h;
    std::byte* to = p.links.transfers + block_number() * transfer_bytes +
                    v / rows * 2 * panel_bytes + v % rows * 128 + state_row() * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint2 parts = split(state[half][4 * j + 2 * h], state[half][4 * j + 2 * h + 1]);
        std::byte* const at = to + ((j << 4) ^ swizzle);
        *reinterpret_cast<std::uint32_t*>(at) = parts.x;
        *reinterpret_cast<std::uint32_t*>(at + transfer_bytes / 2) = parts.y;
        // One address at a time, as in for_each_state_pair.
        asm volatile("" : "+l"(to));
      }
      to += panel_bytes;
    }
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}
// The parts that a block has left to where chunks come to, one as if it were a chunk; by a warp.
__device__ __forceinline__ void produce_transfer(const WholeParams& p, int block, Shared& shared,
                                                 Slot& slot) {
  const std::byte* from = p.links.transfers + block * transfer_bytes;
  asm volatile("fence.proxy.async;" ::: "memory");  // other threads have stored them
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    Barrier& full = shared.full_keys[slot.index];
    shared.empty_keys[slot.index].wait(slot.phase ^ 1);
    if (threadIdx.x % 32 == 0) {
      full.arrive_expect(transfer_bytes / 2);
      device::load_bytes(shared.keys[slot.index].q, from, transfer_bytes / 2, full);
      from += transfer_bytes / 2;
    }
    full.arrive();
    slot.advance(Shape::key_stages);
  }
}

template <class Element, bool Checkpoints, bool Norm>
__device__ void keep_states(const WholeParams& p, Shared& shared, int group) {
  constexpr int held = Shape::held_factors;
  const std::uint32_t value_offset =
      kept(static_cast<int>(value_address_offset(state_thread()) + group * panel_bytes));

  State state;
  // S^T Q^T and S^T K^T: this order, as what lives longer is to have the lower registers.
  float products[rows];
  Accumulators& o = reinterpret_cast<Accumulators&>(products[0]);
  Accumulators& ks = reinterpret_cast<Accumulators&>(products[rows / 2]);
  Half first, second;                // V'^T of the halves
  std::uint32_t s[steps_of_dim][4];  // S^T as A operands
  Fragments residual;                // V^T, then R^T
  Fragments plain;                   // V'^T
  int i = 0;                         // chunks of this block so far

  const auto pack_state = [&](int half) {
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; ++step) {
      pack_step<Element>(s[step], &state[step / 4][step % 4 * 8]);
    }
  };
  // S^T times the rows of q and k, over one half of d_k.
  const auto multiply_state = [&](std::uint64_t x, int half) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; ++step) {
      device::wgmma_step<Element, false>(products, s[step],
                                         device::descriptor_at(x, tile_offset(step)), step > 0);
    }
  };
  // max |S| in front of chunk i, for the check of shares; under products, none of which has S
  // itself.
  const auto record = [&](const Job& w) {
    // As bits, by which a NaN is more than any number: the largest of those that are not negative,
    // and of all with the sign in front those that are, if any.
    std::int32_t positive = 0;
    std::uint32_t all = 0;
#pragma unroll
    for (const auto& half : state) {
#pragma unroll
      for (int j = 0; j < rows / 2; j += 2) {
        const float x = half[j];
        const float y = half[j + 1];
        positive = __vimax3_s32(positive, __float_as_int(x), __float_as_int(y));
        all = __vimax3_u32(all, __float_as_uint(x), __float_as_uint(y));
      }
    }
    std::uint32_t most = max(static_cast<std::uint32_t>(positive), all & 0x7fffffffU);
    most = __reduce_max_sync(~0U, most);
    const int thread = state_thread();
    if (thread % 32 == 0) {
      const std::int64_t chunk = w.first_chunk + i - w.number;
      p.segments.marks[(chunk * p.heads.v + w.head) * SegmentPlan::parts + thread / 32] =
          __uint_as_float(most);
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
  // S becomes T S + U of a block in front: three products of parts, for the precision of fp32. The
  // groups take turns on the tensor cores: one splits and loads while the other multiplies.
  const auto link = [&](const Job& w) {
    asm volatile("" : "+r"(i));  // so that no address is made ahead of jobs and kept
    std::uint32_t high[steps_of_dim][4], low[steps_of_dim][4];
#pragma unroll
    for (int step = 0; step < steps_of_dim; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const x = &state[step / 4][step % 4 * 8 + 2 * e];
        const uint2 parts = split(x[0], x[1]);
        high[step][e] = parts.x;
        low[step][e] = parts.y;
      }
    }
    load_link_state(p, w.block, state);
    const int stage[2] = {slot_of<Shape::key_stages>(i).index,
                          slot_of<Shape::key_stages>(i + 1).index};
    const auto multiply = [&](const std::uint32_t(&x)[steps_of_dim][4], int stage, int half) {
      const std::uint64_t t =
          device::descriptor_mn_major(device::shared_address(shared.keys[stage].q), panel_bytes);
#pragma unroll
      for (int step = 0; step < steps_of_dim; ++step) {
        device::wgmma_step<LinkType, true>(
            state[half], x[step],
            device::descriptor_at(t, (step / 4 * 2 + half) * panel_bytes + step % 4 * 2048));
      }
    };
    shared.full_keys[stage[0]].wait(slot_of<Shape::key_stages>(i).phase);
    const bool first_group = state_thread() < group_threads;
    if (!first_group) device::named_sync(first_linked, Shape::groups * group_threads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::wgmma_fence();  // of each half, whose U may be there first
      multiply(low, stage[0], half);
      multiply(high, stage[0], half);
    }
    device::wgmma_commit();
    shared.full_keys[stage[1]].wait(slot_of<Shape::key_stages>(i + 1).phase);
    device::wgmma_fence();
    multiply(high, stage[1], 0);
    multiply(high, stage[1], 1);
    device::wgmma_commit();
    device::wgmma_wait<1>();
    shared.empty_keys[stage[0]].arrive();
    device::wgmma_wait<0>();
    device::hold(state[0]);
    device::hold(state[1]);
    shared.empty_keys[stage[1]].arrive();
    if (first_group) device::named_arrive(first_linked, Shape::groups * group_threads);
#pragma unroll
    for (int part = 0; part < 2; ++part, ++i) {
      // Nothing of the pair is read, but its phases are to stay in step.
      const Slot pair = slot_of<Shape::pair_stages>(i);
      shared.solved[pair.index].wait(pair.phase);
      shared.used[pair.index].arrive();
    }
  };
  const auto walk = [&](const Job& w) {
    if (w.kind == Job::hand_on) {
      hand_state_on<Shape>(p, w, state_thread(), Shape::groups * group_threads);
      return;
    }
    if (w.kind == Job::leave) {
      if (w.part == Job::transfer) {
        store_transfer(p, state_column(), state);
      } else {
        store_link_state(p, state);
      }
      if (w.part != Job::added) {
        announce_left(p, w.part == Job::transfer ? Links::transfer_left : Links::state_left);
      }
      return;
    }
    if (w.kind == Job::take) {
      load_link_state(p, w.block, state);
      return;
    }
    if (w.kind == Job::link) {
      link(w);
    } else if (w.part == Job::transfer) {
      make_identity(state_column(), state);
    } else if (!w.linked) {
      load_typed_state(p.state, w, state_column(), state);
    }
#pragma unroll 1
    for (const int end = w.number + w.chunks; i < end; ++i) {
      const int quad = value_offset / 128 % 4;  // the thread's number % 4
      const Slot slot = slot_of<Shape::key_stages>(i);
      const Slot pair = slot_of<Shape::pair_stages>(i);
      const Gates& gates = shared.gates[slot.index];
      const std::uint64_t k = device::descriptor_mn_major(
          device::shared_address(shared.keys[slot.index].k), Shape::panel_stride);
      const std::uint64_t rows_of_both =
          device::descriptor_k_major(device::shared_address(shared.keys[slot.index].q));
      const std::uint64_t a =
          device::descriptor_k_major(device::shared_address(shared.pairs[pair.index].a));
      const std::uint64_t weights =
          device::descriptor_k_major(device::shared_address(shared.pairs[pair.index].p));

      // K S and Q S.
      const int output = i + w.outputs;
      const bool records = i >= w.first_mark;
      device::wgmma_wait<0>();
      device::hold(state[0]);
      device::hold(state[1]);
      wait_stored(output);
      shared.full_keys[slot.index].wait(slot.phase);
      device::forget(products);
      pack_state(0);
      multiply_state(rows_of_both, 0);
      pack_state(1);
      multiply_state(rows_of_both, 1);
      device::wgmma_commit();
      copy_output(output);
      if (records) record(w);
      announce_output(output);
      {
        const float fade = gates.fade;
#pragma unroll
        for (auto& half : state) {
#pragma unroll
          for (float& x : half) x *= fade;
        }
      }
      const std::uint32_t v = device::shared_address(shared.keys[slot.index].v) + value_offset;
      load_value_step(residual[0], v);
      load_value_step(residual[1], v + 2048);
      float4 factor[held];
      const auto first_factors = [&] {
#pragma unroll
        for (int j = 0; j < held; ++j) factor[j] = gates.residual[4 * j + quad];
      };
      if constexpr (!Norm) first_factors();
      const auto next_factors = [&](int step) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (2 * step + held + j < rows / 8) {
            factor[(2 * step + j) % held] = gates.residual[4 * (2 * step + held + j) + quad];
          }
        }
      };
      shared.solved[pair.index].wait(pair.phase);
      if constexpr (Norm) first_factors();  // which r_k has become part of
      device::wgmma_wait<0>();
      device::hold(products);

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
#pragma unroll
      for (int j = 0; j < rows / 8; ++j) {
        const float2 f = *reinterpret_cast<const float2*>(&gates.query[8 * j + 2 * quad]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          o[4 * j + 2 * h] *= f.x;
          o[4 * j + 2 * h + 1] *= f.y;
        }
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
        device::wgmma_fence();
#pragma unroll
        for (int step = begin; step < end; ++step) {
          device::wgmma_step<Element, true>(
              state[half], decayed[step],
              device::descriptor_at(k, half * Shape::panel_stride + step * 2048));
        }
      };
      const auto add_values = [&](int half) {
        device::wgmma_fence();
#pragma unroll
        for (int step = 2 * half; step < 2 * half + 2; ++step) {
          device::wgmma_step<Element, false>(o, plain[step],
                                             device::descriptor_at(weights, step * 32));
        }
      };
      load_decays(0);
      device::wgmma_wait<0>();
      device::hold(first);

      // L V'_1
      pack_values(0);
      decay_values(0);
      device::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        device::wgmma_step<Element, false>(second, plain[step],
                                           device::descriptor_at(a, 4096 + step * 32));
      }
      device::wgmma_commit();
      update(0, 0, 2);
      update(1, 0, 2);
      add_values(0);
      device::wgmma_commit();
      load_decays(1);
      device::wgmma_wait<1>();
      device::hold(second);

      // V'_2 = A_2 (R_2 + L V'_1)
      device::forget(first);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        pack_step<Element>(residual[2 + step], &second[8 * step]);
        multiply_step<Element, false>(first, residual[2 + step],
                                      device::descriptor_at(a, 4096 + 64 + step * 32), step > 0);
      }
      device::wgmma_commit();
      device::wgmma_wait<0>();
      device::hold(first);
      device::hold(o);
      device::hold(state[0]);
      device::hold(state[1]);

      // S and P V'
      decay_values(1);
      update(0, 2, 4);
      device::wgmma_commit();
      pack_values(1);
      add_values(1);
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
      if constexpr (Checkpoints) {
        const int number = i - w.number;
        if (number >= w.lead) {
          const device::Chunk chunk{w.sequence, 0, 0,
                                    w.first_number + (w.first_chunk - w.first) + number};
          store_typed_state(p.state.checkpoints,
                            checkpoint_row(p.state, p.checkpoint_offsets, chunk, w.first_number), w,
                            state_column(), state);
        }
      }
    }
    if (w.flush) {
      const int output = i + w.outputs;
      wait_stored(output);
      copy_output(output);
      announce_output(output);
    }
    if (!w.to_end) return;
    if (w.waiting_row >= 0) {
      store_typed_state(p.waiting, w.waiting_row, w, state_column(), state);
    } else {
      store_typed_state(p.state.final, p.state.final_row(w.sequence), w, state_column(), state);
    }
  };
  for_each_job(shared.ring, walk);
}

// ---------------------------------------------------------------------------------------------

template <class Element, bool Checkpoints, bool Norm>
__global__ void __launch_bounds__(Shape::threads, 1)
    whole_head_kernel(const __grid_constant__ WholeParams p) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    init_barriers<Norm>(shared);
    init_rehearsal(shared.ring);
    device::fence_barrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / group_threads;
  if (group == 0) {
    device::give_registers<Shape::producer_registers>();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        device::prefetch_map(p.k);
        device::prefetch_map(p.v);
        device::prefetch_map(p.q);
        device::prefetch_map(p.o);
      }
      Slot slot;
      for_each_job(shared.ring, [&](const Job& w) {
        if (w.kind == Job::walk) {
          // The state groups read it only when they are done with what comes before.
          if (threadIdx.x == 0 && w.from_start && w.part == Job::state) {
            device::prefetch_state(p.state.initial, p.state.initial_row(w.sequence), w.head, dim,
                                   state_elements);
          }
          produce_keys<Shape>(p, w, shared, slot);
        } else if (w.kind == Job::link) {
          produce_transfer(p, w.block, shared, slot);
        } else if (w.kind == Job::rehearse) {
          if (threadIdx.x == 0) shared.full_keys[slot.index].arrive();
          shared.full_keys[slot.index].arrive();
          slot.advance(Shape::key_stages);
        }
      });
      device::allow_successors();
    } else if (threadIdx.x < 64) {
      store_outputs<Element>(p, shared);
    } else if (threadIdx.x < 96) {
      Scheduler(p, shared.ring).run();
    } else if constexpr (Norm) {
      norm_queries(shared);
    }
  } else if (group == 1) {
    device::give_registers<Shape::preparing_registers>();
    prepare<Element, Norm>(p, shared);
  } else {
    device::take_registers<Shape::state_registers>();
    keep_states<Element, Checkpoints, Norm>(p, shared, group - 2);
  }
}

}  // namespace

void whole_head(const WholeParams& params, const Problem& problem, bool norm, std::int64_t blocks,
                StepList& out) {
  const auto add = [&]<class Element, bool Checkpoints, bool Norm>() {
    out.push_back(
        programmatic(kernel_step("one_pass", whole_head_kernel<Element, Checkpoints, Norm>,
                                 grid_of(blocks), {Shape::threads}, sizeof(Shared), params)));
  };
  const auto add_for = [&]<class Element, bool Norm>() {
    params.state.checkpoint_chunks > 0 ? add.template operator()<Element, true, Norm>()
                                       : add.template operator()<Element, false, Norm>();
  };
  if (problem.activation == DType::f16) {
    add_for.template operator()<__half, false>();
  } else if (norm) {
    add_for.template operator()<__nv_bfloat16, true>();
  } else {
    add_for.template operator()<__nv_bfloat16, false>();
  }
}

}  // namespace gdnflow::stages::one_pass
