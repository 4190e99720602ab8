#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/registry.hpp>
#include <gdnflow/stage.hpp>

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow {

/// Where an edge's memory comes from.
enum class EdgeKind : std::uint8_t {
  input,         ///< bound by the caller, read (or changed in place) by the pipeline
  output,        ///< bound by the caller, written by the pipeline
  intermediate,  ///< placed in the arena by the planner
};

/// A tensor that flows between stages: one writer (or none, for an input), any number of stages
/// that change it in place, in the order in which they were added, and any number of readers, all
/// of them behind the last change.
struct Edge {
  std::string name;
  EdgeKind kind = EdgeKind::intermediate;
  DType dtype = DType::f32;
  std::vector<Extent> extents;
  Padding padding = Padding::untouched;
  int writer = -1;               ///< node, or -1
  std::vector<int> modifiers{};  ///< nodes with an inout port on it, in order
  std::vector<int> readers{};    ///< nodes
};

/// A stage in a pipeline, with its chosen variant and the edge on each of its ports.
struct Node {
  std::string name;
  Stage stage;
  int variant = 0;  ///< index into stage.variants
  Options options;
  std::vector<int> edges;         ///< per port: index of an edge, -1 where not connected
  std::vector<int> predecessors;  ///< nodes that must finish first, ascending
  bool core = false;              ///< counted by the "core" timing scope
  bool optional = false;          ///< can be switched off in a built executor

  const Variant& chosen() const { return stage.variants[variant]; }
};

/// A validated DAG of stages with chosen variants, for one problem, capacity and device. Immutable,
/// so safe to share between threads.
class GDNFLOW_API Pipeline {
 public:
  const std::string& id() const noexcept { return id_; }
  const Problem& problem() const noexcept { return problem_; }
  const Capacity& capacity() const noexcept { return capacity_; }
  const DeviceInfo& device() const noexcept { return device_; }
  std::span<const Node> nodes() const noexcept { return nodes_; }
  std::span<const Edge> edges() const noexcept { return edges_; }
  /// Node indices in an order that respects every dependency; among free ones, the order added.
  std::span<const int> order() const noexcept { return order_; }

  /// Index by name, or -1.
  int edge_index(std::string_view name) const noexcept;
  int node_index(std::string_view name) const noexcept;

 private:
  friend class PipelineBuilder;
  std::string id_;
  Problem problem_;
  Capacity capacity_;
  DeviceInfo device_;
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::vector<int> order_;
};

/// How a stage joins a pipeline.
struct StageUse {
  std::string name{};                      ///< of the node; the stage's name if empty
  std::optional<VariantChoice> variant{};  ///< else the first of the stage's list that can serve
  std::map<std::string, std::string> connect{};  ///< port -> edge; a port not named here goes to
                                                 ///< the edge of its own name. "" leaves an
                                                 ///< optional port unconnected
  bool core = false;
  bool optional = false;  ///< may be switched off; every output must then be inout
};

/// Collects stages and turns them into a Pipeline.
///
///   Pipeline p = PipelineBuilder("mine", builtin_stages(), problem, capacity, device)
///                    .inputs({"q", "k", "v", "g", "beta", "cu_seqlens"})
///                    .outputs({"o", "final_state"})
///                    .add("chunk_index").add("chunk_cumsum") ... .build();
///
/// An optional port is connected when `connect` names it, or when the pipeline has an edge of its
/// name (an input, an output, or something another stage writes through a required port).
class GDNFLOW_API PipelineBuilder {
 public:
  PipelineBuilder(std::string id, const Registry& registry, const Problem& problem,
                  const Capacity& capacity, const DeviceInfo& device);

  PipelineBuilder& inputs(std::vector<std::string> edges);
  PipelineBuilder& outputs(std::vector<std::string> edges);
  PipelineBuilder& add(std::string_view stage, StageUse use = {});

  /// Validates and resolves variants. Errors: invalid_argument for a bad problem or capacity;
  /// invalid_pipeline, naming stage and port, for an unknown stage or port, a type or extent that
  /// does not match between writer and reader, an edge with two writers or none, an output nobody
  /// writes, a free extent on an intermediate, a cycle, two nodes of one name, an optional stage
  /// with a plain output; unsupported, with the variants' reasons, where no variant can serve.
  Pipeline build() const;

 private:
  struct Use {
    Stage stage;
    StageUse use;
  };
  std::string id_;
  const Registry* registry_;
  Problem problem_;
  Capacity capacity_;
  DeviceInfo device_;
  std::vector<std::string> inputs_;
  std::vector<std::string> outputs_;
  std::vector<Use> uses_;
};

/// One line a node and an edge.
GDNFLOW_API std::string to_string(const Pipeline& pipeline);
/// Graphviz.
GDNFLOW_API std::string to_dot(const Pipeline& pipeline);

}  // namespace gdnflow
