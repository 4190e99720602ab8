#pragma once

#include <gdnflow/problem.hpp>
#include <gdnflow/stage.hpp>
#include <gdnflow/tensor.hpp>

#include "device/element.cuh"

#include <cstdint>

// Initial states, final states and checkpoints in global memory: which row of which pool, in which
// layout and type. The rules are those of gdnflow/stages.hpp.

namespace gdnflow::device {

/// One head's state in global memory.
struct StateMatrix {
  void* data;
  DType dtype;
  std::int64_t offset;    ///< of element (0, 0)
  std::int64_t k_stride;  ///< from one row of d_k to the next
  std::int64_t v_stride;

  __device__ __forceinline__ float load(int k, int v) const {
    return load_element(data, dtype, offset + k * k_stride + v * v_stride);
  }
  __device__ __forceinline__ void store(int k, int v, float x) const {
    store_element(data, dtype, offset + k * k_stride + v * v_stride, x);
  }
};

/// f.operator()<T>() for the element type of states: once for many, rather than asked at each.
template <class F>
__device__ __forceinline__ void with_state_type(DType type, F&& f) {
  switch (type) {
    case DType::bf16:
      return f.template operator()<__nv_bfloat16>();
    case DType::f16:
      return f.template operator()<__half>();
    default:
      return f.template operator()<float>();
  }
}

/// A [P, Hv, r, c] tensor of states.
struct StatePool {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool vk = false;
  std::int64_t rows = 0;  ///< P
  std::int64_t pool_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;

  StatePool() = default;
  StatePool(const TensorView& view, StateLayout layout)
      : data(view.data),
        dtype(view.dtype),
        vk(layout == StateLayout::vk),
        rows(view.extents[0]),
        pool_stride(view.strides[0]),
        head_stride(view.strides[1]),
        row_stride(view.strides[2]) {}

  __device__ __forceinline__ bool holds(std::int64_t row) const {
    return data != nullptr && row >= 0 && row < rows;
  }
  __device__ __forceinline__ StateMatrix matrix(std::int64_t row, int head) const {
    return {data, dtype, row * pool_stride + head * head_stride, vk ? 1 : row_stride,
            vk ? row_stride : 1};
  }
};

/// Brings a head's dense state of `elements` to L2, by one thread; nothing of one that is not dense
/// or does not begin at a multiple of 16 bytes.
__device__ __forceinline__ void prefetch_state(const StatePool& pool, std::int64_t row, int head,
                                               std::int32_t columns, std::int32_t elements) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (row < 0 || pool.row_stride != columns) return;
  const std::int32_t element = pool.dtype == DType::f32 ? 4 : 2;
  const char* const begin = static_cast<const char*>(pool.data) +
                            (row * pool.pool_stride + head * pool.head_stride) * element;
  if (reinterpret_cast<std::uintptr_t>(begin) % 16 != 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(elements * element)
               : "memory");
#endif
}

/// The state ports of a stage. Functions that choose a row give -1 for "none".
struct StatePorts {
  StatePool initial;
  StatePool final;
  StatePool checkpoints;
  const std::int32_t* state_indices = nullptr;             ///< [sequences]
  const std::int32_t* output_state_indices = nullptr;      ///< [sequences]
  const std::uint8_t* has_initial_state = nullptr;         ///< [sequences]
  const std::int32_t* checkpoint_state_indices = nullptr;  ///< [K]
  std::int64_t checkpoint_rows = 0;                        ///< K
  std::int64_t checkpoint_interval = 0;                    ///< tokens; 0: no checkpoints
  std::int32_t checkpoint_chunks = 0;                      ///< the same in chunks
  std::int32_t sequences = 0;                              ///< those behind have no slot

  StatePorts() = default;
  explicit StatePorts(const StageCall& call)
      : state_indices(call["state_indices"].as<const std::int32_t>()),
        output_state_indices(call["output_state_indices"].as<const std::int32_t>()),
        has_initial_state(call["has_initial_state"].as<const std::uint8_t>()),
        checkpoint_state_indices(call["checkpoint_state_indices"].as<const std::int32_t>()),
        sequences(static_cast<std::int32_t>(call.sequences)) {
    const StateLayout layout = call.problem.state_layout;
    if (call.has("initial_state")) initial = StatePool(call["initial_state"], layout);
    if (call.has("final_state")) final = StatePool(call["final_state"], layout);
    if (call.has("checkpoints")) {
      checkpoints = StatePool(call["checkpoints"], layout);
      checkpoint_interval = call.problem.checkpoint_interval;
      checkpoint_chunks = static_cast<std::int32_t>(checkpoint_interval / chunk_tokens);
      checkpoint_rows = call.has("checkpoint_state_indices")
                            ? call["checkpoint_state_indices"].extents[0]
                            : checkpoints.rows;
    }
  }

  __device__ __forceinline__ std::int64_t initial_row(int sequence) const {
    if (sequence >= sequences) return -1;
    if (has_initial_state != nullptr && has_initial_state[sequence] == 0) return -1;
    const std::int64_t row = state_indices != nullptr ? state_indices[sequence] : sequence;
    return initial.holds(row) ? row : -1;
  }

  __device__ __forceinline__ std::int64_t final_row(int sequence) const {
    if (sequence >= sequences) return -1;
    const std::int32_t* indices =
        output_state_indices != nullptr ? output_state_indices : state_indices;
    const std::int64_t row = indices != nullptr ? indices[sequence] : sequence;
    return final.holds(row) ? row : -1;
  }

  /// Where compact checkpoint number `compact` goes.
  __device__ __forceinline__ std::int64_t checkpoint_row(std::int64_t compact) const {
    if (compact >= checkpoint_rows) return -1;
    const std::int64_t row =
        checkpoint_state_indices != nullptr ? checkpoint_state_indices[compact] : compact;
    return checkpoints.holds(row) ? row : -1;
  }
};

}  // namespace gdnflow::device
