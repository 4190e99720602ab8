#pragma once

#include "device/barrier.cuh"
#include "device/mma.cuh"

#include <cstdint>

// The inverse of a 32x32 unit lower triangular matrix by two warps, in fp32 throughout.
//
//   With M = I - N, N strictly lower triangular, in blocks of 16:
//
//          warp 0                        warp 1
//     ----------------------- N is stored --------------------------
//          D_0, N_10 D_0                 D_1                by substitution
//     ----------------------- D_1 is stored ------------------------
//          X_10 = D_1 (N_10 D_0)
//
// A lane has a row x of the result, of which x M is known: a row of the identity or one of N_10. So
// the first substitution makes D_0 and N_10 D_0 at once, 16 lanes each. No tensor core: what comes
// in between the products of other warp groups waits for them.

namespace gdnflow::device {

struct PairTrilInverse {
  static constexpr int threads = 64;

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

  struct Storage {
    Block diagonal[2];  // N_00, later N_10 D_0; N_11. What lies on and above the diagonal is not
                        // looked at
    Block below;        // N_10
    Block inverse;      // D_1: a place of its own, since warp 0 reads it when warp 1 has gone on
  };

  /// Up to the second meeting, for warp `w` of the pair, when it has stored its blocks of N.
  /// `stored` and `made` are named barriers of the pair's own. emit(i, j, row, half, x) takes
  /// columns 8 half to 8 half + 7 of a row of block (i, j) of the inverse.
  template <class Emit>
  __device__ __forceinline__ static void begin(Storage& storage, int w, int lane, int stored,
                                               int made, Emit&& emit) {
    const int row = lane % 16;
    const bool upper = lane >= 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == row ? 1.0F : 0.0F;
    named_sync(stored, threads);
    if (w == 0 && upper) storage.below.load_row(x, row);
    substitute(storage.diagonal[w], x);
    __syncwarp();
    if (upper) {
      (w == 0 ? storage.diagonal[0] : storage.inverse).store_row(x, row);
    } else {
      emit(w, w, row, 0, &x[0]);
      emit(w, w, row, 1, &x[8]);
    }
    named_sync(made, threads);
  }

  /// From there on.
  template <class Emit>
  __device__ __forceinline__ static void end(Storage& storage, int w, int lane, Emit&& emit) {
    if (w == 1) return;
    const int row = lane % 16;
    const int half = lane / 16;
    float x[16];
    storage.inverse.load_row(x, row);
    float part[8] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int c = 0; c < 8; c += 4) {
        const float4 four = storage.diagonal[0].four(i, c + 8 * half);
        part[c] += x[i] * four.x;
        part[c + 1] += x[i] * four.y;
        part[c + 2] += x[i] * four.z;
        part[c + 3] += x[i] * four.w;
      }
    }
    emit(1, 0, row, half, part);
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
