#pragma once

#include "device/ptx.cuh"

#include <cstdint>

// Tiles of 16-bit elements in shared memory without padding.

namespace gdnflow::device {

/// Row-major; the groups of eight columns (16 bytes) of row r stand in an order that is XORed with
/// r % 8. The eight rows of an 8x8 matrix then lie in eight different groups of four banks, so
/// `ldmatrix` has no conflicts, transposed or not.
template <class T, int Rows, int Columns>
struct SwizzledTile {
  static_assert(sizeof(T) == 2 && Columns % 64 == 0 && Rows % 16 == 0);
  static constexpr int rows = Rows;
  static constexpr int columns = Columns;

  alignas(128) T data[Rows * Columns];

  __device__ __forceinline__ static int offset(int row, int column) {
    // The XOR stays within 64 columns, so that offsets 64 columns apart differ by a constant.
    return row * Columns + column / 64 * 64 + (column % 64 ^ row % 8 * 8);
  }
  __device__ __forceinline__ T* at(int row, int column) { return data + offset(row, column); }
  __device__ __forceinline__ const T* at(int row, int column) const {
    return data + offset(row, column);
  }
};

/// Starts copying `Width` columns, from `column` on, of rows `source`, `source + row_stride`, ...
/// into the tile, by `Threads` threads of which the caller is number `thread`. `source` points at
/// the first of these columns. Rows at and past `valid` become zero and are not read: what a
/// neighbour holds there, a NaN included, never meets a product.
template <int Threads, int Width, class T, int Rows, int Columns>
__device__ __forceinline__ void load_columns_async(SwizzledTile<T, Rows, Columns>& tile, int column,
                                                   const T* source, std::int64_t row_stride,
                                                   int valid, int thread) {
  constexpr int vectors = Width / 8;
  static_assert(Rows * vectors % Threads == 0 && Threads % vectors == 0);
#pragma unroll
  for (int i = 0; i < Rows * vectors / Threads; ++i) {
    const int row = thread / vectors + i * (Threads / vectors);
    const int offset = thread % vectors * 8;
    const bool there = row < valid;
    copy_16_async(tile.at(row, column + offset), source + (there ? row : 0) * row_stride + offset,
                  there);
  }
}

/// The same for the whole width of the tile.
template <int Threads, class T, int Rows, int Columns>
__device__ __forceinline__ void load_rows_async(SwizzledTile<T, Rows, Columns>& tile,
                                                const T* source, std::int64_t row_stride, int valid,
                                                int thread) {
  load_columns_async<Threads, Columns>(tile, 0, source, row_stride, valid, thread);
}

}  // namespace gdnflow::device
