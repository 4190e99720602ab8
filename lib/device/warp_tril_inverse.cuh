#pragma once

#include "device/mma.cuh"
#include "device/tril_blocks.cuh"

// The inverse of a 64x64 unit lower triangular matrix by one warp, on tensor cores.
//
//   With M = I - N, N strictly lower triangular, in blocks of 16:
//     D_b = (I - N_bb)^-1                                       substitution in fp32 registers
//     X_10 = (D_1 N_10) D_0,   X_32 = (D_3 N_32) D_2            16 -> 32
//     X_ij = sum_l (sum_k X_ik N_kl) X_lj,  i = 2, 3, j = 0, 1  32 -> 64, X_bb = D_b
//
// Products are those of tril_blocks.cuh, c += x y^T with x and y held by rows. Hence N is asked for
// transposed, and D is kept in shared memory, from where ldmatrix gives it either way.
//
// 16 products of 16x16x16, 96 mma; 148 fp32 multiply-adds a lane for the four diagonal blocks.

namespace gdnflow::device {

struct WarpTrilInverse {
  static constexpr int blocks = 4;

  /// A warp's own. Holds first the columns of N's diagonal blocks, then the inverses' transposes.
  union Storage {
    FactorBlock factor[blocks];
    SplitBlock inverse[blocks];
  };

  /// Inverts I - N, called by all lanes of a warp. factor(i, j), i >= j, gives the transpose of
  /// block (i, j) of N: row r, column c of the slab is N[16 i + c][16 j + r]; for i == j only what
  /// is strictly below N's diagonal is looked at. emit(i, j, rows) takes block (i, j) of the
  /// inverse, rounded to T, as rows; it is called once for each i >= j.
  template <class T, class Factor, class Emit>
  __device__ __forceinline__ static void invert(Storage& storage, Factor&& factor, Emit&& emit) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) storage.factor[b].store_transposed(factor(b, b));
    __syncwarp();
    invert_diagonal_blocks(storage);
    __syncwarp();
    emit(0, 0, round_rows<T>(storage.inverse[0].load_transposed()));
    emit(1, 1, round_rows<T>(storage.inverse[1].load_transposed()));

    const Slab<2> merged32 =
        product(split_rows(product(storage.inverse[3].load_transposed(), split_rows(factor(3, 2)))),
                storage.inverse[2].load());
    emit(3, 2, to_a<T>(merged32, 0));
    const SplitRows x32 = split_rows(merged32);
    SplitRows products[2][2];  // sum_k X_ik N_kl: i - 2, l
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      // D_2 and D_3 are loaded where they are used: registers are scarcer than ldmatrix.
      const SplitRows upper = split_rows(factor(2, l));
      const SplitRows d2 = storage.inverse[2].load_transposed();
      if (l == 0) emit(2, 2, round_rows<T>(d2));
      products[0][l] = split_rows(product(d2, upper));
      Slab<2> sum = product(x32, upper);
      const SplitRows d3 = storage.inverse[3].load_transposed();
      if (l == 0) emit(3, 3, round_rows<T>(d3));
      multiply_add_transposed(sum, d3, split_rows(factor(3, l)));
      products[1][l] = split_rows(sum);
    }

    const SplitRows d0_transposed = storage.inverse[0].load();
    const Slab<2> merged10 =
        product(split_rows(product(storage.inverse[1].load_transposed(), split_rows(factor(1, 0)))),
                d0_transposed);
    emit(1, 0, to_a<T>(merged10, 0));
    const SplitRows x10_transposed = transposed(storage, split_rows(merged10));
    const SplitRows d1_transposed = storage.inverse[1].load();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Slab<2> sum = product(products[i][0], d0_transposed);
      multiply_add_transposed(sum, products[i][1], x10_transposed);
      emit(i + 2, 0, to_a<T>(sum, 0));
      emit(i + 2, 1, to_a<T>(product(products[i][1], d1_transposed), 0));
    }
  }

 private:
  /// Solves (I - N_bb) x = e_c for all columns of the four diagonal blocks: lane 8 b + c takes
  /// columns c and c + 8 of block b. Eliminating by columns leaves fifteen updates of a step
  /// independent; rows of column c + 8 above its one stay zero and take no part.
  __device__ __forceinline__ static void invert_diagonal_blocks(Storage& storage) {
    const int b = lane() / 8;
    const int c = lane() % 8;
    float left[16];
    float right[8];  // rows 8 to 15 of column c + 8
#pragma unroll
    for (int i = 0; i < 16; ++i) left[i] = i == c ? 1.0F : 0.0F;
#pragma unroll
    for (int i = 0; i < 8; ++i) right[i] = left[i];
#pragma unroll
    for (int k = 0; k < 15; ++k) {
      float n[16];
      storage.factor[b].load_column(n, k);
#pragma unroll
      for (int i = k + 1; i < 16; ++i) {
        left[i] += n[i] * left[k];
        if (k >= 8) right[i - 8] += n[i] * right[k - 8];
      }
    }
    __syncwarp();  // every lane has read N
    SplitBlock& inverse = storage.inverse[b];
    const float zeros[8] = {};
    inverse.store_half_row(c, 0, left);
    inverse.store_half_row(c, 1, left + 8);
    inverse.store_half_row(c + 8, 0, zeros);
    inverse.store_half_row(c + 8, 1, right);
  }

  /// Rows of the transpose, through the place of D_3, which must not be needed any more.
  __device__ __forceinline__ static SplitRows transposed(Storage& storage, const SplitRows& rows) {
    __syncwarp();  // every lane has read D_3
    storage.inverse[3].store(rows);
    __syncwarp();
    return storage.inverse[3].load_transposed();
  }
};

}  // namespace gdnflow::device
