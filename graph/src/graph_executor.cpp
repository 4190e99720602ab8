#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>

#if GDNFLOW_WITH_CUDA
#include "capture.hpp"
#include "launch.hpp"
#endif

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {

#if GDNFLOW_WITH_CUDA
namespace {

bool same(const ParamBlob& a, const ParamBlob& b) noexcept {
  return a.size == b.size && std::memcmp(a.bytes.data(), b.bytes.data(), a.size) == 0;
}
bool same(const KernelLaunch& a, const KernelLaunch& b) noexcept {
  return a.grid == b.grid && a.block == b.block && a.shared_bytes == b.shared_bytes &&
         same(a.params, b.params);
}
bool same(const Memset& a, const Memset& b) noexcept {
  return a.destination == b.destination && a.value == b.value && a.bytes == b.bytes;
}

class GraphExecutor final : public ExecutorBase {
 public:
  GraphExecutor(Plan plan, ExecutorOptions options)
      : ExecutorBase(std::move(plan), std::move(options), DeviceType::cuda, "graph"),
        device_(this->plan().pipeline().device().device.index) {}

  std::string_view kind() const noexcept override { return "graph"; }

  void run(Stream stream) override {
    require_built();
    const cuda::DeviceGuard guard(device_);
    if (is_capturing(stream)) {
      // The caller's graph gets the same nodes and edges; it may outlive this executor.
      capture_plan(bound_, stream, behind_callers());
      return;
    }
    cuda::check(cudaGraphLaunch(exec_.get(), stream), "cudaGraphLaunch");
  }

  std::vector<NodeTime> profile(int /*repeats*/, Stream /*stream*/) override {
    throw Error(
        ErrorCode::unsupported,
        "graph executor: nodes cannot be timed by themselves, expected a host or eager one");
  }

 protected:
  void build_executable() override {
    const cuda::DeviceGuard guard(device_);
    const cuda::RelaxedCaptureGuard relaxed;
    prepare_kernels(bound_);
    const cuda::StreamOwner stream = cuda::make_stream();
    cuda::GraphOwner graph = capture(stream.get());
    cudaGraphExec_t exec = nullptr;
    cuda::check(cudaGraphInstantiate(&exec, graph.get(), 0), "cudaGraphInstantiate");
    cuda::GraphExecOwner executable(exec);
    for (const int node : bound_.order()) {
      if (!bound_.enabled(node)) switch_in(exec, node, false);
    }
    cuda::check(cudaGraphUpload(exec, stream.get()), "cudaGraphUpload");
    cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    graph_ = std::move(graph);
    exec_ = std::move(executable);
  }

  /// Sets the parameters of the graph nodes that differ. First looks whether all of it can be done,
  /// then does it; where CUDA refuses half-way, what was set is set back.
  void update_executable() override {
    const cuda::DeviceGuard guard(device_);
    for (const int node : bound_.proposed_nodes()) check_updatable(node);
    std::size_t done = 0;
    try {
      for (const int node : bound_.proposed_nodes()) {
        update_node(node, bound_.work(node).steps, bound_.proposed(node).steps);
        ++done;
      }
    } catch (...) {
      for (std::size_t i = 0; i <= done; ++i) restore_node(bound_.proposed_nodes()[i]);
      throw;
    }
  }

  void switch_node(int node, bool enabled) override {
    const cuda::DeviceGuard guard(device_);
    switch_in(exec_.get(), node, enabled);
  }

 private:
  static bool is_capturing(cudaStream_t stream) {
    if (stream == nullptr) return false;  // the legacy stream cannot be captured
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    // To what has been invalidated nothing can be added, which the capture says best.
    return status != cudaStreamCaptureStatusNone;
  }

  cuda::GraphOwner capture(cudaStream_t stream) {
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed),
                "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      nodes_ = capture_switchable(bound_, stream);
    } catch (...) {
      (void)cudaStreamEndCapture(stream, &graph);
      const cuda::GraphOwner discarded(graph);
      throw;
    }
    cuda::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    return cuda::GraphOwner(graph);
  }

  void check_updatable(int node) const {
    const StepList& old_steps = bound_.work(node).steps;
    const StepList& new_steps = bound_.proposed(node).steps;
    const auto broken = [&](std::string_view what) {
      throw Error(ErrorCode::internal,
                  fmt::format("{}: {}: the {} changed with the tensors", plan().pipeline().id(),
                              plan().pipeline().nodes()[node].name, what));
    };
    if (old_steps.size() != new_steps.size()) broken("number of steps");
    for (std::size_t s = 0; s < old_steps.size(); ++s) {
      const Step& old_step = old_steps[s];
      const Step& new_step = new_steps[s];
      if (old_step.work.index() != new_step.work.index()) broken("kind of a step");
      if (is_empty(old_step) != is_empty(new_step)) broken("emptiness of a step");
      if (const auto* launch = std::get_if<KernelLaunch>(&new_step.work)) {
        const auto& old_launch = std::get<KernelLaunch>(old_step.work);
        if (launch->function != old_launch.function) broken("kernel of a step");
        if (launch->cluster != old_launch.cluster) broken("cluster shape of a step");
      } else if (const auto* work = std::get_if<Enqueue>(&new_step.work)) {
        const auto& old_work = std::get<Enqueue>(old_step.work);
        if (work->function != old_work.function) broken("function of a step");
        if (!same(work->params, old_work.params)) {
          throw Error(ErrorCode::unsupported,
                      fmt::format("{}: a library step was captured with the tensors of the first "
                                  "build and cannot be rebound, expected the same ones",
                                  step_text(bound_, node, new_step)));
        }
      }
    }
  }

  void update_node(int node, const StepList& old_steps, const StepList& new_steps) {
    for (std::size_t s = 0; s < new_steps.size(); ++s) {
      const cudaGraphNode_t graph_node = nodes_[node].steps[s];
      if (graph_node == nullptr) continue;
      const auto what = [&] { return "rebinding " + step_text(bound_, node, new_steps[s]); };
      if (const auto* launch = std::get_if<KernelLaunch>(&new_steps[s].work)) {
        if (same(*launch, std::get<KernelLaunch>(old_steps[s].work))) continue;
        const KernelNodeParams params(*launch);
        cuda::check(cudaGraphExecKernelNodeSetParams(exec_.get(), graph_node, &params.get()), what);
      } else if (const auto* memset = std::get_if<Memset>(&new_steps[s].work)) {
        if (same(*memset, std::get<Memset>(old_steps[s].work))) continue;
        const cudaMemsetParams params =
            memset_params(memset->destination, memset->value, memset->bytes);
        cuda::check(cudaGraphExecMemsetNodeSetParams(exec_.get(), graph_node, &params), what);
      }
    }
  }

  void restore_node(int node) noexcept {
    try {
      update_node(node, bound_.proposed(node).steps, bound_.work(node).steps);
    } catch (const Error&) {
      // The first refusal is the one to report.
    }
  }

  void switch_in(cudaGraphExec_t exec, int node, bool enabled) {
    const auto set = [&](cudaGraphNode_t graph_node) {
      cuda::check(cudaGraphNodeSetEnabled(exec, graph_node, enabled ? 1 : 0), [&] {
        return fmt::format("{}: switching {}", plan().pipeline().id(),
                           plan().pipeline().nodes()[node].name);
      });
    };
    for (const cudaGraphNode_t graph_node : nodes_[node].steps) {
      if (graph_node != nullptr) set(graph_node);
    }
    for (const cudaGraphNode_t graph_node : nodes_[node].captured) set(graph_node);
  }

  int device_;
  std::vector<GraphNodes> nodes_;  ///< by pipeline node
  cuda::GraphOwner graph_;         ///< owns the nodes that updates name
  cuda::GraphExecOwner exec_;
};

}  // namespace
#endif

std::unique_ptr<Executor> make_graph_executor([[maybe_unused]] Plan plan,
                                              [[maybe_unused]] ExecutorOptions options) {
#if GDNFLOW_WITH_CUDA
  return std::make_unique<GraphExecutor>(std::move(plan), std::move(options));
#else
  throw Error(ErrorCode::unsupported, "graph executor: this build of gdnflow has no CUDA");
#endif
}

}  // namespace gdnflow
