#if GDNFLOW_WITH_CUDA

#include "capture.hpp"

#include "dag.hpp"
#include "launch.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

using Tips = std::vector<cudaGraphNode_t>;

void add_unique(Tips& tips, const Tips& more) {
  for (const cudaGraphNode_t node : more) {
    if (std::find(tips.begin(), tips.end(), node) == tips.end()) tips.push_back(node);
  }
}

Tips all_nodes(cudaGraph_t graph) {
  std::size_t count = 0;
  cuda::check(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  Tips nodes(count);
  cuda::check(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  return nodes;
}

/// Whether a programmatic edge may lead from where a capture stands: from a kernel, and in the
/// place of an ordinary edge.
bool is_behind_kernel(const CaptureState& state) {
  if (state.tips.size() != 1 || !state.for_ends) return false;
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  cuda::check(cudaGraphNodeGetType(state.tips.front(), &type), "cudaGraphNodeGetType");
  return type == cudaGraphNodeTypeKernel;
}

void set_tips(cudaStream_t stream, Tips tips) {
  cuda::check(cudaStreamUpdateCaptureDependencies(stream, tips.data(), nullptr, tips.size(),
                                                  cudaStreamSetCaptureDependencies),
              "cudaStreamUpdateCaptureDependencies");
}

/// Adds steps to the graph behind given nodes.
class Adder {
 public:
  Adder(const BoundPlan& bound, cudaStream_t stream, cudaGraph_t graph)
      : bound_(bound), stream_(stream), graph_(graph) {}

  /// A kernel of the caller's that programmatic edges may lead from.
  void admit(cudaGraphNode_t kernel) { kernels_.insert(kernel); }

  cudaGraphNode_t add_memset(const Tips& behind, const cudaMemsetParams& params, auto&& what) {
    cudaGraphNode_t node = nullptr;
    cuda::check(cudaGraphAddMemsetNode(&node, graph_, behind.data(), behind.size(), &params), what);
    return node;
  }

  /// Adds the steps of a pipeline node in a row; gives what its successors wait for.
  Tips add_node(int index, Tips tips, GraphNodes* record) {
    const bool switchable = record != nullptr && bound_.pipeline().nodes()[index].optional;
    for (const Step& step : bound_.work(index).steps) {
      const auto what = [&] { return step_text(bound_, index, step); };
      cudaGraphNode_t added = nullptr;
      if (is_empty(step)) {
        // Nothing to run, nothing to wait for.
      } else if (const auto* launch = std::get_if<KernelLaunch>(&step.work)) {
        added = add_kernel(tips, *launch, switchable, what);
      } else if (const auto* memset = std::get_if<Memset>(&step.work)) {
        added = add_memset(tips, memset_params(memset->destination, memset->value, memset->bytes),
                           what);
      } else if (const auto* work = std::get_if<Enqueue>(&step.work)) {
        const Tips before = switchable ? all_nodes(graph_) : Tips{};
        tips = add_library_step(tips, *work, what);
        if (switchable) {
          for (const cudaGraphNode_t node : all_nodes(graph_)) {
            if (std::find(before.begin(), before.end(), node) == before.end()) {
              record->captured.push_back(node);
            }
          }
        }
      }
      if (added != nullptr) tips = {added};
      if (record != nullptr) record->steps.push_back(added);
    }
    return tips;
  }

 private:
  cudaGraphNode_t add_kernel(const Tips& behind, const KernelLaunch& launch, bool switchable,
                             auto&& what) {
    // A kernel that waits by itself may start while the one kernel before it drains; behind a join
    // or another kind of node the edge stays an ordinary one. A node that is switched off waits for
    // nothing by itself, so that its edges, too, are ordinary ones.
    const bool programmatic = launch.programmatic && !switchable && behind.size() == 1 &&
                              kernels_.contains(behind.front());
    const KernelNodeParams params(launch);
    cudaGraphNode_t node = nullptr;
    cuda::check(cudaGraphAddKernelNode(&node, graph_, behind.data(),
                                       programmatic ? 0 : behind.size(), &params.get()),
                what);
    if (programmatic) {
      cudaGraphEdgeData edge{};
      edge.from_port = cudaGraphKernelNodePortProgrammatic;
      edge.type = cudaGraphDependencyTypeProgrammatic;
      cuda::check(cudaGraphAddDependencies(graph_, behind.data(), &node, &edge, 1), what);
    }
    if (launch.cluster != Dim3{}) {
      cudaLaunchAttributeValue value{};
      value.clusterDim.x = launch.cluster.x;
      value.clusterDim.y = launch.cluster.y;
      value.clusterDim.z = launch.cluster.z;
      cuda::check(
          cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &value), what);
    }
    if (!switchable) kernels_.insert(node);
    return node;
  }

  Tips add_library_step(const Tips& behind, const Enqueue& work, auto&& what) {
    set_tips(stream_, behind);
    work.function(work.params.bytes.data(), stream_);
    return capture_state(stream_, what().c_str()).tips;
  }

  const BoundPlan& bound_;
  cudaStream_t stream_;
  cudaGraph_t graph_;
  std::unordered_set<cudaGraphNode_t> kernels_;  ///< that programmatic edges may lead from
};

/// Without those that another of them waits for anyway.
std::vector<int> direct_predecessors(const Node& node, const Ancestors& ancestors) {
  std::vector<int> direct;
  for (const int p : node.predecessors) {
    const auto later = [&](int other) { return ancestors.precedes(p, other); };
    if (std::none_of(node.predecessors.begin(), node.predecessors.end(), later)) {
      direct.push_back(p);
    }
  }
  return direct;
}

/// Where `record` is not null, nodes that are switched off are put in, and listed there like all.
void add_plan(const BoundPlan& bound, cudaStream_t stream, bool behind_callers,
              std::vector<GraphNodes>* record) {
  const Pipeline& pipeline = bound.pipeline();
  const CaptureState start = capture_state(stream, "capture of a plan");
  const Ancestors ancestors(pipeline.nodes(), pipeline.order());
  Adder adder(bound, stream, start.graph);
  if (behind_callers && is_behind_kernel(start)) adder.admit(start.tips.front());

  Tips roots = start.tips;
  if (bound.plan().options().poison && bound.arena() != nullptr) {
    roots = {adder.add_memset(
        roots,
        memset_params(bound.arena(), 0xff, static_cast<std::size_t>(bound.plan().arena_bytes())),
        "poison of the arena")};
  }

  if (record != nullptr) record->assign(pipeline.nodes().size(), {});
  std::vector<bool> runs(pipeline.nodes().size(), false);
  for (const int node : bound.order()) runs[node] = record != nullptr || bound.enabled(node);
  // A node that does not run hands on what it would have waited for.
  std::vector<Tips> tips(pipeline.nodes().size());
  std::vector<bool> has_successor(pipeline.nodes().size(), false);
  for (const int index : pipeline.order()) {
    const Node& node = pipeline.nodes()[index];
    Tips behind;
    for (const int p : direct_predecessors(node, ancestors)) {
      add_unique(behind, tips[p]);
      has_successor[p] = true;
    }
    if (node.predecessors.empty()) behind = roots;
    tips[index] = runs[index] ? adder.add_node(index, std::move(behind),
                                               record == nullptr ? nullptr : &(*record)[index])
                              : std::move(behind);
  }
  Tips ends;
  for (std::size_t n = 0; n < tips.size(); ++n) {
    if (!has_successor[n]) add_unique(ends, tips[n]);
  }
  set_tips(stream, std::move(ends));
}

}  // namespace

CaptureState capture_state(cudaStream_t stream, const char* what) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureState state;
  const cudaGraphNode_t* tips = nullptr;
  const cudaGraphEdgeData* data = nullptr;
  std::size_t count = 0;
  cuda::check(
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &state.graph, &tips, &data, &count), what);
  if (status != cudaStreamCaptureStatusActive) {
    throw Error(ErrorCode::cuda, fmt::format("{}: the stream's capture was broken", what));
  }
  state.tips.assign(tips, tips + count);
  const auto is_ordinary = [](const cudaGraphEdgeData& edge) {
    return edge.from_port == cudaGraphKernelNodePortDefault &&
           edge.type == cudaGraphDependencyTypeDefault;
  };
  state.for_ends = data == nullptr || std::all_of(data, data + count, is_ordinary);
  return state;
}

bool takes_programmatic(cudaStream_t stream) {
  if (stream == nullptr) return true;  // the legacy stream cannot be captured
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusNone ||
         is_behind_kernel(capture_state(stream, "capture of a run"));
}

void capture_plan(const BoundPlan& bound, cudaStream_t stream, bool behind_callers) {
  add_plan(bound, stream, behind_callers, nullptr);
}

std::vector<GraphNodes> capture_switchable(const BoundPlan& bound, cudaStream_t stream) {
  std::vector<GraphNodes> nodes;
  add_plan(bound, stream, false, &nodes);
  return nodes;
}

KernelNodeParams::KernelNodeParams(const KernelLaunch& launch)
    // The runtime copies the parameters; it only wants them as pointers to non-const.
    : argument_(const_cast<std::byte*>(launch.params.bytes.data())) {
  params_.func = const_cast<void*>(launch.function);
  params_.gridDim = {launch.grid.x, launch.grid.y, launch.grid.z};
  params_.blockDim = {launch.block.x, launch.block.y, launch.block.z};
  params_.sharedMemBytes = launch.shared_bytes;
  params_.kernelParams = &argument_;
}

cudaMemsetParams memset_params(void* destination, unsigned char value, std::size_t bytes) {
  cudaMemsetParams params{};
  params.dst = destination;
  params.value = value;
  params.elementSize = 1;
  params.width = bytes;
  params.height = 1;
  return params;
}

}  // namespace gdnflow

#endif  // GDNFLOW_WITH_CUDA
