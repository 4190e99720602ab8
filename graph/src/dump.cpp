#include <gdnflow/pipeline.hpp>
#include <gdnflow/plan.hpp>

#include "edge_text.hpp"

#include <algorithm>
#include <functional>

#include <fmt/format.h>
#include <fmt/ranges.h>

// Pipelines and plans as text and as Graphviz.

namespace gdnflow {
namespace {

std::string_view to_string(EdgeKind kind) noexcept {
  switch (kind) {
    case EdgeKind::input:
      return "input";
    case EdgeKind::output:
      return "output";
    case EdgeKind::intermediate:
      return "intermediate";
  }
  return "?";
}

std::string variant_text(const Node& node) {
  return to_string(VariantChoice{node.chosen().id, node.options});
}

/// "chunk_cumsum [naive] (core): g, chunk_table -> g_cumsum"; a tensor changed in place stands on
/// the right with a '*'.
std::string node_text(const Pipeline& pipeline, const Node& node) {
  std::vector<std::string> in;
  std::vector<std::string> out;
  for (std::size_t p = 0; p < node.edges.size(); ++p) {
    if (node.edges[p] < 0) continue;
    const std::string& edge = pipeline.edges()[node.edges[p]].name;
    switch (node.stage.ports[p].direction) {
      case Direction::in:
        in.push_back(edge);
        break;
      case Direction::inout:
        out.push_back(edge + "*");
        break;
      case Direction::out:
        out.push_back(edge);
        break;
    }
  }
  std::string text = node.name;
  if (node.name != node.stage.name) text += " = " + node.stage.name;
  text += fmt::format(" [{}]", variant_text(node));
  if (node.core) text += " (core)";
  if (node.optional) text += " (optional)";
  return fmt::format("{}: {} -> {}", text, fmt::join(in, ", "), fmt::join(out, ", "));
}

std::string edge_text(const Pipeline& pipeline, const Edge& edge) {
  const auto names = [&](const std::vector<int>& nodes) {
    std::vector<std::string_view> list;
    for (const int node : nodes) list.push_back(pipeline.nodes()[node].name);
    return fmt::format("{}", fmt::join(list, ", "));
  };
  std::string text =
      fmt::format("{}: {} {}", edge.name, to_string(edge.kind), type_text(edge, pipeline));
  if (edge.writer >= 0) text += ", written by " + pipeline.nodes()[edge.writer].name;
  if (!edge.modifiers.empty()) text += ", changed by " + names(edge.modifiers);
  if (!edge.readers.empty()) text += ", read by " + names(edge.readers);
  return text;
}

std::string heading(const Pipeline& pipeline) {
  return fmt::format("pipeline {}: {}; {}; on {}\n", pipeline.id(), to_string(pipeline.problem()),
                     to_string(pipeline.capacity()), to_string(pipeline.device()));
}

std::string nodes_text(const Pipeline& pipeline) {
  std::string text = "nodes, in order:\n";
  for (const int n : pipeline.order()) {
    text += fmt::format("  {}\n", node_text(pipeline, pipeline.nodes()[n]));
  }
  return text;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

/// Stages as boxes (core ones filled, optional ones dashed), external tensors as ellipses.
/// `note` adds a line to the label of an intermediate.
std::string dot(const Pipeline& pipeline, const std::function<std::string(int edge)>& note) {
  std::string text = fmt::format("digraph {} {{\n", quoted(pipeline.id()));
  text += "  rankdir=TB;\n  node [fontname=\"Helvetica\", fontsize=11];\n";
  text += "  edge [fontname=\"Helvetica\", fontsize=9];\n";
  // Graphviz reads \n in a label as a line break, so it is put in behind the quoting.
  const auto label = [](std::string_view first, std::string_view second) {
    return quoted(first).substr(0, quoted(first).size() - 1) + "\\n" + quoted(second).substr(1);
  };
  for (const Node& node : pipeline.nodes()) {
    std::vector<std::string_view> style;
    if (node.core) style.push_back("filled");
    if (node.optional) style.push_back("dashed");
    text += fmt::format("  {} [shape=box, label={}, style={}];\n", quoted("node " + node.name),
                        label(node.name, variant_text(node)),
                        quoted(fmt::format("{}", fmt::join(style, ","))));
  }
  for (std::size_t e = 0; e < pipeline.edges().size(); ++e) {
    const Edge& edge = pipeline.edges()[e];
    const bool external = edge.kind != EdgeKind::intermediate;
    const std::string tensor = quoted("tensor " + edge.name);
    std::string shape = type_text(edge, pipeline);
    if (external) {
      text += fmt::format("  {} [shape=ellipse, label={}];\n", tensor, label(edge.name, shape));
    } else if (const std::string extra = note(static_cast<int>(e)); !extra.empty()) {
      shape += " " + extra;
    }
    const auto node = [&](int n) { return quoted("node " + pipeline.nodes()[n].name); };
    const auto arrow = [&](const std::string& from, const std::string& to) {
      text += external ? fmt::format("  {} -> {};\n", from, to)
                       : fmt::format("  {} -> {} [label={}];\n", from, to, label(edge.name, shape));
    };
    // The tensor's way: from its writer (or the caller) through the changes to the readers.
    std::string source = edge.writer >= 0 ? node(edge.writer) : tensor;
    for (const int modifier : edge.modifiers) {
      arrow(source, node(modifier));
      source = node(modifier);
    }
    for (const int reader : edge.readers) arrow(source, node(reader));
    const bool leaves = edge.kind == EdgeKind::output || !edge.modifiers.empty();
    if (external && leaves) text += fmt::format("  {} -> {};\n", source, tensor);
  }
  return text + "}\n";
}

}  // namespace

std::string shape_text(std::span<const Extent> extents, const Problem& problem,
                       const Capacity& capacity) {
  std::vector<std::string> values;
  for (const Extent& extent : extents) {
    const auto value = evaluate(extent, problem, capacity);
    values.push_back(value ? fmt::to_string(*value) : to_string(extent));
  }
  return fmt::format("[{}]", fmt::join(values, ","));
}

std::string type_text(const Edge& edge, const Pipeline& pipeline) {
  return fmt::format("{}{}", to_string(edge.dtype),
                     shape_text(edge.extents, pipeline.problem(), pipeline.capacity()));
}

std::string to_string(const Pipeline& pipeline) {
  std::string text = heading(pipeline) + nodes_text(pipeline) + "edges:\n";
  for (const Edge& edge : pipeline.edges()) {
    text += fmt::format("  {}\n", edge_text(pipeline, edge));
  }
  return text;
}

std::string to_dot(const Pipeline& pipeline) {
  return dot(pipeline, [](int) { return std::string(); });
}

std::string to_string(const Plan& plan) {
  std::string text = heading(plan.pipeline());
  text +=
      fmt::format("arena: {} bytes, {} without reuse\n", plan.arena_bytes(), plan.unshared_bytes());
  std::vector<const Placement*> by_offset;
  for (const Placement& placement : plan.placements()) by_offset.push_back(&placement);
  std::stable_sort(by_offset.begin(), by_offset.end(),
                   [](const Placement* a, const Placement* b) { return a->offset < b->offset; });
  for (const Placement* placement : by_offset) {
    text +=
        fmt::format("  {:>12} +{:<12} {}", placement->offset, placement->bytes, placement->name);
    if (placement->edge >= 0) {
      text +=
          fmt::format(" {}", type_text(plan.pipeline().edges()[placement->edge], plan.pipeline()));
    }
    text += "\n";
  }
  return text + nodes_text(plan.pipeline());
}

std::string to_dot(const Plan& plan) {
  return dot(plan.pipeline(), [&](int edge) {
    for (const Placement& placement : plan.placements()) {
      if (placement.edge == edge) return fmt::format("at {}", placement.offset);
    }
    return std::string();
  });
}

}  // namespace gdnflow
