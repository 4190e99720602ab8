#pragma once

#if GDNFLOW_WITH_CUDA

#include <gdnflow/error.hpp>

#include <memory>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

// Owners of CUDA handles, and the check of a call's status.

namespace gdnflow::cuda {

/// Throws Error(cuda) for a failed call; `what` names it. The error is also taken off the runtime's
/// record, so that no later check trips over it.
template <class What>
void check(cudaError_t status, const What& what, SourceLocation where = SourceLocation::current()) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  std::string text;
  if constexpr (std::is_invocable_v<const What&>) {
    text = what();  // messages that cost something are made only when needed
  } else {
    text = what;
  }
  throw Error(ErrorCode::cuda, fmt::format("{}: {}", text, cudaGetErrorString(status)), where);
}

/// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) return;
    check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// Lets this thread load kernels, make captures of its own and free what it has for a scope even
/// where it is capturing a stream of its caller's in a stricter mode.
class RelaxedCaptureGuard {
 public:
  // Of a mode that there is, the exchange cannot fail; owners are destroyed under it.
  RelaxedCaptureGuard() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureGuard() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureGuard(const RelaxedCaptureGuard&) = delete;
  RelaxedCaptureGuard& operator=(const RelaxedCaptureGuard&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// What is destroyed may stand inside a capture of the caller's as well: the stricter modes
/// invalidate it where a graph's executable goes or memory is freed.
template <auto destroy>
struct Destroyer {
  template <class Handle>
  void operator()(Handle* handle) const noexcept {
    const RelaxedCaptureGuard relaxed;
    (void)destroy(handle);
  }
};
template <class Handle, auto destroy>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<destroy>>;

using StreamOwner = Owner<cudaStream_t, &cudaStreamDestroy>;
using EventOwner = Owner<cudaEvent_t, &cudaEventDestroy>;
using GraphOwner = Owner<cudaGraph_t, &cudaGraphDestroy>;
using GraphExecOwner = Owner<cudaGraphExec_t, &cudaGraphExecDestroy>;

/// A stream of its own that does not wait for the legacy default stream.
inline StreamOwner make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return StreamOwner(stream);
}

inline EventOwner make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  return EventOwner(event);
}

}  // namespace gdnflow::cuda

#endif  // GDNFLOW_WITH_CUDA
