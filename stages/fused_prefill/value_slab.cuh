#pragma once

#include "device/gates.cuh"
#include "device/mma.cuh"
#include "device/state_io.cuh"
#include "device/swizzled_tile.cuh"
#include "fused.cuh"

#include <cstdint>

// The mathematics of a chunk for one warp, on 16 value columns: a slab. Everything recurrent is
// kept transposed, so that it never leaves the warp's registers:
//
//   S^T [16, D]      accumulators of the update; rounded, the left operand of S^T K^T and, since
//   the
//                    layouts agree, the right operand of Q S
//   R^T [16, 64]     accumulators of S^T K^T; rounded, the left operand of R^T A^T
//   V'^T [16, 64]    accumulators of R^T A^T; rounded, the right operand of P V'; decayed and
//                    rounded, the left operand of the state's update
//
// Warps share the tiles in shared memory (K, Q, A, P) and nothing else. The factors gamma, beta and
// decay are applied to fp32 accumulators, never to an operand that was rounded before.

namespace gdnflow::stages::fused_prefill {

using device::FragmentA;
using device::FragmentB;
using device::MatrixCursor;
using device::MatrixOrder;
using device::Slab;
using device::SwizzledTile;

constexpr int slab_columns = 16;
constexpr int token_steps = chunk_rows / 16;

/// An operand from the block at (`row`, `column`) of a cursor's tile.
template <class Fragment, int Columns>
__device__ __forceinline__ Fragment load(const MatrixCursor<Columns>& cursor, int row, int column) {
  Fragment fragment;
  device::load_matrix_x4(fragment.x, cursor.at(row, column));
  return fragment;
}
/// The same of the block's transposed matrices.
template <class Fragment, int Columns>
__device__ __forceinline__ Fragment load_transposed(const MatrixCursor<Columns>& cursor, int row,
                                                    int column) {
  Fragment fragment;
  device::load_matrix_x4_transposed(fragment.x, cursor.at(row, column));
  return fragment;
}

/// Q S, P V' and O of a slab, not transposed: 16 tokens m, its two octets of value columns.
using OutputSlab = Slab<2>;

// ---------------------------------------------------------------------------------------------
// State in global memory.

/// f(element of the slab, offset from the pool's first element)
template <int N, class F>
__device__ __forceinline__ void for_each_state_offset(Slab<N>& state,
                                                      const device::StateMatrix& matrix,
                                                      int first_column, F&& f) {
  const int k = device::lane() % 4 * 2;
  const int v = first_column + device::lane() / 4;
  std::int64_t offset = matrix.offset + k * matrix.k_stride + v * matrix.v_stride;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f(state.x[n][i], offset + i % 2 * matrix.k_stride + i / 2 * 8 * matrix.v_stride);
    }
    offset += 8 * matrix.k_stride;
    // One octet's offset at a time: all of them at once would not fit beside the state.
    asm volatile("" : "+l"(offset));
  }
}

/// f(matrix.data as a pointer to its type). Outside of the loop over elements: a branch for each
/// would make it wait for its own load.
template <class F>
__device__ __forceinline__ void with_state_type(const device::StateMatrix& matrix, F&& f) {
  if (matrix.dtype == DType::f32) {
    f(static_cast<float*>(matrix.data));
  } else if (matrix.dtype == DType::bf16) {
    f(static_cast<__nv_bfloat16*>(matrix.data));
  } else {
    f(static_cast<__half*>(matrix.data));
  }
}

/// Row `row` of a pool, or zero where it is negative.
template <int N>
__device__ __forceinline__ void load_state(Slab<N>& state, const device::StatePool& pool,
                                           std::int64_t row, int head, int first_column) {
  state.clear();
  if (row < 0) return;
  const device::StateMatrix matrix = pool.matrix(row, head);
  with_state_type(matrix, [&]<class E>(const E* data) {
    for_each_state_offset(state, matrix, first_column, [&](float& x, std::int64_t offset) {
      x = static_cast<float>(data[offset]);
    });
  });
}

/// To row `row` of a pool; to nowhere where it is negative.
template <int N>
__device__ __forceinline__ void store_state(Slab<N>& state, const device::StatePool& pool,
                                            std::int64_t row, int head, int first_column) {
  if (row < 0) return;
  const device::StateMatrix matrix = pool.matrix(row, head);
  with_state_type(matrix, [&]<class E>(E* data) {
    for_each_state_offset(state, matrix, first_column,
                          [&](float& x, std::int64_t offset) { data[offset] = static_cast<E>(x); });
  });
}

// ---------------------------------------------------------------------------------------------
// P = scale tril(exp(gc_i - gc_j) <q_i, k_j>): eight jobs, spread over a block's warps.

/// Tokens 16 M to 16 M + 15 against one half of the columns that they attend to: M + 1 octets.
template <class T, int D, int M, class PTile>
__device__ __forceinline__ void attend(const MatrixCursor<D>& q, const MatrixCursor<D>& k, PTile& p,
                                       const Gates& gates, float scale, int half) {
  const int first = half * 8 * (M + 1);
  Slab<M + 1> scores;
  scores.clear();
#pragma unroll
  for (int d = 0; d < D; d += 32) {
    const auto a0 = load<FragmentA>(q, 16 * M, d);
    const auto a1 = load<FragmentA>(q, 16 * M, d + 16);
#pragma unroll
    for (int n = 0; n <= M; ++n) {
      const auto b = load<FragmentB>(k, first + 8 * n, d);  // an octet of tokens, 32 of d_k
      device::mma_16x8x16<T>(scores.x[n], a0.x, b.x[0], b.x[1]);
      device::mma_16x8x16<T>(scores.x[n], a1.x, b.x[2], b.x[3]);
    }
  }
  scores.for_each_pair([&](int r, int c, float x0, float x1) {
    const int i = 16 * M + r;
    const int j = first + c;
    const float gc = gates.gc[i];
    const float2 gc_j = *reinterpret_cast<const float2*>(&gates.gc[j]);
    // The mask comes before the exponential: above the diagonal the difference is positive.
    const float log_0 = j <= i ? gc - gc_j.x : 0.0F;
    const float log_1 = j + 1 <= i ? gc - gc_j.y : 0.0F;
    x0 *= scale * device::exp2_approximate(log_0 * device::log2_e);
    x1 *= scale * device::exp2_approximate(log_1 * device::log2_e);
    *reinterpret_cast<std::uint32_t*>(p.at(i, j)) =
        device::pack<T>(j <= i ? x0 : 0.0F, j + 1 <= i ? x1 : 0.0F);
  });
}

/// A warp's jobs. Job i < 4 is the first half of token tile i, the others the second halves in
/// reverse, which gives four warps the same work, and eight warps the same work in pairs. Blocks
/// of P above the diagonal are neither written nor read.
template <class T, int D, int Warps, class PTile>
__device__ __forceinline__ void attend_jobs(const SwizzledTile<T, chunk_rows, D>& q_tile,
                                            const SwizzledTile<T, chunk_rows, D>& k_tile, PTile& p,
                                            const Gates& gates, float scale, int warp) {
  static_assert(Warps == 4 || Warps == 8);
  const MatrixCursor q(q_tile, MatrixOrder::down_right);
  const MatrixCursor k(k_tile, MatrixOrder::right);
#pragma unroll
  for (int i = 0; i < 8; i += Warps) {
    const int job = warp + i;
    const int half = job / 4;
    switch (half == 0 ? job : 7 - job) {
      case 0:
        attend<T, D, 0>(q, k, p, gates, scale, half);
        break;
      case 1:
        attend<T, D, 1>(q, k, p, gates, scale, half);
        break;
      case 2:
        attend<T, D, 2>(q, k, p, gates, scale, half);
        break;
      default:
        attend<T, D, 3>(q, k, p, gates, scale, half);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// The chain of a chunk.

/// c[16 tokens, 16 columns] += a[16 tokens, 16] b[16, 16 columns], with b given transposed, as the
/// fragment of the slab.
template <class T>
__device__ __forceinline__ void multiply_add_slab(OutputSlab& c, const FragmentA& a,
                                                  const FragmentA& b_transposed) {
  device::mma_16x8x16<T>(c.x[0], a.x, b_transposed.x[0], b_transposed.x[2]);
  device::mma_16x8x16<T>(c.x[1], a.x, b_transposed.x[1], b_transposed.x[3]);
}

/// Columns k to k + 15 of S^T times those of K, for the tokens from `first` on.
/// `keys` goes over K in the order `right_down`.
template <class T, int N, int D>
__device__ __forceinline__ void multiply_keys(Slab<N>& product, const FragmentA& state,
                                              const MatrixCursor<D>& keys, int k, int first = 0) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    const auto b = load<FragmentB>(keys, first + 8 * n, k);
    device::mma_16x8x16<T>(product.x[n], state.x, b.x[0], b.x[1]);
    device::mma_16x8x16<T>(product.x[n + 1], state.x, b.x[2], b.x[3]);
  }
}

struct TokenFragments {
  FragmentA x[token_steps];  ///< 16 value columns x 16 tokens each
};

/// R^T = beta .* (V^T - gamma .* (S^T K^T)), rounded: columns 16 `step` of the product, which are
/// tokens from `token` on.
/// `v_slab` goes over the slab's columns of V in the order `right_down`.
template <class T, int N, int Tile>
__device__ __forceinline__ FragmentA residual(const Slab<N>& product, int step,
                                              const MatrixCursor<Tile>& v_slab, const Gates& gates,
                                              int token) {
  const auto v = load_transposed<FragmentA>(v_slab, token, 0);
  FragmentA r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = token + 8 * h + device::lane() % 4 * 2;
    const float2 gamma = *reinterpret_cast<const float2*>(&gates.gamma[at]);
    const float2 beta = *reinterpret_cast<const float2*>(&gates.beta[at]);
    const float(&x)[4] = product.x[2 * step + h];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 value = device::unpack<T>(v.x[2 * h + j]);
      r.x[2 * h + j] = device::pack<T>(beta.x * (value.x - gamma.x * x[2 * j]),
                                       beta.y * (value.y - gamma.y * x[2 * j + 1]));
    }
  }
  return r;
}

/// V'^T = R^T A^T of token steps `First` to `First` + `Steps` - 1; A is lower triangular, so tokens
/// i need the residuals of j <= i alone. `inverse` goes over A in the order `right_down`.
template <class T, int First, int Steps>
__device__ __forceinline__ Slab<2 * Steps> new_values(const TokenFragments& r,
                                                      const MatrixCursor<chunk_rows>& inverse) {
  Slab<2 * Steps> values;
  values.clear();
#pragma unroll
  for (int j = 0; j < First + Steps; ++j) {
#pragma unroll
    for (int i = j < First ? First : j; i < First + Steps; ++i) {
      const auto b = load<FragmentB>(inverse, 16 * i, 16 * j);
      const int n = 2 * (i - First);
      device::mma_16x8x16<T>(values.x[n], r.x[j].x, b.x[0], b.x[1]);
      device::mma_16x8x16<T>(values.x[n + 1], r.x[j].x, b.x[2], b.x[3]);
    }
  }
  return values;
}

/// decay .* V'^T, rounded: columns 16 `step` of the slab, which are tokens from `token` on.
template <class T, int N>
__device__ __forceinline__ FragmentA decayed(const Slab<N>& values, int step, const Gates& gates,
                                             int token) {
  FragmentA fragment;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 decay =
        *reinterpret_cast<const float2*>(&gates.decay[token + 8 * h + device::lane() % 4 * 2]);
    const float(&x)[4] = values.x[2 * step + h];
    fragment.x[2 * h] = device::pack<T>(decay.x * x[0], decay.y * x[1]);
    fragment.x[2 * h + 1] = device::pack<T>(decay.x * x[2], decay.y * x[3]);
  }
  return fragment;
}

/// S^T <- exp(gc_l) S^T + (decay .* V'^T) K.
template <class T, int D>
__device__ __forceinline__ void update_state(Slab<D / 8>& state, const TokenFragments& values,
                                             const SwizzledTile<T, chunk_rows, D>& k_tile,
                                             const Gates& gates) {
  const MatrixCursor keys(k_tile, MatrixOrder::down_right);
  const float gamma = gates.gamma[chunk_rows - 1];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.x[n][i] *= gamma;
  }
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      const auto b = load_transposed<FragmentB>(keys, 16 * step, 8 * n);
      device::mma_16x8x16<T>(state.x[n], values.x[step].x, b.x[0], b.x[1]);
      device::mma_16x8x16<T>(state.x[n + 1], values.x[step].x, b.x[2], b.x[3]);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Output.

/// scale gamma .* (Q S) of the tokens from `first` on.
__device__ __forceinline__ void scale_output(OutputSlab& o, const Gates& gates, float scale,
                                             int first) {
  const int row = first + device::lane() / 4;
  const float low = scale * gates.gamma[row];
  const float high = scale * gates.gamma[row + 8];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    o.x[n][0] *= low;
    o.x[n][1] *= low;
    o.x[n][2] *= high;
    o.x[n][3] *= high;
  }
}

/// Rounds and stores tokens `first` to `first + 15` of a chunk; rows past its end are left out.
template <class T>
__device__ __forceinline__ void store_output(OutputSlab& o, const Params<T>& p, const Place& place,
                                             const device::Chunk& chunk, int first, int column) {
  T* rows = p.o.row(chunk.first_token, place.head) + place.column + column;
  o.for_each_pair([&](int r, int c, float x0, float x1) {
    const int row = first + r;
    if (row < chunk.tokens) {
      *reinterpret_cast<std::uint32_t*>(rows + row * p.o.token_stride + c) =
          device::pack<T>(x0, x1);
    }
  });
}

}  // namespace gdnflow::stages::fused_prefill
