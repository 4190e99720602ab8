#pragma once

#include "device/barrier.cuh"
#include "device/mma.cuh"
#include "device/tril_blocks.cuh"

#include <cstdint>

// The inverse of a 64x64 unit lower triangular matrix by the four warps of a warp group, for the
// shortest time from matrix to inverse; warp_tril_inverse.cuh makes the same by one warp, for the
// fewest instructions.
//
//   With M = I - N, N strictly lower triangular, in blocks of 16, warp w given column w of N's
//   blocks and two meetings of the group:
//
//          warp 0                  warp 1              warp 2 (l = 0), warp 3 (l = 1)
//          D_0                     D_1                 D_2, D_3
//     --------------------------- meeting ------------------------------------
//          X_10 = D_1 N_10 D_0     X_21 = D_2 N_21 D_1   X_32 = D_3 N_32 D_2
//          T_20 = D_2 N_20         T_21 = D_2 N_21       T_3l = D_3 N_3l + X_32 N_2l
//     --------------------------- meeting ------------------------------------
//          X_20 = T_20 D_0                             X_30 = T_30 D_0 + T_31 X_10
//               + T_21 X_10                            X_31 = T_31 D_1
//
// D_b = (I - N_bb)^-1 by substitution in fp32 registers; products as in tril_blocks.cuh. On the
// longest way lie one substitution and five products. The partial products of each have
// accumulators of their own, since one that waits for another takes as long as all of them side by
// side.

namespace gdnflow::device {

struct GroupTrilInverse {
  static constexpr int blocks = 4;
  static constexpr int threads = 128;

  /// Split rows as registers hold them, for other warps.
  struct RowsOfRegisters {
    uint4 high[32], low[32];

    __device__ __forceinline__ void store_if(bool wanted, const SplitRows& rows) {
      device::store_if(wanted, &high[lane()], rows.high);
      device::store_if(wanted, &low[lane()], rows.low);
    }
    __device__ __forceinline__ void store(const SplitRows& rows) { store_if(true, rows); }
    __device__ __forceinline__ SplitRows load() const {
      const uint4 h = high[lane()];
      const uint4 l = low[lane()];
      return {{{h.x, h.y, h.z, h.w}}, {{l.x, l.y, l.z, l.w}}};
    }
  };

  struct Storage {
    FactorBlock factor[blocks];     // a warp's own each
    SplitBlock inverse[2][blocks];  // D_b^T; in turn, since the last products of a matrix may still
                                    // read it when the next one's is there
    RowsOfRegisters below[6];       // N_ij^T, number i (i - 1) / 2 + j
    RowsOfRegisters t[2];           // T_21, T_31
    SplitBlock x10;

    __device__ __forceinline__ RowsOfRegisters& n(int i, int j) {
      return below[i * (i - 1) / 2 + j];
    }
  };

  /// First half, for warp `w` of the group: takes column w of N, by the transposes of its blocks.
  /// factor(i), i a compile-time constant, gives that of block (i, w): row r, column c of the slab
  /// is N[16 i + c][16 w + r]. Only what is strictly below N's diagonal is looked at, but factor is
  /// called for every i: without branches the blocks run side by side.
  template <class Factor>
  __device__ __forceinline__ static void take(Storage& storage, int w, Factor&& factor) {
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
      const Slab<2> block = factor(i);
      storage.factor[w].store_transposed_if(i == w, block);
      if (i > 0) {
        // For i <= w nothing is stored, wherever it would go.
        RowsOfRegisters& place = storage.below[i * (i - 1) / 2 + (w < i ? w : 0)];
        place.store_if(i > w, split_rows(block));
      }
    }
    __syncwarp();
  }

  /// Second half: inverts. `turn` alternates from matrix to matrix, `barrier` is a named barrier of
  /// the group's own. emit(i, j, rows) takes block (i, j) of the inverse, rounded to T, as rows; it
  /// is called for each i >= j by one warp.
  template <class T, class Emit>
  __device__ __forceinline__ static void invert(Storage& storage, int w, int turn, int barrier,
                                                Emit&& emit) {
    SplitBlock* const inverse = storage.inverse[turn];
    invert_diagonal_block(storage.factor[w], inverse[w]);
    __syncwarp();
    named_sync(barrier, threads);

    // One text for all warps, with operands by number: the instructions of four would not fit in
    // the caches beside those of other groups.
    const int a = min(w + 1, 3);
    const int l = w == 3 ? 1 : w % 2;  // column of T
    const Slab<2> x =
        product(split_rows(product(inverse[a].load_transposed(), storage.n(a, a - 1).load())),
                inverse[a - 1].load());  // X_10, X_21, X_32, X_32
    if (w < 3) emit(a, a - 1, to_a<T>(x, 0));
    emit(w, w, round_rows<T>(inverse[w].load_transposed()));
    const SplitRows x_rows = split_rows(x);
    if (w == 0) storage.x10.store(x_rows);
    const int e = w < 2 ? 2 : 3;  // row of T
    Terms sum;
    sum.add(inverse[e].load_transposed(), storage.n(e, l).load());
    if (w >= 2) sum.add(x_rows, storage.n(2, l).load());
    const SplitRows t = split_rows(sum.total());
    if (w % 2 == 1) storage.t[e - 2].store(t);
    named_sync(barrier, threads);

    if (w != 1) {
      Terms last;
      last.add(t, inverse[w == 3 ? 1 : 0].load());
      if (w != 3) last.add(storage.t[e - 2].load(), storage.x10.load_transposed());
      emit(e, w == 3 ? 1 : 0, to_a<T>(last.total(), 0));
    }
  }

 private:
  /// Sums of products x y^T.
  struct Terms {
    Slab<2> low_high, high_low, high_high;

    __device__ __forceinline__ Terms() {
      low_high.clear();
      high_low.clear();
      high_high.clear();
    }
    __device__ __forceinline__ static void add(Slab<2>& c, const FragmentA& x, const FragmentA& y) {
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_16x8x16<__nv_bfloat16>(c.x[n], x.x, y.x[n], y.x[n + 2]);
    }
    __device__ __forceinline__ void add(const SplitRows& x, const SplitRows& y) {
      add(low_high, x.low, y.high);
      add(high_low, x.high, y.low);
      add(high_high, x.high, y.high);
    }
    __device__ __forceinline__ Slab<2> total() const {
      Slab<2> sum;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum.x[n][i] = (low_high.x[n][i] + high_low.x[n][i]) + high_high.x[n][i];
        }
      }
      return sum;
    }
  };

  __device__ __forceinline__ static Slab<2> product(const SplitRows& x, const SplitRows& y) {
    Terms terms;
    terms.add(x, y);
    return terms.total();
  }

  /// Solves (I - N_bb) x = e_c, lanes c and c + 16 for column c alike; each stores half of it.
  /// Columns of N are asked for `ahead` steps before their use.
  __device__ __forceinline__ static void invert_diagonal_block(FactorBlock& factor,
                                                               SplitBlock& inverse) {
    constexpr int ahead = 3;
    const int c = lane() % 16;
    float n[ahead + 1][16];
#pragma unroll
    for (int k = 0; k < ahead; ++k) factor.load_column(n[k], k);
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == c ? 1.0F : 0.0F;
#pragma unroll
    for (int k = 0; k < 15; ++k) {
      if (k + ahead < 15) factor.load_column(n[(k + ahead) % (ahead + 1)], k + ahead);
#pragma unroll
      for (int i = k + 1; i < 16; ++i) x[i] += n[k % (ahead + 1)][i] * x[k];
    }
    const bool upper = lane() >= 16;
    float half[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) half[i] = upper ? x[i + 8] : x[i];
    inverse.store_half_row(c, upper ? 1 : 0, half);
  }
};

}  // namespace gdnflow::device
