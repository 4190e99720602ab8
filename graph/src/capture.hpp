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
};

/// Errors: cuda, where the stream is not being captured or its capture broke.
CaptureState capture_state(cudaStream_t stream, const char* what);

/// Adds a plan to the graph that `stream` is capturing: a node a kernel, the pipeline's branches
/// kept parallel, library steps captured in their place; what is captured next waits for all of it.
/// Nodes that are switched off are left out or, with `keep_disabled`, put in (for an executable
/// that can switch them). Where `nodes` is not null, it receives the graph nodes by pipeline node.
void capture_plan(const BoundPlan& bound, cudaStream_t stream, bool keep_disabled,
                  std::vector<GraphNodes>* nodes);

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
