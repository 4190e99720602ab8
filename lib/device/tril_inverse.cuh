#pragma once

#include "device/mma.cuh"

// The inverse of a 64x64 unit lower triangular matrix in shared memory, fp32 throughout.
//
//   M = [ A 0 ]   M^-1 = [  A^-1           0    ]
//       [ C D ]          [ -D^-1 C A^-1    D^-1 ]
//
// The four 16x16 diagonal blocks by substitution, a warp each, a column a lane; then the formula
// above joins 16 -> 32 -> 64. Nothing is rounded below fp32 before the caller stores the result:
// with correlated keys the inverse is far from I, and rounding between the joins would show in o.

namespace gdnflow::device {

struct TrilInverse {
  static constexpr int size = 64;
  static constexpr int threads = 128;
  static constexpr int stride = 68;          ///< of the matrix: rows 16-byte aligned, banks spread
  static constexpr int product_stride = 36;  ///< of the product C A^-1

  struct Storage {
    alignas(16) float matrix[size * stride];
    alignas(16) float product[32 * product_stride];
  };

  /// Inverts storage.matrix in place, by 128 threads; synchronises before it reads and after its
  /// last write. In: what is strictly below the diagonal, zeros elsewhere. Out: the inverse, with
  /// ones on the diagonal and zeros above it.
  __device__ static void invert(Storage& storage) {
    float* m = storage.matrix;
    __syncthreads();
    invert_diagonal_block(m + warp() * 16 * (stride + 1));
    __syncthreads();
    join<16>(storage, threadIdx.x / 64 * 32, threadIdx.x % 64, threadIdx.x / 64 * 16);
    __syncthreads();
    join<32>(storage, 0, threadIdx.x, 0);
    __syncthreads();
  }

 private:
  /// Solves (I + L) x = e_c for column c = lane, eliminating by columns so that the fifteen
  /// updates of a step are independent.
  __device__ static void invert_diagonal_block(float* block) {
    float x[16];
    const int column = lane();
    if (column < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
      for (int j = 0; j < 15; ++j) {
#pragma unroll
        for (int i = j + 1; i < 16; ++i) x[i] -= block[i * stride + j] * x[j];
      }
    }
    __syncwarp();  // every lane has read the block
    if (column < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i * stride + column] = x[i];
    }
  }

  /// Joins the inverses of two BxB blocks, the upper one at row and column `base`, by 4B threads.
  template <int B>
  __device__ static void join(Storage& storage, int base, int thread, int product_row) {
    float* upper = storage.matrix + base * (stride + 1);
    float* lower = upper + B * (stride + 1);
    float* corner = upper + B * stride;
    float* product = storage.product + product_row * product_stride;
    multiply<B, stride, product_stride>(corner, upper, product, 1.0F, thread);
    __syncthreads();
    multiply<B, product_stride, stride>(lower, product, corner, -1.0F, thread);
  }

  /// out = sign a b for BxB blocks; a has the matrix's stride. A thread makes B/4 elements of a
  /// row.
  template <int B, int StrideB, int StrideOut>
  __device__ static void multiply(const float* a, const float* b, float* out, float sign,
                                  int thread) {
    constexpr int width = B / 4;
    const int row = thread / 4;
    const int column = thread % 4 * width;
    float sum[width] = {};
#pragma unroll 8
    for (int k = 0; k < B; ++k) {
      const float x = a[row * stride + k];
#pragma unroll
      for (int j = 0; j < width; j += 4) {
        const float4 y = *reinterpret_cast<const float4*>(b + k * StrideB + column + j);
        sum[j] += x * y.x;
        sum[j + 1] += x * y.y;
        sum[j + 2] += x * y.z;
        sum[j + 3] += x * y.w;
      }
    }
#pragma unroll
    for (int j = 0; j < width; j += 4) {
      *reinterpret_cast<float4*>(out + row * StrideOut + column + j) =
          make_float4(sign * sum[j], sign * sum[j + 1], sign * sum[j + 2], sign * sum[j + 3]);
    }
  }
};

}  // namespace gdnflow::device
