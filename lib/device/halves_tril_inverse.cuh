#pragma once

#include "device/barrier.cuh"
#include "device/mma.cuh"

#include <cstdint>

// The inverses of both 32x32 halves on the diagonal of a 64x64 unit lower triangular matrix, by
// four warps, in fp32 throughout.
//
//   With M = I - N of a half, N strictly lower triangular, in blocks of 16:
//
//                 D_0, N_10 D_0        D_1             by substitution
//                          X_10 = D_1 (N_10 D_0)
//
// Rows of N are what a warp of products has, sixteen each, so that the first warp has one block on
// and below the diagonal of the whole matrix and the last one four. The others do its share of the
// substitutions:
//
//     warp 0   D_0 and N_10 D_0 of half 0
//     warp 1   D_1 of both, 16 lanes each
//     warp 2   D_0 and N_10 D_0 of half 1
//     all      X_10: half w / 2, columns 8 (w % 2) to 8 (w % 2) + 7
//
// A lane has a row x of the result, of which x M is known: a row of the identity or one of N_10. No
// tensor core: what comes in between the products of other warp groups waits for them.

namespace gdnflow::device {

struct HalvesTrilInverse {
  /// A 16x16 block by rows, fp32.
  struct Block {
    static constexpr int stride = 24;  // four rows of eight-byte stores meet no bank twice
    alignas(16) float data[16 * stride];

    /// From the accumulators of mma: rows lane / 4 and 8 more, columns 2 (lane % 4) and 8 more.
    __device__ __forceinline__ void store(int lane, const Slab<2>& block) {
      const int row = lane / 4;
      const int column = lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<float2*>(&data[(row + 8 * h) * stride + 8 * n + column]) =
              make_float2(block.x[n][2 * h], block.x[n][2 * h + 1]);
        }
      }
    }
    __device__ __forceinline__ float4 four(int row, int column) const {
      return *reinterpret_cast<const float4*>(&data[row * stride + column]);
    }
    __device__ __forceinline__ void load_row(float (&x)[16], int row) const {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const float4 y = four(row, i);
        x[i] = y.x;
        x[i + 1] = y.y;
        x[i + 2] = y.z;
        x[i + 3] = y.w;
      }
    }
    __device__ __forceinline__ void store_row(const float (&x)[16], int row) {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        *reinterpret_cast<float4*>(&data[row * stride + i]) =
            make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
      }
    }
  };

  /// Of a half.
  struct Half {
    Block diagonal[2];  // N_00, later N_10 D_0; N_11. What lies on and above the diagonal is not
                        // looked at
    Block below;        // N_10
    Block inverse;      // D_1
  };
  struct Storage {
    Half halves[2];
  };

  /// Named barriers from `first` on, of warps that store something for others to read. The first
  /// three lie by the warp that waits.
  enum Meeting : int {
    upper_stored,  // N_10 of half 0, by warp 1 for 0
    last_stored,   // N_11 of half 1, by warp 3 for 1
    lower_stored,  // N_10 of half 1, by warp 3 for 2
    upper_made,    // D_1 and N_10 D_0 of half 0, by warps 1 and 0 for both
    lower_made,    // the same of half 1, by warps 1 and 2 for 2 and 3
    read,          // all of that, before blocks of the next matrix take its place
    meetings
  };

  /// Where block (row, column) of N, of those in the halves, is to be stored: by the warp that has
  /// the row, the diagonal first.
  __device__ __forceinline__ static Block& block(Storage& storage, int row, int column) {
    Half& half = storage.halves[row / 2];
    return row == column ? half.diagonal[row % 2] : half.below;
  }

  /// By warp `w`, behind what it has stored of block (w, column).
  __device__ __forceinline__ static void announce(int w, int column, int first) {
    if (w == 1 && column == 0) named_arrive(first + upper_stored, 2 * 32);
    if (w == 3 && column == 3) named_arrive(first + last_stored, 2 * 32);
    if (w == 3 && column == 2) named_arrive(first + lower_stored, 2 * 32);
  }

  /// By warp `w`, behind all of its blocks. emit(i, j, row, column, x) takes columns from `column`
  /// on, as many as x has, of a row of block (i, j) of 16 of the whole.
  template <class Emit>
  __device__ __forceinline__ static void run(Storage& storage, int w, int lane, int first,
                                             Emit&& emit) {
    const int row = lane % 16;
    if (w < 3) {
      const bool second = lane >= 16;
      const bool lasts = w == 1;  // D_1 of both
      const int h = lasts ? (second ? 1 : 0) : w / 2;
      Half& half = storage.halves[h];
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        // One where they are equal: a comparison and a selection would be two instructions.
        asm("set.eq.f32.f32 %0, %1, %2;"
            : "=f"(x[i])
            : "f"(static_cast<float>(row)), "f"(static_cast<float>(i)));
      }
      named_sync(first + upper_stored + w, 2 * 32);
      if (!lasts && second) half.below.load_row(x, row);
      substitute(half.diagonal[lasts ? 1 : 0], x);
      __syncwarp();
      if (lasts || second) (lasts ? half.inverse : half.diagonal[0]).store_row(x, row);
      if (lasts || !second) {
        const int i = 2 * h + (lasts ? 1 : 0);
        emit(i, i, row, 0, reinterpret_cast<const float(&)[8]>(x[0]));
        emit(i, i, row, 8, reinterpret_cast<const float(&)[8]>(x[8]));
      }
    }
    if (w == 1) named_arrive(first + lower_made, 3 * 32);
    if (w < 2) {
      named_sync(first + upper_made, 2 * 32);
    } else {
      named_sync(first + lower_made, 3 * 32);
    }
    const Half& half = storage.halves[w / 2];
    const int column = 8 * (w % 2) + 4 * (lane / 16);
    float x[16];
    half.inverse.load_row(x, row);
    float part[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float4 four = half.diagonal[0].four(i, column);
      part[0] += x[i] * four.x;
      part[1] += x[i] * four.y;
      part[2] += x[i] * four.z;
      part[3] += x[i] * four.w;
    }
    emit(2 * (w / 2) + 1, 2 * (w / 2), row, column, part);
    named_sync(first + read, 4 * 32);
  }

 private:
  /// x (I - N)^-1. Rows of N are asked for `ahead` steps before their use.
  __device__ __forceinline__ static void substitute(const Block& n, float (&x)[16]) {
    constexpr int ahead = 3;
    float4 rows[ahead + 1][4];
    const auto load = [&](int j) {
#pragma unroll
      for (int k = 0; k < j; k += 4) rows[j % (ahead + 1)][k / 4] = n.four(j, k);
    };
#pragma unroll
    for (int j = 15; j > 15 - ahead; --j) load(j);
#pragma unroll
    for (int j = 15; j > 0; --j) {
      if (j - ahead > 0) load(j - ahead);
#pragma unroll
      for (int k = 0; k < j; ++k) {
        const float4& four = rows[j % (ahead + 1)][k / 4];
        x[k] += x[j] * (k % 4 == 0 ? four.x : k % 4 == 1 ? four.y : k % 4 == 2 ? four.z : four.w);
      }
    }
  }
};

}  // namespace gdnflow::device
