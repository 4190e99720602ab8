#pragma once

// Programmatic dependent launch: a kernel whose launch is marked `programmatic` may start while its
// predecessor drains. Both are instructions of sm_90; before it kernels run one behind another and
// these do nothing.

namespace gdnflow::device {

/// Waits until the kernels that this one depends on have completed and their writes are visible. A
/// programmatic kernel calls it before its first access to global memory, reads and writes alike,
/// also where it knows that its direct predecessor did not make the data: a kernel further up may
/// have, and completes for certain only because every kernel in between waited too.
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel be launched once all blocks have called this or left. It says nothing about
/// data: the next kernel's wait does.
__device__ __forceinline__ void allow_successors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdnflow::device
