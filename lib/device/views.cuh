#pragma once

#include <gdnflow/problem.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>

// Tensors as kernels see them: trivially copyable, made on the host from a bound TensorView.

namespace gdnflow::device {

/// A [T, H, D] tensor whose last dimension is contiguous.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t token_stride = 0;  ///< elements
  std::int64_t head_stride = 0;

  Rows() = default;
  explicit Rows(const TensorView& view)
      : data(view.as<T>()), token_stride(view.strides[0]), head_stride(view.strides[1]) {}

  __device__ __forceinline__ T* row(std::int64_t token, std::int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

/// An [X, H, R, C] tensor of matrices whose last dimension is contiguous.
template <class T>
struct Matrices {
  T* data = nullptr;
  std::int64_t outer_stride = 0;  ///< elements
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;

  Matrices() = default;
  explicit Matrices(const TensorView& view)
      : data(view.as<T>()),
        outer_stride(view.strides[0]),
        head_stride(view.strides[1]),
        row_stride(view.strides[2]) {}

  __device__ __forceinline__ T* matrix(std::int64_t outer, std::int64_t head) const {
    return data + outer * outer_stride + head * head_stride;
  }
};

/// A [T, H] tensor whose last dimension is contiguous: gates.
template <class T>
struct Scalars {
  T* data = nullptr;
  std::int64_t token_stride = 0;

  Scalars() = default;
  explicit Scalars(const TensorView& view) : data(view.as<T>()), token_stride(view.strides[0]) {}

  __device__ __forceinline__ T& at(std::int64_t token, std::int64_t head) const {
    return data[token * token_stride + head];
  }
};

/// Which q/k head serves which value heads.
struct Heads {
  std::int32_t qk = 1;
  std::int32_t v = 1;
  bool interleaved = false;

  Heads() = default;
  explicit Heads(const Problem& problem)
      : qk(problem.qk_heads),
        v(problem.v_heads),
        interleaved(problem.head_map == HeadMap::interleaved) {}

  /// Value heads of a q/k head.
  __device__ __forceinline__ int group() const { return v / qk; }
  /// The q/k head that a value head reads.
  __device__ __forceinline__ int qk_of(int v_head) const {
    return interleaved ? v_head % qk : v_head / group();
  }
  /// Value head number `i` of a q/k head's group.
  __device__ __forceinline__ int v_of(int qk_head, int i) const {
    return interleaved ? i * qk + qk_head : qk_head * group() + i;
  }
};

/// One row of the chunk table.
struct Chunk {
  std::int32_t sequence;
  std::int32_t first_token;
  std::int32_t tokens;
  std::int32_t number;  ///< counted from the start of the sequence's prefix
};
static_assert(sizeof(Chunk) == 16);

/// What `chunk_index` made.
struct ChunkTable {
  const int4* rows = nullptr;             ///< [NC]
  const std::int32_t* offsets = nullptr;  ///< [N+1]: first chunk of each sequence
  const std::int32_t* counts = nullptr;   ///< [4]: chunks first

  __device__ __forceinline__ int chunks() const { return counts[0]; }
  __device__ __forceinline__ Chunk at(std::int64_t index) const {
    const int4 row = rows[index];
    return {row.x, row.y, row.z, row.w};
  }
};

}  // namespace gdnflow::device
