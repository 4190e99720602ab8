#include "prefill_tensors.hpp"

#include <gdnflow/error.hpp>

#include "edge_text.hpp"

#include <fmt/format.h>

namespace gdnflow {

TensorEdges tensor_edges(const Pipeline& pipeline) {
  TensorEdges edges{};
  for (std::size_t i = 0; i < edges.size(); ++i) {
    edges[i] = pipeline.edge_index(tensor_names[i].edge);
  }
  return edges;
}

void check_presence(const Pipeline& pipeline, const TensorEdges& edges,
                    const PrefillTensors& tensors, std::string_view who) {
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const TensorView& tensor = tensors.*tensor_names[i].member;
    const bool absent = tensor.data == nullptr && tensor.rank == 0;
    if (absent == (edges[i] < 0)) continue;
    std::string expected = "none for " + to_string(pipeline.problem());
    if (absent) {
      expected = type_text(pipeline.edges()[edges[i]], pipeline) + " " +
                 to_string(pipeline.device().device);
    }
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: {}: expected {}, got {}", who, tensor_names[i].edge, expected,
                            absent ? "none" : describe(tensor)));
  }
}

std::string describe(const TensorView& tensor) {
  const bool printable = tensor.rank > 0 && tensor.rank <= TensorView::max_rank;
  return printable ? to_string(tensor) : fmt::format("a tensor of rank {}", tensor.rank);
}

}  // namespace gdnflow
