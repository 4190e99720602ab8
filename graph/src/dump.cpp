#include <gdnflow/pipeline.hpp>
#include <gdnflow/plan.hpp>

#include "edge_text.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

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

/// A label of several lines. Graphviz reads \n in a label as a line break, so the breaks are put in
/// behind the quoting.
std::string label(const std::vector<std::string>& lines) {
  std::vector<std::string> bodies;
  for (const std::string& line : lines) {
    const std::string text = quoted(line);
    bodies.push_back(text.substr(1, text.size() - 2));
  }
  return fmt::format("\"{}\"", fmt::join(bodies, "\\n"));
}

/// Stages as boxes (core ones filled, optional ones dashed), external tensors as ellipses, and one
/// arrow between two stages with all that flows there. `note` adds to an intermediate's line.
std::string dot(const Pipeline& pipeline, const std::function<std::string(int edge)>& note) {
  std::string text = fmt::format("digraph {} {{\n", quoted(pipeline.id()));
  text += "  rankdir=TB;\n  node [fontname=\"Helvetica\", fontsize=11];\n";
  text += "  edge [fontname=\"Helvetica\", fontsize=9];\n";
  const auto box = [&](int n) { return quoted("node " + pipeline.nodes()[n].name); };
  for (std::size_t n = 0; n < pipeline.nodes().size(); ++n) {
    const Node& node = pipeline.nodes()[n];
    std::vector<std::string_view> style;
    if (node.core) style.push_back("filled");
    if (node.optional) style.push_back("dashed");
    text += fmt::format("  {} [shape=box, label={}, style={}];\n", box(static_cast<int>(n)),
                        label({node.name, variant_text(node)}),
                        quoted(fmt::format("{}", fmt::join(style, ","))));
  }
  std::map<std::pair<int, int>, std::vector<std::string>> flows;
  for (std::size_t e = 0; e < pipeline.edges().size(); ++e) {
    const Edge& edge = pipeline.edges()[e];
    std::string line = fmt::format("{} {}", edge.name, type_text(edge, pipeline));
    const std::string tensor = quoted("tensor " + edge.name);
    if (edge.kind == EdgeKind::intermediate) {
      line += note(static_cast<int>(e));
    } else {
      text += fmt::format("  {} [shape=ellipse, label={}];\n", tensor,
                          label({edge.name, type_text(edge, pipeline)}));
    }
    // The tensor's way: from its writer (or the caller) through the changes to the readers.
    int source = edge.writer;
    const auto arrow = [&](int to) {
      if (source >= 0) {
        flows[{source, to}].push_back(line);
      } else {
        text += fmt::format("  {} -> {};\n", tensor, box(to));
      }
    };
    for (const int modifier : edge.modifiers) {
      arrow(modifier);
      source = modifier;
    }
    for (const int reader : edge.readers) arrow(reader);
    const bool leaves =
        edge.kind == EdgeKind::output || (edge.kind == EdgeKind::input && !edge.modifiers.empty());
    if (leaves) text += fmt::format("  {} -> {};\n", box(source), tensor);
  }
  for (const auto& [ends, lines] : flows) {
    text +=
        fmt::format("  {} -> {} [label={}];\n", box(ends.first), box(ends.second), label(lines));
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
      if (placement.edge == edge) return fmt::format(" at {}", placement.offset);
    }
    return std::string();
  });
}

}  // namespace gdnflow
