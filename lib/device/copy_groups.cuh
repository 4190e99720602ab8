#pragma once

// Groups of asynchronous copies, for kernels that keep several loads in flight. A thread's groups
// complete in the order in which it closed them.

namespace gdnflow::device {

/// Closes the group of the copies that this thread has started since the last one; it may be
/// empty, so that every turn of a loop closes the same number of groups.
__device__ __forceinline__ void close_copy_group() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/// Waits until at most `Open` of this thread's latest groups are in flight. A barrier must follow
/// before other threads read what was copied.
template <int Open>
__device__ __forceinline__ void wait_for_copy_groups() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Open) : "memory");
}

}  // namespace gdnflow::device
