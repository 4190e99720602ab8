#pragma once

#include "device/half.cuh"
#include "device/ptx.cuh"
#include "device/tile.cuh"

#include <cstdint>

// A warp's matrix products on tiles in shared memory, mma.sync with fp32 accumulation.
//
// A product is c[16 x 8N] += a[16 x K] b[K x 8N] for one warp. Operands are loaded by functions
// named after the way the tile holds them, because that alone decides between `ldmatrix` and its
// transposing form; layouts of the fragments are in ptx.cuh.

namespace gdnflow::device {

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }

struct FragmentA {
  std::uint32_t x[4];
};
/// Two neighbouring 16x8 operands: x[0], x[1] are columns 0 to 7, x[2], x[3] columns 8 to 15.
struct FragmentB {
  std::uint32_t x[4];
};

/// 16 rows and 8N columns in fp32, spread over a warp.
template <int N>
struct Slab {
  static constexpr int columns = 8 * N;
  float x[N][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = 0.0F;
    }
  }

  /// f(row, column, x) for each element this thread holds, with row in [0, 16).
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) {
    const int row = lane() / 4;
    const int column = lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(row + i / 2 * 8, 8 * n + column + i % 2, x[n][i]);
    }
  }

  /// f(row, column, x0, x1) for each pair of neighbouring columns, `column` even.
  template <class F>
  __device__ __forceinline__ void for_each_pair(F&& f) {
    const int row = lane() / 4;
    const int column = lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      f(row, 8 * n + column, x[n][0], x[n][1]);
      f(row + 8, 8 * n + column, x[n][2], x[n][3]);
    }
  }
};

/// a[m][k] from a tile that holds rows of m.
template <class TileType>
__device__ __forceinline__ FragmentA load_a(const TileType& tile, int m, int k) {
  FragmentA a;
  load_matrix_x4(a.x, tile.at(m + lane() % 16, k + lane() / 16 * 8));
  return a;
}

/// a[m][k] from a tile that holds rows of k.
template <class TileType>
__device__ __forceinline__ FragmentA load_a_from_rows_of_k(const TileType& tile, int m, int k) {
  FragmentA a;
  load_matrix_x4_transposed(a.x, tile.at(k + lane() % 8 + lane() / 16 * 8, m + lane() / 8 % 2 * 8));
  return a;
}

/// b[k][n], 16 columns, from a tile that holds rows of k.
template <class TileType>
__device__ __forceinline__ FragmentB load_b(const TileType& tile, int k, int n) {
  FragmentB b;
  load_matrix_x4_transposed(b.x, tile.at(k + lane() % 16, n + lane() / 16 * 8));
  return b;
}

/// b[k][n], 16 columns, from a tile that holds rows of n.
template <class TileType>
__device__ __forceinline__ FragmentB load_b_from_rows_of_n(const TileType& tile, int k, int n) {
  FragmentB b;
  load_matrix_x4(b.x, tile.at(n + lane() % 8 + lane() / 16 * 8, k + lane() / 8 % 2 * 8));
  return b;
}

/// c += a b, with a(k) and b(k, n) giving the operands at k = 0, 16, ..., K - 16.
template <class T, int K, int N, class A, class B>
__device__ __forceinline__ void multiply_add(Slab<N>& c, A&& a, B&& b) {
  static_assert(K % 16 == 0 && N % 2 == 0);
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    const FragmentA fragment_a = a(k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const FragmentB fragment_b = b(k, 8 * n);
      mma_16x8x16<T>(c.x[n], fragment_a.x, fragment_b.x[0], fragment_b.x[1]);
      mma_16x8x16<T>(c.x[n + 1], fragment_a.x, fragment_b.x[2], fragment_b.x[3]);
    }
  }
}

/// Columns k to k + 15 of a slab, rounded, as the left operand of a next product: the layouts of
/// accumulator and operand agree, so nothing moves between lanes.
template <class T, int N>
__device__ __forceinline__ FragmentA to_a(const Slab<N>& slab, int k) {
  const int n = k / 8;
  return {{pack<T>(slab.x[n][0], slab.x[n][1]), pack<T>(slab.x[n][2], slab.x[n][3]),
           pack<T>(slab.x[n + 1][0], slab.x[n + 1][1]),
           pack<T>(slab.x[n + 1][2], slab.x[n + 1][3])}};
}

/// Rounds a slab into rows `row` to `row + 15` of a tile, from column `column` on.
template <class T, int Rows, int Columns, int N>
__device__ __forceinline__ void store_slab(Tile<T, Rows, Columns>& tile, int row, int column,
                                           Slab<N>& slab) {
  slab.for_each_pair([&](int r, int c, float x0, float x1) {
    *reinterpret_cast<std::uint32_t*>(tile.at(row + r, column + c)) = pack<T>(x0, x1);
  });
}

}  // namespace gdnflow::device
