#pragma once

#include "device/half.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <cstddef>
#include <cstdint>
#include <type_traits>

// The inverse of a 64x64 unit lower triangular matrix by one warp, on tensor cores.
//
//   With M = I - N, N strictly lower triangular, in blocks of 16:
//     D_b = (I - N_bb)^-1                                       substitution in fp32 registers
//     X_10 = (D_1 N_10) D_0,   X_32 = (D_3 N_32) D_2            16 -> 32
//     X_ij = sum_l (sum_k X_ik N_kl) X_lj,  i = 2, 3, j = 0, 1  32 -> 64, X_bb = D_b
//
// Operands of the products are held as a bf16 and the bf16 of what is left of it: 16 bits of
// significand and the exponents of fp32. Of the four partial products the three that matter are
// summed in fp32, so the error of a merge is about 2^-17 of its terms, far below the final rounding
// to 16 bits, and nothing overflows where fp32 does not. TF32 would need as many products at half
// the rate; fp16 would overflow for keys that are not normalised.
//
// Every product has the form c += x y^T with x and y held by rows, because then one layout serves
// all: accumulators, rounded in pairs, are rows of the next x (ptx.cuh says how they lie), and y^T
// is loaded like x. Hence N is asked for transposed, and D is kept in shared memory, from where
// ldmatrix gives it either way.
//
// 16 products of 16x16x16, 96 mma; 148 fp32 multiply-adds a lane for the four diagonal blocks.

namespace gdnflow::device {

/// Rows of a 16x16 block as the left operand of mma, to 16 bits of significand: high + low.
struct SplitRows {
  FragmentA high;
  FragmentA low;
};

/// Splits a pair: `high` is the rounded pair, the result what rounding left, rounded.
__device__ __forceinline__ std::uint32_t split_pair(float x0, float x1, std::uint32_t& high) {
  high = pack<__nv_bfloat16>(x0, x1);
  const float2 rounded = unpack<__nv_bfloat16>(high);
  return pack<__nv_bfloat16>(x0 - rounded.x, x1 - rounded.y);
}

__device__ __forceinline__ SplitRows split_rows(const Slab<2>& block) {
  SplitRows rows;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = &block.x[i / 2][i % 2 * 2];
    rows.low.x[i] = split_pair(pair[0], pair[1], rows.high.x[i]);
  }
  return rows;
}

/// c += x y^T.
__device__ __forceinline__ void multiply_add_transposed(Slab<2>& c, const SplitRows& x,
                                                        const SplitRows& y) {
#pragma unroll
  for (int term = 0; term < 3; ++term) {
    const FragmentA& a = term == 0 ? x.low : x.high;
    const FragmentA& b = term == 1 ? y.low : y.high;
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_16x8x16<__nv_bfloat16>(c.x[n], a.x, b.x[n], b.x[n + 2]);
  }
}

/// Rounds to T: bf16 is there already.
template <class T>
__device__ __forceinline__ FragmentA round_rows(const SplitRows& rows) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return rows.high;
  } else {
    FragmentA rounded;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 high = unpack<__nv_bfloat16>(rows.high.x[i]);
      const float2 low = unpack<__nv_bfloat16>(rows.low.x[i]);
      rounded.x[i] = pack<T>(high.x + low.x, high.y + low.y);
    }
    return rounded;
  }
}

struct WarpTrilInverse {
  static constexpr int blocks = 4;

  /// A warp's own. Holds first the columns of N's diagonal blocks, then the inverses' transposes.
  struct Storage {
    static constexpr int block_floats = 16 * 16 + 4;  // four more: a bank group a block
    static constexpr int slot_bytes = 16 * 16 * 2;
    alignas(16) std::byte data[blocks * block_floats * sizeof(float)];
    static_assert(blocks * 2 * slot_bytes <= blocks * block_floats * sizeof(float));

    /// Element (row, column) of diagonal block b of N. Halves of every second pair of columns are
    /// exchanged, so that eight-byte stores along rows meet no bank twice.
    __device__ __forceinline__ float* factor(int b, int row, int column) {
      return reinterpret_cast<float*>(data) + b * block_floats + column * 16 +
             (row ^ (column & 2) * 4);
    }
    /// Eight elements of a row of a 16x16 tile of 16-bit elements. Halves of every second four rows
    /// are exchanged: eight rows then lie in eight different groups of banks.
    __device__ __forceinline__ std::byte* half_row(int slot, int row, int half) {
      return data + slot * slot_bytes + row * 32 + (half ^ (row / 4 & 1)) * 16;
    }
  };

  /// Inverts I - N, called by all lanes of a warp. factor(i, j), i >= j, gives the transpose of
  /// block (i, j) of N: row r, column c of the slab is N[16 i + c][16 j + r]; for i == j only what
  /// is strictly below N's diagonal is looked at. emit(i, j, rows) takes block (i, j) of the
  /// inverse, rounded to T, as rows; it is called once for each i >= j.
  template <class T, class Factor, class Emit>
  __device__ __forceinline__ static void invert(Storage& storage, Factor&& factor, Emit&& emit) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) store_factor(storage, b, factor(b, b));
    __syncwarp();
    invert_diagonal_blocks(storage);
    __syncwarp();
    emit(0, 0, round_rows<T>(load_inverse(storage, 0)));
    emit(1, 1, round_rows<T>(load_inverse(storage, 1)));

    const Slab<2> merged32 =
        product(split_rows(product(load_inverse(storage, 3), split_rows(factor(3, 2)))),
                load_transposed_inverse(storage, 2));
    emit(3, 2, to_a<T>(merged32, 0));
    const SplitRows x32 = split_rows(merged32);
    SplitRows products[2][2];  // sum_k X_ik N_kl: i - 2, l
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      // D_2 and D_3 are loaded where they are used: registers are scarcer than ldmatrix.
      const SplitRows upper = split_rows(factor(2, l));
      const SplitRows d2 = load_inverse(storage, 2);
      if (l == 0) emit(2, 2, round_rows<T>(d2));
      products[0][l] = split_rows(product(d2, upper));
      Slab<2> sum = product(x32, upper);
      const SplitRows d3 = load_inverse(storage, 3);
      if (l == 0) emit(3, 3, round_rows<T>(d3));
      multiply_add_transposed(sum, d3, split_rows(factor(3, l)));
      products[1][l] = split_rows(sum);
    }

    const SplitRows d0_transposed = load_transposed_inverse(storage, 0);
    const Slab<2> merged10 = product(
        split_rows(product(load_inverse(storage, 1), split_rows(factor(1, 0)))), d0_transposed);
    emit(1, 0, to_a<T>(merged10, 0));
    const SplitRows x10_transposed = transposed(storage, split_rows(merged10));
    const SplitRows d1_transposed = load_transposed_inverse(storage, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Slab<2> sum = product(products[i][0], d0_transposed);
      multiply_add_transposed(sum, products[i][1], x10_transposed);
      emit(i + 2, 0, to_a<T>(sum, 0));
      emit(i + 2, 1, to_a<T>(product(products[i][1], d1_transposed), 0));
    }
  }

 private:
  /// x y^T.
  __device__ __forceinline__ static Slab<2> product(const SplitRows& x, const SplitRows& y) {
    Slab<2> c;
    c.clear();
    multiply_add_transposed(c, x, y);
    return c;
  }

  __device__ __forceinline__ static void store_factor(Storage& storage, int b,
                                                      const Slab<2>& transposed) {
    const int column = lane() / 4;
    const int row = lane() % 4 * 2;
    const auto store = [&](int r, int c, float x0, float x1) {
      *reinterpret_cast<float2*>(storage.factor(b, r, c)) = make_float2(x0, x1);
    };
    store(row, column, transposed.x[0][0], transposed.x[0][1]);
    store(row + 8, column, transposed.x[1][0], transposed.x[1][1]);
    store(row + 8, column + 8, transposed.x[1][2], transposed.x[1][3]);
  }

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
#pragma unroll
      for (int i = (k + 1) / 4 * 4; i < 16; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(storage.factor(b, i, k));
        n[i] = four.x;
        n[i + 1] = four.y;
        n[i + 2] = four.z;
        n[i + 3] = four.w;
      }
#pragma unroll
      for (int i = k + 1; i < 16; ++i) {
        left[i] += n[i] * left[k];
        if (k >= 8) right[i - 8] += n[i] * right[k - 8];
      }
    }
    __syncwarp();  // every lane has read N
    store_column(storage, b, c, 0, left);
    store_column(storage, b, c, 1, left + 8);
    const float zeros[8] = {};
    store_column(storage, b, c + 8, 0, zeros);
    store_column(storage, b, c + 8, 1, right);
  }

  /// Half a column of an inverse, as half a row of its transpose.
  __device__ __forceinline__ static void store_column(Storage& storage, int b, int column, int half,
                                                      const float* x) {
    std::uint32_t high[4];
    std::uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = split_pair(x[2 * i], x[2 * i + 1], high[i]);
    *reinterpret_cast<uint4*>(storage.half_row(2 * b, column, half)) =
        make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(storage.half_row(2 * b + 1, column, half)) =
        make_uint4(low[0], low[1], low[2], low[3]);
  }

  /// Rows of D_b^T, as they are stored.
  __device__ __forceinline__ static SplitRows load_transposed_inverse(Storage& storage, int b) {
    SplitRows rows;
    load_matrix_x4(rows.high.x, storage.half_row(2 * b, lane() % 16, lane() / 16));
    load_matrix_x4(rows.low.x, storage.half_row(2 * b + 1, lane() % 16, lane() / 16));
    return rows;
  }

  /// Rows of D_b.
  __device__ __forceinline__ static SplitRows load_inverse(Storage& storage, int b) {
    const int row = lane() % 8 + lane() / 16 * 8;
    const int half = lane() / 8 % 2;
    SplitRows rows;
    load_matrix_x4_transposed(rows.high.x, storage.half_row(2 * b, row, half));
    load_matrix_x4_transposed(rows.low.x, storage.half_row(2 * b + 1, row, half));
    return rows;
  }

  /// Rows of the transpose, through the place of D_3, which must not be needed any more.
  __device__ __forceinline__ static SplitRows transposed(Storage& storage, const SplitRows& rows) {
    __syncwarp();  // every lane has read D_3
    store_rows_at(storage, 6, rows.high);
    store_rows_at(storage, 7, rows.low);
    __syncwarp();
    return load_inverse(storage, 3);
  }

  __device__ __forceinline__ static void store_rows_at(Storage& storage, int slot,
                                                       const FragmentA& rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::byte* half = storage.half_row(slot, lane() / 4 + i % 2 * 8, i / 2);
      *reinterpret_cast<std::uint32_t*>(half + lane() % 4 * 4) = rows.x[i];
    }
  }
};

}  // namespace gdnflow::device
