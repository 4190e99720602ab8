#include <gdnflow/pipeline.hpp>

#include "edge_text.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

/// A port of a node, the way both stand in messages: "kkt_solve.k".
std::string port_text(const Node& node, const Port& port) {
  return fmt::format("{}.{}", node.name, port.name);
}

bool contains(std::span<const std::string> list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

/// Turns stage uses into nodes and edges, one rule after another. The rules are in the order in
/// which a person would want to hear of a mistake: names, variants, connections, types, order.
class Assembly {
 public:
  Assembly(const std::string& id, const Problem& problem, const Capacity& capacity,
           const DeviceInfo& device)
      : id_(id), problem_(problem), capacity_(capacity), device_(device) {}

  void declare_external(const std::vector<std::string>& inputs,
                        const std::vector<std::string>& outputs) {
    for (const auto* list : {&inputs, &outputs}) {
      const EdgeKind kind = list == &inputs ? EdgeKind::input : EdgeKind::output;
      const std::string_view what = list == &inputs ? "input" : "output";
      for (const std::string& name : *list) {
        if (name.empty()) refuse("an {} has no name", what);
        if (find_edge(name) >= 0) {
          refuse("{} '{}': expected to be named once among inputs and outputs", what, name);
        }
        Edge edge;
        edge.name = name;
        edge.kind = kind;
        edges.push_back(std::move(edge));
      }
    }
    inputs_ = inputs;
    outputs_ = outputs;
  }

  void add_node(const Stage& stage, const StageUse& use) {
    const std::string& name = use.name.empty() ? stage.name : use.name;
    if (stage.ports.empty()) refuse("stage '{}': not in the registry", stage.name);
    for (const Node& other : nodes) {
      if (other.name == name) refuse("two nodes are named '{}'", name);
    }
    for (const auto& [port, edge] : use.connect) {
      if (stage.port_index(port) < 0) {
        std::vector<std::string_view> known;
        for (const Port& p : stage.ports) known.push_back(p.name);
        refuse("{}: stage {} has no port '{}', expected one of [{}]", name, stage.name, port,
               fmt::join(known, ", "));
      }
    }
    if (use.optional) {
      for (const Port& port : stage.ports) {
        if (port.direction == Direction::out) {
          refuse("{}.{}: a node that can be switched off may change tensors in place only", name,
                 port.name);
        }
      }
    }
    Node node;
    node.name = name;
    node.stage = stage;
    node.core = use.core;
    node.optional = use.optional;
    nodes.push_back(std::move(node));
    choose_variant(nodes.back(), use.variant);
    uses_.push_back(&use);
  }

  /// Gives every port its edge, and every edge its writer, modifiers and readers.
  void connect() {
    // An optional input joins an edge that is there anyway; an optional output only one that the
    // caller asked for.
    std::set<std::string_view> written;
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      for (const Port& port : nodes[n].stage.ports) {
        if (port.direction == Direction::out && !port.optional) {
          written.insert(wanted_edge(static_cast<int>(n), port));
        }
      }
    }
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      Node& node = nodes[n];
      for (const Port& port : node.stage.ports) {
        const std::string& name = wanted_edge(static_cast<int>(n), port);
        bool connected = !name.empty();
        if (!port.optional) {
          if (!connected) refuse("{}: a required port, expected an edge", port_text(node, port));
        } else if (!uses_[n]->connect.contains(port.name)) {
          connected = contains(inputs_, name) || contains(outputs_, name) ||
                      (port.direction != Direction::out && written.contains(name));
        }
        if (!connected && asked_for(port.name) && !uses_[n]->connect.contains(port.name)) {
          refuse("{}: {} has it, expected an {} of that name, or \"\" in connect to do without",
                 port_text(node, port), to_string(problem_),
                 port.direction == Direction::in ? "input" : "output");
        }
        node.edges.push_back(connected ? join_edge(static_cast<int>(n), port, name) : -1);
      }
    }
  }

  /// Types and extents of every edge, and that each user agrees with them.
  void type_edges() {
    for (Edge& edge : edges) {
      check_users(edge);
      const auto [node, port] = defining_port(edge);
      edge.dtype = resolve_type(*port, problem_, node->chosen());
      edge.extents = port->extents;
      if (edge.writer >= 0) edge.padding = port->padding;
      for (const int user : users_of(edge)) {
        for (std::size_t p = 0; p < nodes[user].edges.size(); ++p) {
          if (nodes[user].edges[p] == index_of(edge)) {
            check_port(edge, port_text(*node, *port), nodes[user], nodes[user].stage.ports[p]);
          }
        }
      }
      if (edge.kind != EdgeKind::intermediate) continue;
      for (const Extent& extent : edge.extents) {
        if (!evaluate(extent, problem_, capacity_)) {
          refuse("{}: edge '{}': extent {} has no value, so the edge must be an input or an output",
                 port_text(*node, *port), edge.name, to_string(extent));
        }
      }
    }
  }

  /// A reader waits for the last change, a change for the one before it, the first change for the
  /// writer. Nothing reads between: such a reader could not be ordered by names alone.
  void link_predecessors() {
    for (const Edge& edge : edges) {
      int last = edge.writer;
      for (const int modifier : edge.modifiers) {
        if (last >= 0) nodes[modifier].predecessors.push_back(last);
        last = modifier;
      }
      for (const int reader : edge.readers) {
        if (last >= 0) nodes[reader].predecessors.push_back(last);
      }
    }
    for (Node& node : nodes) {
      std::sort(node.predecessors.begin(), node.predecessors.end());
      node.predecessors.erase(std::unique(node.predecessors.begin(), node.predecessors.end()),
                              node.predecessors.end());
    }
  }

  /// Repeatedly takes the first node whose predecessors are all taken.
  void sort() {
    std::vector<bool> taken(nodes.size(), false);
    while (order.size() < nodes.size()) {
      std::size_t next = 0;
      const auto ready = [&](std::size_t n) {
        const auto& before = nodes[n].predecessors;
        return !taken[n] &&
               std::all_of(before.begin(), before.end(), [&](int p) { return taken[p]; });
      };
      while (next < nodes.size() && !ready(next)) ++next;
      if (next == nodes.size()) refuse("cycle: {}", cycle_text(taken));
      taken[next] = true;
      order.push_back(static_cast<int>(next));
    }
  }

  std::vector<Node> nodes;
  std::vector<Edge> edges;
  std::vector<int> order;

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(
        ErrorCode::invalid_pipeline,
        fmt::format("pipeline {}: {}", id_, fmt::format(format, std::forward<Args>(args)...)));
  }

  /// Whether the problem says that the external tensor of this name takes part: a pipeline that
  /// left it out would compute something else without a word.
  bool asked_for(std::string_view port) const noexcept {
    const Problem& p = problem_;
    const std::array<std::pair<std::string_view, bool>, 9> tensors{{
        {"cu_seqlens", p.cu_seqlens},
        {"prefix_lens", p.prefix_lens},
        {"initial_state", p.initial_state},
        {"state_indices", p.state_indices},
        {"output_state_indices", p.output_state_indices},
        {"has_initial_state", p.has_initial_state},
        {"checkpoint_state_indices", p.checkpoint_state_indices},
        {"final_state", p.final_state},
        {"checkpoints", p.checkpoint_interval > 0},
    }};
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto& tensor) { return tensor.first == port && tensor.second; });
  }

  int find_edge(std::string_view name) const noexcept {
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (edges[i].name == name) return static_cast<int>(i);
    }
    return -1;
  }
  int index_of(const Edge& edge) const noexcept { return static_cast<int>(&edge - edges.data()); }

  void choose_variant(Node& node, const std::optional<VariantChoice>& choice) {
    const Stage& stage = node.stage;
    const auto verdict = [&](const Variant& variant, const Options& options) {
      return supports(variant, VariantQuery{problem_, capacity_, device_, options});
    };
    if (choice) {
      const Variant* variant = stage.find(choice->id, device_.device.type);
      if (variant == nullptr) {
        // One of another target says so by itself; a name that exists nowhere is a mistake.
        for (const Variant& v : stage.variants) {
          if (v.id == choice->id) variant = &v;
        }
      }
      if (variant == nullptr) {
        std::vector<std::string_view> known;
        for (const Variant& v : stage.variants) known.push_back(v.id);
        refuse("{}: variant: expected one of [{}], got '{}'{}", node.name, fmt::join(known, ", "),
               choice->id, built_with_cuda() ? "" : " (this build has no GPU variants)");
      }
      if (const Support support = verdict(*variant, choice->options); !support) {
        throw Error(ErrorCode::unsupported,
                    fmt::format("pipeline {}: {}: variant {}: {}", id_, node.name,
                                to_string(*choice), support.reason));
      }
      node.variant = static_cast<int>(variant - stage.variants.data());
      node.options = choice->options;
      return;
    }
    std::vector<std::string> reasons;
    for (std::size_t v = 0; v < stage.variants.size(); ++v) {
      const Variant& variant = stage.variants[v];
      const Support support = verdict(variant, {});
      if (support) {
        node.variant = static_cast<int>(v);
        return;
      }
      reasons.push_back(fmt::format("{}: {}", variant.id, support.reason));
    }
    throw Error(
        ErrorCode::unsupported,
        fmt::format("pipeline {}: {}: no variant can serve {} on {} ({})", id_, node.name,
                    to_string(problem_), to_string(device_.device), fmt::join(reasons, "; ")));
  }

  /// The name of the edge that a port would join; empty to leave it alone.
  const std::string& wanted_edge(int node, const Port& port) const {
    const auto found = uses_[node]->connect.find(port.name);
    return found == uses_[node]->connect.end() ? port.name : found->second;
  }

  int join_edge(int node, const Port& port, const std::string& name) {
    int index = find_edge(name);
    if (index < 0) {
      Edge edge;
      edge.name = name;
      index = static_cast<int>(edges.size());
      edges.push_back(std::move(edge));
    }
    Edge& edge = edges[index];
    switch (port.direction) {
      case Direction::in:
        if (edge.readers.empty() || edge.readers.back() != node) edge.readers.push_back(node);
        break;
      case Direction::inout:
        edge.modifiers.push_back(node);
        break;
      case Direction::out:
        if (edge.writer >= 0) {
          refuse("edge '{}': expected one writer, got {} and {}", name, nodes[edge.writer].name,
                 port_text(nodes[node], port));
        }
        edge.writer = node;
        break;
    }
    return index;
  }

  void check_users(const Edge& edge) const {
    const std::vector<int> users = users_of(edge);
    if (edge.kind == EdgeKind::input) {
      if (users.empty()) refuse("input '{}': no stage has a port for it", edge.name);
      if (edge.writer >= 0) {
        refuse("edge '{}': an input, expected no writer, got {}", edge.name,
               nodes[edge.writer].name);
      }
    } else if (edge.writer < 0) {
      if (edge.kind == EdgeKind::output) refuse("output '{}': no stage writes it", edge.name);
      const auto [node, port] = defining_port(edge);
      refuse(
          "{}: edge '{}' has no writer, expected an input of that name or a stage that writes "
          "it",
          port_text(*node, *port), edge.name);
    }
    for (std::size_t i = 1; i < edge.modifiers.size(); ++i) {
      if (edge.modifiers[i] == edge.modifiers[i - 1]) {
        refuse("{}: changes edge '{}' through two ports", nodes[edge.modifiers[i]].name, edge.name);
      }
    }
  }

  /// The port that decides an edge's type: its writer's, else its first user's.
  std::pair<const Node*, const Port*> defining_port(const Edge& edge) const {
    const Node& node = nodes[users_of(edge).front()];
    const Direction direction = edge.writer >= 0         ? Direction::out
                                : edge.modifiers.empty() ? Direction::in
                                                         : Direction::inout;
    for (std::size_t p = 0; p < node.edges.size(); ++p) {
      const Port& port = node.stage.ports[p];
      if (node.edges[p] == index_of(edge) && port.direction == direction) return {&node, &port};
    }
    throw Error(ErrorCode::internal, fmt::format("edge '{}' has no defining port", edge.name));
  }

  void check_port(Edge& edge, const std::string& definer, const Node& node,
                  const Port& port) const {
    const DType expected = resolve_type(port, problem_, node.chosen());
    // Host variants look types up at run time.
    const bool any_float = node.chosen().target == DeviceType::host && is_float(edge.dtype) &&
                           port.direction == Direction::in &&
                           (port.type == TypeRule::activation || port.type == TypeRule::working);
    if (edge.dtype != expected && !any_float) {
      refuse("{}: expected {}, got {} from edge '{}' of {}", port_text(node, port),
             to_string(expected), to_string(edge.dtype), edge.name, definer);
    }
    const auto refuse_shape = [&] {
      refuse("{}: expected {}, got {} from edge '{}' of {}", port_text(node, port),
             shape_text(port.extents, problem_, capacity_),
             shape_text(edge.extents, problem_, capacity_), edge.name, definer);
    };
    if (port.extents.size() != edge.extents.size()) refuse_shape();
    for (std::size_t i = 0; i < port.extents.size(); ++i) {
      const auto wanted = evaluate(port.extents[i], problem_, capacity_);
      const auto have = evaluate(edge.extents[i], problem_, capacity_);
      if (wanted && have && *wanted != *have) refuse_shape();
      // A free extent takes the value that another user of the edge demands.
      if (wanted && !have) edge.extents[i] = port.extents[i];
    }
  }

  /// Names the nodes of one cycle among those that could not be ordered: each of them has a
  /// predecessor among them, so walking backwards must come round.
  std::string cycle_text(const std::vector<bool>& taken) const {
    const auto left_before = [&](int node) {
      const auto& before = nodes[node].predecessors;
      return *std::find_if(before.begin(), before.end(), [&](int p) { return !taken[p]; });
    };
    std::vector<int> path{
        static_cast<int>(std::find(taken.begin(), taken.end(), false) - taken.begin())};
    std::vector<int>::iterator start;
    do {
      path.push_back(left_before(path.back()));
      start = std::find(path.begin(), path.end() - 1, path.back());
    } while (start == path.end() - 1);
    std::vector<std::string_view> names;
    for (auto it = path.end(); it != start;) names.push_back(nodes[*--it].name);
    return fmt::format("{}", fmt::join(names, " -> "));
  }

  const std::string& id_;
  const Problem& problem_;
  const Capacity& capacity_;
  const DeviceInfo& device_;
  std::vector<std::string> inputs_;
  std::vector<std::string> outputs_;
  std::vector<const StageUse*> uses_;
};

}  // namespace

std::vector<int> users_of(const Edge& edge) {
  std::vector<int> users;
  if (edge.writer >= 0) users.push_back(edge.writer);
  users.insert(users.end(), edge.modifiers.begin(), edge.modifiers.end());
  users.insert(users.end(), edge.readers.begin(), edge.readers.end());
  return users;
}

int Pipeline::edge_index(std::string_view name) const noexcept {
  for (std::size_t i = 0; i < edges_.size(); ++i) {
    if (edges_[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

int Pipeline::node_index(std::string_view name) const noexcept {
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

PipelineBuilder::PipelineBuilder(std::string id, const Registry& registry, const Problem& problem,
                                 const Capacity& capacity, const DeviceInfo& device)
    : id_(std::move(id)),
      registry_(&registry),
      problem_(problem),
      capacity_(capacity),
      device_(device) {}

PipelineBuilder& PipelineBuilder::inputs(std::vector<std::string> edges) {
  inputs_.insert(inputs_.end(), edges.begin(), edges.end());
  return *this;
}

PipelineBuilder& PipelineBuilder::outputs(std::vector<std::string> edges) {
  outputs_.insert(outputs_.end(), edges.begin(), edges.end());
  return *this;
}

PipelineBuilder& PipelineBuilder::add(std::string_view stage, StageUse use) {
  Stage found;
  found.name = stage;  // without ports: `build` reports it with the pipeline's other mistakes
  if (registry_->contains(stage)) found = registry_->find(stage);
  uses_.push_back({std::move(found), std::move(use)});
  return *this;
}

Pipeline PipelineBuilder::build() const {
  validate(problem_, capacity_);
  if (uses_.empty()) {
    throw Error(ErrorCode::invalid_pipeline, fmt::format("pipeline {}: has no stages", id_));
  }
  Assembly assembly(id_, problem_, capacity_, device_);
  assembly.declare_external(inputs_, outputs_);
  for (const Use& use : uses_) assembly.add_node(use.stage, use.use);
  assembly.connect();
  assembly.type_edges();
  assembly.link_predecessors();
  assembly.sort();

  Pipeline pipeline;
  pipeline.id_ = id_;
  pipeline.problem_ = problem_;
  pipeline.capacity_ = capacity_;
  pipeline.device_ = device_;
  pipeline.nodes_ = std::move(assembly.nodes);
  pipeline.edges_ = std::move(assembly.edges);
  pipeline.order_ = std::move(assembly.order);
  return pipeline;
}

}  // namespace gdnflow
