#pragma once

#include "device/barrier.cuh"
#include "device/ptx.cuh"

#include <cstdint>

// Blocks of a cluster (sm_90): barriers and shared memory of each other.

namespace gdnflow::device {

/// Waits for every thread of the cluster that has not left.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// The address of what lies at `pointer` in this block, in block `rank`.
__device__ __forceinline__ std::uint32_t address_in(const void* pointer, int rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

/// Arrives at the barrier that lies at `barrier` in block `rank`, behind what this thread has seen.
/// May be called by one lane, so it does not delay its role, which takes a whole warp.
__device__ __forceinline__ void arrive_in(const Barrier& barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(&barrier.word, rank))
               : "memory");
}

/// Copies `bytes` of this block's shared memory to the same place in block `rank`; they count on
/// `barrier` there.
__device__ __forceinline__ void send(const void* data, std::uint32_t bytes, const Barrier& barrier,
                                     int rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(address_in(data, rank)),
      "r"(shared_address(data)), "r"(bytes), "r"(address_in(&barrier.word, rank))
      : "memory");
}

}  // namespace gdnflow::device
