#pragma once

#include "device/barrier.cuh"

#include <cstdint>

#include <cuda.h>

// Bulk tensor copies (sm_90) of boxes of [tokens, heads, columns] tensors: coordinates are column,
// head, token.

namespace gdnflow::device {

/// Loads a box into shared memory; its bytes count on `barrier`. Rows past the tensor read as zero.
__device__ __forceinline__ void load_box(void* destination, const CUtensorMap& map,
                                         Barrier& barrier, int column, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(destination)),
      "l"(&map), "r"(shared_address(&barrier.word)), "r"(column), "r"(head), "r"(token)
      : "memory");
}

/// Copies contiguous memory to shared memory; `barrier` counts the bytes that arrive. Both at
/// multiples of 16 bytes.
__device__ __forceinline__ void load_bytes(void* destination, const void* source,
                                           std::uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier.word))
      : "memory");
}

/// Brings a tensor's description to where copies read it. It is a parameter of the kernel.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Brings a box into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int column, int head,
                                             int token) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(column), "r"(head), "r"(token)
               : "memory");
}

/// Stores a box from shared memory, in the calling thread's bulk group.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* source, int column,
                                          int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(shared_address(source)), "r"(column), "r"(head), "r"(token)
      : "memory");
}

__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until this thread's stores have read their shared memory, which may then be reused.
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's stores are complete.
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace gdnflow::device
