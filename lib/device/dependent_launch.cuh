#pragma once

// Programmatic dependent launch: a kernel whose launch is marked `programmatic` may start while its
// predecessor drains, one of the library's or the caller's. Both are instructions of sm_90; before
// it kernels run one behind another and these do nothing.

namespace gdnflow::device {

/// Waits until the kernels that this one depends on have completed and their writes are visible. A
/// programmatic kernel calls it before its first access to global memory, reads and writes alike,
/// also where it knows that its direct predecessor did not make the data: a kernel further up may
/// have, and completes for certain only because every kernel in between waited too. For that it is
/// enough that one thread of the grid waits, but not that those do that have work: the call stands
/// in front of every way out.
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel be launched once all blocks have called this (one thread of each is enough)
/// or left. It says nothing about data: the next kernel's wait does. Blocks that wait hold their
/// place on a multiprocessor, which other streams might use. So a short kernel calls it first
/// thing, also in front of its own wait, and one that takes long when its last tiles are on their
/// way.
__device__ __forceinline__ void allow_successors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdnflow::device
