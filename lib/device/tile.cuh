#pragma once

#include "device/half.cuh"
#include "device/ptx.cuh"

#include <cstdint>

// Tiles of 16-bit elements in shared memory.

namespace gdnflow::device {

/// Row-major, each row 16 bytes longer than its elements. For 32, 64 and 128 columns the eight rows
/// of an 8x8 matrix then start in eight different groups of four banks, so `ldmatrix` has no
/// conflicts, transposed or not.
template <class T, int Rows, int Columns>
struct Tile {
  static_assert(sizeof(T) == 2 && Columns % 32 == 0 && Rows % 16 == 0);
  static constexpr int rows = Rows;
  static constexpr int columns = Columns;
  static constexpr int stride = Columns + 8;

  alignas(16) T data[Rows * stride];

  __device__ __forceinline__ T* at(int row, int column) { return data + row * stride + column; }
  __device__ __forceinline__ const T* at(int row, int column) const {
    return data + row * stride + column;
  }
};

/// A kernel's dynamic shared memory, aligned for tiles of any kind.
template <class Storage>
__device__ __forceinline__ Storage& dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  return *reinterpret_cast<Storage*>(dynamic_shared_bytes);
}

/// Starts copying rows `source`, `source + row_stride`, ... into the tile, by `Threads` threads.
/// Rows at and past `valid` become zero and are not read: what a neighbour holds there, a NaN
/// included, never meets a product. `source` and its rows are 16-byte aligned.
template <int Threads, class T, int Rows, int Columns>
__device__ __forceinline__ void load_rows_async(Tile<T, Rows, Columns>& tile, const T* source,
                                                std::int64_t row_stride, int valid) {
  constexpr int vectors = Columns / 8;
  static_assert(Rows * vectors % Threads == 0);
#pragma unroll
  for (int i = 0; i < Rows * vectors / Threads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * Threads;
    const int row = index / vectors;
    const int column = index % vectors * 8;
    const bool there = row < valid;
    copy_16_async(tile.at(row, column), source + (there ? row : 0) * row_stride + column, there);
  }
}

/// Stores the first `valid` rows of the tile.
template <int Threads, class T, int Rows, int Columns>
__device__ __forceinline__ void store_rows(const Tile<T, Rows, Columns>& tile, T* destination,
                                           std::int64_t row_stride, int valid) {
  constexpr int vectors = Columns / 8;
  static_assert(Rows * vectors % Threads == 0);
#pragma unroll
  for (int i = 0; i < Rows * vectors / Threads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * Threads;
    const int row = index / vectors;
    const int column = index % vectors * 8;
    if (row < valid) {
      *reinterpret_cast<uint4*>(destination + row * row_stride + column) =
          *reinterpret_cast<const uint4*>(tile.at(row, column));
    }
  }
}

/// Multiplies each row by its factor, in fp32, and rounds again.
template <int Threads, class T, int Rows, int Columns>
__device__ __forceinline__ void scale_rows(Tile<T, Rows, Columns>& tile, const float* factors) {
  constexpr int pairs = Columns / 2;
#pragma unroll 4
  for (int i = 0; i < Rows * pairs / Threads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * Threads;
    auto* pair = reinterpret_cast<std::uint32_t*>(tile.at(index / pairs, index % pairs * 2));
    const float2 x = unpack<T>(*pair);
    const float factor = factors[index / pairs];
    *pair = pack<T>(x.x * factor, x.y * factor);
  }
}

}  // namespace gdnflow::device
