#pragma once

#include "gpu/device_externals.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

namespace gdnflow::test {

struct EdgeCount {
  std::size_t all = 0;
  std::size_t programmatic =
      0;  ///< along which a kernel may start before the one in front has ended
};

/// What `enqueue` puts on a stream, as a graph of the caller's.
class CallersGraph {
 public:
  explicit CallersGraph(const std::function<void(cudaStream_t)>& enqueue) {
    const TestStream stream;
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    enqueue(stream);
    REQUIRE(cudaStreamEndCapture(stream, &graph_) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec_, graph_, 0) == cudaSuccess);
  }
  CallersGraph(const CallersGraph&) = delete;
  CallersGraph& operator=(const CallersGraph&) = delete;
  ~CallersGraph() {
    (void)cudaGraphExecDestroy(exec_);
    (void)cudaGraphDestroy(graph_);
  }

  void launch() const {
    REQUIRE(cudaGraphLaunch(exec_, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  std::size_t roots() const {
    std::size_t count = 0;
    REQUIRE(cudaGraphGetRootNodes(graph_, nullptr, &count) == cudaSuccess);
    return count;
  }
  std::size_t nodes() const {
    std::size_t count = 0;
    REQUIRE(cudaGraphGetNodes(graph_, nullptr, &count) == cudaSuccess);
    return count;
  }
  std::size_t programmatic_edges() const { return edges().programmatic; }
  EdgeCount edges() const {
    std::size_t count = 0;
    REQUIRE(cudaGraphGetEdges(graph_, nullptr, nullptr, nullptr, &count) == cudaSuccess);
    std::vector<cudaGraphNode_t> from(count), to(count);
    std::vector<cudaGraphEdgeData> edges(count);
    REQUIRE(cudaGraphGetEdges(graph_, from.data(), to.data(), edges.data(), &count) == cudaSuccess);
    return counted(edges);
  }
  /// Of a graph with one root.
  EdgeCount edges_from_root() const {
    cudaGraphNode_t root = nullptr;
    std::size_t count = 1;
    REQUIRE(cudaGraphGetRootNodes(graph_, &root, &count) == cudaSuccess);
    REQUIRE(cudaGraphNodeGetDependentNodes(root, nullptr, nullptr, &count) == cudaSuccess);
    std::vector<cudaGraphNode_t> to(count);
    std::vector<cudaGraphEdgeData> edges(count);
    REQUIRE(cudaGraphNodeGetDependentNodes(root, to.data(), edges.data(), &count) == cudaSuccess);
    return counted(edges);
  }

 private:
  static EdgeCount counted(const std::vector<cudaGraphEdgeData>& edges) {
    const auto programmatic =
        std::count_if(edges.begin(), edges.end(), [](const cudaGraphEdgeData& edge) {
          return edge.type == cudaGraphDependencyTypeProgrammatic;
        });
    return {edges.size(), static_cast<std::size_t>(programmatic)};
  }

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace gdnflow::test
