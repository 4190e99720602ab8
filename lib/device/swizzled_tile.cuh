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
    return row * Columns + (column ^ (row % 8 * 8));
  }
  __device__ __forceinline__ T* at(int row, int column) { return data + offset(row, column); }
  __device__ __forceinline__ const T* at(int row, int column) const {
    return data + offset(row, column);
  }
};

/// How four neighbouring 8x8 matrices follow each other in the registers of `ldmatrix`.
enum class MatrixOrder {
  down_right,  ///< a 16x16 block by columns of matrices
  right_down,  ///< a 16x16 block by rows of matrices
  right,       ///< 8 rows, 32 columns
};

/// A lane's place in a tile, for `ldmatrix` at many blocks of it. Two instructions find it for a
/// step in columns, none for a step in rows: with one address a block, computed from row and column
/// afresh, the registers for addresses would crowd out the operands.
template <int Columns>
class MatrixCursor {
 public:
  template <class T, int Rows>
  __device__ __forceinline__ MatrixCursor(const SwizzledTile<T, Rows, Columns>& tile,
                                          MatrixOrder order, int row = 0, int column = 0) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    row += lane % 8;
    if (order == MatrixOrder::down_right) row += lane / 8 % 2 * 8;
    if (order == MatrixOrder::right_down) row += lane / 16 * 8;
    if (order == MatrixOrder::down_right) column += lane / 16 * 8;
    if (order == MatrixOrder::right_down) column += lane / 8 % 2 * 8;
    if (order == MatrixOrder::right) column += lane / 8 * 8;
    address_ = shared_address(tile.data) + SwizzledTile<T, Rows, Columns>::offset(row, column) * 2;
  }

  /// The address `row` rows down, a multiple of 8, and `column` columns on, a multiple of 16 (of 32
  /// in the order `right`).
  __device__ __forceinline__ std::uint32_t at(int row, int column) const {
    // Bits 5 and 6 of the address hold a column's bits alone, because tiles are aligned to 128
    // bytes and rows are multiples of it; the swizzle commutes with the XOR.
    return (address_ ^ static_cast<std::uint32_t>(column % 64 * 2)) + row * Columns * 2 +
           column / 64 * 128;
  }

 private:
  std::uint32_t address_;
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
