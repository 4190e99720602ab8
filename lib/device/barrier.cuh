#pragma once

#include "device/ptx.cuh"

#include <cstdint>

// Synchronisation below the level of a thread block: mbarriers (sm_90), named barriers, and the
// fence between ordinary stores to shared memory and the asynchronous proxy that WGMMA and TMA
// read through.

namespace gdnflow::device {

/// In a build with GDNFLOW_DELAY_ROLES, sleeps at random, up to two microseconds, in front of each
/// meeting: roles come in every order that barriers allow, and a missing one shows. Else nothing.
/// By a whole warp.
__device__ __forceinline__ void delay_role() {
#if GDNFLOW_DELAY_ROLES
  std::uint32_t clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  const std::uint32_t mixed = (clock + threadIdx.x / 32 * 0x9e3779b9U) * 0x85ebca6bU;
  const std::uint32_t draw = __shfl_sync(~0U, mixed >> 16, 0);
  if (draw % 4 == 0) __nanosleep(draw % 2048);
#endif
}

/// An mbarrier in shared memory. Phases alternate: `wait(parity)` returns once the phase with that
/// parity has completed.
struct Barrier {
  std::uint64_t word;

  __device__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)),
                 "r"(arrivals));
  }
  /// Ends the barrier, so that its memory may hold another.
  __device__ void end() {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word))
                 : "memory");
  }
  /// Arrives and announces bytes that TMA will deliver before the phase may complete.
  __device__ __forceinline__ void arrive_expect(std::uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)),
        "r"(bytes)
        : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    delay_role();
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(parity)
        : "memory");
  }
  /// Waits for the first phase of a barrier of one arrival that only this warp waits on, and makes
  /// it new: for what happens so rarely that nobody wants to count phases.
  __device__ void wait_and_reset() {
    wait(0);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      end();
      init(1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }
};

/// Makes initialised mbarriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// In a build with GDNFLOW_DELAY_ROLES, fills a stage of a ring that consumers have given back with
/// NaN, by a warp: whoever still reads it shows. Else nothing.
template <class Stage>
__device__ __forceinline__ void poison_freed(Stage& stage) {
#if GDNFLOW_DELAY_ROLES
  auto* const words = reinterpret_cast<uint4*>(&stage);
  for (unsigned i = threadIdx.x % 32; i < sizeof(Stage) / sizeof(uint4); i += 32) {
    words[i] = make_uint4(~0U, ~0U, ~0U, ~0U);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
#else
  static_cast<void>(stage);
#endif
}

/// Orders this thread's stores to shared memory before later reads by WGMMA and TMA; a barrier
/// must follow.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Waits on named barrier `id` until `threads` threads have arrived at it or wait on it.
__device__ __forceinline__ void named_sync(int id, int threads) {
  delay_role();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives at named barrier `id` without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  delay_role();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Moves a warp group's registers to another: every warp of the group calls one of these once.
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace gdnflow::device
