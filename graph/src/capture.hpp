#pragma once

#if GDNFLOW_WITH_CUDA

#include "bound_plan.hpp"
#include "cuda.hpp"

#include <vector>

namespace gdnflow {

/// The CUDA graph nodes of one pipeline node.
struct GraphNodes {
  std::vector<cudaGraphNode_t> steps;     ///< by step; null for empty steps and library steps
  std::vector<cudaGraphNode_t> captured;  ///< what library steps added; listed where the node is
                                          ///< optional, for switching
};

/// What a stream that is being captured stands at.
struct CaptureState {
  cudaGraph_t graph = nullptr;
  std::vector<cudaGraphNode_t> tips;  ///< what the next piece of work would wait for
  bool for_ends = true;               ///< for the end of each, not for an earlier event
};

/// Errors: cuda, where the stream is not being captured or its capture broke.
CaptureState capture_state(cudaStream_t stream, const char* what);

/// Whether a programmatic launch on `stream` stands where CUDA defines one: outside of a capture
/// anywhere (behind something else than a kernel it is an ordinary one), inside behind the end of
/// one kernel.
bool takes_programmatic(cudaStream_t stream);

/// Adds a plan to the graph that the caller's `stream` is capturing: a node a kernel, the
/// pipeline's branches kept parallel, library steps captured in their place; what is captured next
/// waits for all of it. Nodes that are switched off are left out. With `behind_callers` what comes
/// first may start while the caller's kernel in front drains, where that is one kernel.
void capture_plan(const BoundPlan& bound, cudaStream_t stream, bool behind_callers);

/// The same for a graph of the executor's own, whose nodes can be switched and are given by
/// pipeline node: those that are switched off are among them.
std::vector<GraphNodes> capture_switchable(const BoundPlan& bound, cudaStream_t stream);

/// Parameters of a graph node; they point into the step.
class KernelNodeParams {
 public:
  explicit KernelNodeParams(const KernelLaunch& launch);
  KernelNodeParams(const KernelNodeParams&) = delete;
  KernelNodeParams& operator=(const KernelNodeParams&) = delete;
  const cudaKernelNodeParams& get() const noexcept { return params_; }

 private:
  void* argument_;
  cudaKernelNodeParams params_{};
};
cudaMemsetParams memset_params(void* destination, unsigned char value, std::size_t bytes);

}  // namespace gdnflow

#endif  // GDNFLOW_WITH_CUDA
