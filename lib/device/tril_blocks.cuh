#pragma once

#include "device/half.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <cstddef>
#include <cstdint>
#include <type_traits>

// What the inverses of 64x64 unit lower triangular matrices are made of: products of 16x16 blocks
// to 16 bits of significand, and blocks in shared memory that ldmatrix gives either way.
//
// Operands of the products are held as a bf16 and the bf16 of what is left of it: 16 bits of
// significand and the exponents of fp32. Of the four partial products the three that matter are
// summed in fp32, so the error of a merge is about 2^-17 of its terms, far below the final rounding
// to 16 bits, and nothing overflows where fp32 does not. TF32 would need as many products at half
// the rate; fp16 would overflow for keys that are not normalised.
//
// Every product has the form c += x y^T with x and y held by rows, because then one layout serves
// all: accumulators, rounded in pairs, are rows of the next x (ptx.cuh says how they lie), and y^T
// is loaded like x.

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

/// x y^T.
__device__ __forceinline__ Slab<2> product(const SplitRows& x, const SplitRows& y) {
  Slab<2> c;
  c.clear();
  multiply_add_transposed(c, x, y);
  return c;
}

/// Stores a fragment's 16 bytes to shared memory or does not, without a branch.
__device__ __forceinline__ void store_if(bool wanted, uint4* to, const FragmentA& rows) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %0, 0;\n"
      "@wanted st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}\n" ::"r"(static_cast<std::uint32_t>(wanted)),
      "r"(shared_address(to)), "r"(rows.x[0]), "r"(rows.x[1]), "r"(rows.x[2]), "r"(rows.x[3])
      : "memory");
}

/// A 16x16 block of 16-bit elements in shared memory, high and low parts.
struct SplitBlock {
  static constexpr int part_bytes = 16 * 16 * 2;
  alignas(16) std::byte data[2][part_bytes];

  /// Eight elements of a row. Halves of every second four rows are exchanged: eight rows then lie
  /// in eight different groups of banks.
  __device__ __forceinline__ std::byte* half_row(int part, int row, int half) {
    return data[part] + row * 32 + (half ^ (row / 4 & 1)) * 16;
  }

  /// Rows, as they are stored.
  __device__ __forceinline__ SplitRows load() {
    SplitRows rows;
    load_matrix_x4(rows.high.x, half_row(0, lane() % 16, lane() / 16));
    load_matrix_x4(rows.low.x, half_row(1, lane() % 16, lane() / 16));
    return rows;
  }
  /// Rows of the transpose.
  __device__ __forceinline__ SplitRows load_transposed() {
    const int row = lane() % 8 + lane() / 16 * 8;
    const int half = lane() / 8 % 2;
    SplitRows rows;
    load_matrix_x4_transposed(rows.high.x, half_row(0, row, half));
    load_matrix_x4_transposed(rows.low.x, half_row(1, row, half));
    return rows;
  }

  __device__ __forceinline__ void store(const SplitRows& rows) {
    const auto store_part = [&](int part, const FragmentA& x) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::byte* const half = half_row(part, lane() / 4 + i % 2 * 8, i / 2);
        *reinterpret_cast<std::uint32_t*>(half + lane() % 4 * 4) = x.x[i];
      }
    };
    store_part(0, rows.high);
    store_part(1, rows.low);
  }
  /// Eight elements of a row, by one lane.
  __device__ __forceinline__ void store_half_row(int row, int half, const float* x) {
    std::uint32_t high[4];
    std::uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = split_pair(x[2 * i], x[2 * i + 1], high[i]);
    *reinterpret_cast<uint4*>(half_row(0, row, half)) =
        make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(half_row(1, row, half)) = make_uint4(low[0], low[1], low[2], low[3]);
  }
};

/// A 16x16 block of fp32 in shared memory, by columns: strictly below the diagonal of a block of N.
struct FactorBlock {
  static constexpr int floats = 16 * 16 + 4;  // four more: a bank group from block to block
  alignas(16) float data[floats];

  /// Halves of every second pair of columns are exchanged, so that eight-byte stores along rows
  /// meet no bank twice.
  __device__ __forceinline__ float* at(int row, int column) {
    return data + column * 16 + (row ^ (column & 2) * 4);
  }
  /// From the transpose: row r, column c of the slab is element (c, r).
  __device__ __forceinline__ void store_transposed(const Slab<2>& transposed) {
    for_each_transposed_pair(transposed, [](float* to, float x0, float x1) {
      *reinterpret_cast<float2*>(to) = make_float2(x0, x1);
    });
  }
  /// The same without a branch.
  __device__ __forceinline__ void store_transposed_if(bool wanted, const Slab<2>& transposed) {
    for_each_transposed_pair(transposed, [&](float* to, float x0, float x1) {
      asm volatile(
          "{\n"
          ".reg .pred wanted;\n"
          "setp.ne.u32 wanted, %0, 0;\n"
          "@wanted st.shared.v2.f32 [%1], {%2, %3};\n"
          "}\n" ::"r"(static_cast<std::uint32_t>(wanted)),
          "r"(shared_address(to)), "f"(x0), "f"(x1)
          : "memory");
    });
  }
  /// Column k, rows from k + 1 on; n[i] for i <= k is left as it may be.
  __device__ __forceinline__ void load_column(float (&n)[16], int k) {
#pragma unroll
    for (int i = (k + 1) / 4 * 4; i < 16; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(at(i, k));
      n[i] = four.x;
      n[i + 1] = four.y;
      n[i + 2] = four.z;
      n[i + 3] = four.w;
    }
  }

 private:
  template <class F>
  __device__ __forceinline__ void for_each_transposed_pair(const Slab<2>& transposed, F&& f) {
    const int column = lane() / 4;
    const int row = lane() % 4 * 2;
    f(at(row, column), transposed.x[0][0], transposed.x[0][1]);
    f(at(row + 8, column), transposed.x[1][0], transposed.x[1][1]);
    f(at(row + 8, column + 8), transposed.x[1][2], transposed.x[1][3]);
  }
};

}  // namespace gdnflow::device
