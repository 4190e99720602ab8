#include "bound_plan.hpp"

#include <gdnflow/error.hpp>

#include "edge_text.hpp"

#include <algorithm>
#include <variant>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

constexpr std::int64_t free_extent = -1;

void clear_programmatic(StepList& steps) noexcept {
  for (Step& step : steps) {
    if (auto* const launch = std::get_if<KernelLaunch>(&step.work)) launch->programmatic = false;
  }
}

}  // namespace

bool same_tensor(const TensorView& a, const TensorView& b) noexcept {
  const auto rank = std::clamp<std::int32_t>(a.rank, 0, TensorView::max_rank);
  return a.data == b.data && a.dtype == b.dtype && a.device == b.device && a.rank == b.rank &&
         std::equal(a.extents.begin(), a.extents.begin() + rank, b.extents.begin()) &&
         std::equal(a.strides.begin(), a.strides.begin() + rank, b.strides.begin());
}

BoundPlan::BoundPlan(Plan plan, std::string who, const ExecutorOptions& options)
    : plan_(std::move(plan)),
      who_(std::move(who)),
      fewer_rows_(options.fewer_rows),
      programmatic_(options.programmatic && pipeline().device().capability >= least_programmatic) {
  const std::vector<std::string>& only = options.nodes;
  if (fewer_rows_ && !pipeline().problem().cu_seqlens) {
    refuse(ErrorCode::invalid_argument,
           "fewer rows than the capacity: expected a problem with cu_seqlens, got dense sequences");
  }
  const std::span<const Node> nodes = pipeline().nodes();
  const std::span<const Edge> edges = pipeline().edges();

  std::vector<bool> runs(nodes.size(), only.empty());
  for (const std::string& name : only) {
    const int node = pipeline().node_index(name);
    if (node < 0) {
      std::vector<std::string_view> known;
      for (const Node& n : nodes) known.push_back(n.name);
      refuse(ErrorCode::invalid_argument,
             fmt::format("node: expected one of [{}], got '{}'", fmt::join(known, ", "), name));
    }
    runs[node] = true;
  }
  for (const int node : pipeline().order()) {
    if (runs[node]) order_.push_back(node);
  }
  for (const Node& node : nodes) free_extents_.push_back(list_free_extents(node));
  enabled_.assign(nodes.size(), true);
  current_.resize(nodes.size());
  next_.resize(nodes.size());
  is_affected_.assign(nodes.size(), false);

  edges_.resize(edges.size());
  next_edges_.resize(edges.size());
  bound_.assign(edges.size(), false);
  next_bound_.assign(edges.size(), false);
  edge_placement_.assign(edges.size(), -1);
  scratch_placements_.resize(nodes.size());
  for (std::size_t p = 0; p < plan_.placements().size(); ++p) {
    const Placement& placement = plan_.placements()[p];
    if (placement.edge >= 0) edge_placement_[placement.edge] = static_cast<int>(p);
    if (placement.node >= 0) scratch_placements_[placement.node].push_back(static_cast<int>(p));
  }
  for (std::size_t e = 0; e < edges.size(); ++e) {
    if (edges[e].kind != EdgeKind::intermediate) {
      external_.emplace(edges[e].name, static_cast<int>(e));
    }
    std::vector<std::int64_t>& extents = extents_.emplace_back();
    for (const Extent& extent : edges[e].extents) {
      extents.push_back(
          evaluate(extent, pipeline().problem(), pipeline().capacity()).value_or(free_extent));
    }
    std::vector<int>& users = users_.emplace_back();
    for (const int user : users_of(edges[e])) {
      if (runs[user]) users.push_back(user);
    }
  }
  list_row_groups();
}

void BoundPlan::list_row_groups() {
  const Capacity& capacity = pipeline().capacity();
  tokens_.most = tokens_.current = tokens_.next = capacity.max_tokens;
  sequences_.most = sequences_.current = sequences_.next = capacity.max_sequences;
  for (std::size_t e = 0; fewer_rows_ && e < extents_.size(); ++e) {
    const Edge& edge = pipeline().edges()[e];
    if (edge.kind == EdgeKind::intermediate || edge.extents.empty() ||
        extents_[e].front() == free_extent) {
      continue;
    }
    const Extent& rows = edge.extents.front();
    const RowGroup::Member member{static_cast<int>(e), rows.offset};
    if (rows.symbol == "T") tokens_.members.push_back(member);
    // Pools that the caller indexes have a free extent; others have a row a sequence.
    if (rows.symbol == "N" || rows.symbol == "PI" || rows.symbol == "PO") {
      sequences_.members.push_back(member);
    }
  }
}

bool BoundPlan::may_be_short(int edge) const noexcept {
  const auto has = [&](const RowGroup& group) {
    return std::any_of(group.members.begin(), group.members.end(),
                       [&](const RowGroup::Member& member) { return member.edge == edge; });
  };
  return fewer_rows_ && (has(tokens_) || has(sequences_));
}

void BoundPlan::count_rows(RowGroup& group) const {
  const auto tensor = [&](const RowGroup::Member& member) -> const TensorView& {
    return next_bound_[member.edge] ? next_edges_[member.edge] : edges_[member.edge];
  };
  group.next = group.most;
  for (std::size_t i = 0; i < group.members.size(); ++i) {
    const RowGroup::Member& member = group.members[i];
    const std::int64_t rows = tensor(member).extents[0] - member.offset;
    if (i == 0) group.next = rows;
    if (rows == group.next) continue;
    refuse(ErrorCode::invalid_argument,
           fmt::format("{}: expected {} rows to go with {}, got {}",
                       pipeline().edges()[member.edge].name, group.next + member.offset,
                       pipeline().edges()[group.members.front().edge].name,
                       to_string(tensor(member))));
  }
}

void BoundPlan::refuse(ErrorCode code, const std::string& message) const {
  throw Error(code, fmt::format("{}: {}", who_, message));
}

void BoundPlan::resolve(const Bindings& bindings, EdgeTensors& out) const {
  out.clear();
  for (const auto& [name, tensor] : bindings) {
    const auto found = external_.find(name);
    if (found == external_.end()) {
      std::vector<std::string_view> known;
      for (const Edge& edge : pipeline().edges()) {
        if (edge.kind != EdgeKind::intermediate) known.push_back(edge.name);
      }
      refuse(ErrorCode::invalid_argument,
             fmt::format("tensor: expected one of [{}], got '{}'", fmt::join(known, ", "), name));
    }
    for (const auto& [edge, earlier] : out) {
      if (edge == found->second) {
        refuse(ErrorCode::invalid_argument,
               fmt::format("{}: expected to be bound once, got twice", name));
      }
    }
    out.emplace_back(found->second, tensor);
  }
}

void BoundPlan::check_tensor(int index, const TensorView& tensor) const {
  const Edge& edge = pipeline().edges()[index];
  const std::vector<std::int64_t>& expected = extents_[index];
  const Device device = pipeline().device().device;
  bool fits = tensor.dtype == edge.dtype && tensor.device == device &&
              tensor.rank == static_cast<std::int32_t>(expected.size());
  const bool is_short = may_be_short(index);
  for (std::size_t i = 0; fits && i < expected.size(); ++i) {
    if (i == 0 && is_short) {
      fits = tensor.extents[0] >= edge.extents[0].offset && tensor.extents[0] <= expected[0];
      continue;
    }
    fits = expected[i] == free_extent ? tensor.extents[i] >= 0 : tensor.extents[i] == expected[i];
  }
  const auto mismatch = [&](std::string_view got) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("{}: expected {} {}{}, got {}", edge.name, type_text(edge, pipeline()),
                       to_string(device), is_short ? " or fewer rows" : "", got));
  };
  // A rank out of range would be read past the end by the printer.
  if (tensor.rank < 0 || tensor.rank > TensorView::max_rank) {
    mismatch(fmt::format("a tensor of rank {}", tensor.rank));
  }
  if (!fits) mismatch(to_string(tensor));
  const std::int64_t elements = tensor.elements();
  if (tensor.data == nullptr && elements > 0) mismatch("a null pointer");
  if (tensor.rank > 0 && elements > 0 && tensor.extents[tensor.rank - 1] > 1 &&
      tensor.strides[tensor.rank - 1] != 1) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("{}: expected a contiguous last dimension, got {}", edge.name,
                       to_string(tensor)));
  }
  const bool is_written = edge.writer >= 0 || !edge.modifiers.empty();
  for (int i = 0; is_written && elements > 0 && i < tensor.rank; ++i) {
    if (tensor.extents[i] > 1 && tensor.strides[i] == 0) {
      refuse(ErrorCode::invalid_argument,
             fmt::format("{}: expected rows of their own for what is written, got {}", edge.name,
                         to_string(tensor)));
    }
  }
}

void BoundPlan::check_all_bound() const {
  std::vector<std::string> missing;
  for (std::size_t e = 0; e < bound_.size(); ++e) {
    const Edge& edge = pipeline().edges()[e];
    if (edge.kind != EdgeKind::intermediate && !bound_[e] && !next_bound_[e]) {
      missing.push_back(fmt::format("{} {}", edge.name, type_text(edge, pipeline())));
    }
  }
  if (!missing.empty()) {
    refuse(ErrorCode::invalid_pipeline,
           fmt::format("expected every external tensor to be bound, got none for {}",
                       fmt::join(missing, ", ")));
  }
}

std::vector<BoundPlan::FreeExtent> BoundPlan::list_free_extents(const Node& node) const {
  std::vector<FreeExtent> list;
  std::vector<std::string_view> symbols;
  for (std::size_t p = 0; p < node.edges.size(); ++p) {
    if (node.edges[p] < 0) continue;
    const std::vector<Extent>& extents = node.stage.ports[p].extents;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      if (evaluate(extents[i], pipeline().problem(), pipeline().capacity())) continue;
      const auto known = std::find(symbols.begin(), symbols.end(), extents[i].symbol);
      list.push_back({static_cast<int>(p), static_cast<int>(i),
                      static_cast<int>(known - symbols.begin()), extents[i].offset});
      symbols.push_back(extents[i].symbol);
    }
  }
  return list;
}

void BoundPlan::check_free_extents(int index, const NodeWork& work) const {
  const Node& node = pipeline().nodes()[index];
  const std::vector<FreeExtent>& list = free_extents_[index];
  const auto value = [&](const FreeExtent& e) {
    return work.tensors[e.port].extents[e.dimension] - e.offset;
  };
  for (const FreeExtent& e : list) {
    const FreeExtent& first = list[e.first];
    if (value(e) == value(first)) continue;
    const auto edge = [&](const FreeExtent& of) -> const std::string& {
      return pipeline().edges()[node.edges[of.port]].name;
    };
    refuse(ErrorCode::invalid_argument,
           fmt::format("{}: expected {} = {} as in {}, got {}", edge(e),
                       to_string(node.stage.ports[e.port].extents[e.dimension]),
                       value(first) + e.offset, edge(first), to_string(work.tensors[e.port])));
  }
}

void BoundPlan::propose(const EdgeTensors& tensors, std::optional<void*> arena) {
  changes_.clear();
  affected_.clear();
  next_arena_ = arena ? arena : arena_;
  std::fill(next_bound_.begin(), next_bound_.end(), false);
  for (const auto& [edge, tensor] : tensors) {
    if (bound_[edge] && same_tensor(edges_[edge], tensor)) continue;
    check_tensor(edge, tensor);
    changes_.emplace_back(edge, tensor);
    next_edges_[edge] = tensor;
    next_bound_[edge] = true;
  }
  if (!next_arena_) return;
  const bool new_arena = next_arena_ != arena_;
  if (new_arena) check_all_bound();
  count_rows(tokens_);
  count_rows(sequences_);
  find_affected(new_arena || tokens_.next != tokens_.current ||
                sequences_.next != sequences_.current);
  for (const int node : affected_) prepare(node, *next_arena_);
}

void BoundPlan::find_affected(bool all) {
  if (all) {
    affected_.assign(order_.begin(), order_.end());
    return;
  }
  std::fill(is_affected_.begin(), is_affected_.end(), false);
  for (const auto& [edge, tensor] : changes_) {
    for (const int user : users_[edge]) is_affected_[user] = true;
  }
  for (const int node : order_) {
    if (is_affected_[node]) affected_.push_back(node);
  }
}

TensorView BoundPlan::placed(const Placement& placement, void* arena) const {
  void* data = static_cast<std::byte*>(arena) + placement.offset;
  const Device device = pipeline().device().device;
  if (placement.edge < 0) return TensorView::dense(data, DType::u8, {placement.bytes}, device);
  return TensorView::dense(data, pipeline().edges()[placement.edge].dtype, extents_[placement.edge],
                           device);
}

void BoundPlan::prepare(int index, void* arena) {
  const Node& node = pipeline().nodes()[index];
  NodeWork& work = next_[index];
  work.tensors.clear();
  work.scratch.clear();
  work.steps.clear();
  work.tokens = tokens_.next;
  work.sequences = sequences_.next;
  for (const int edge : node.edges) {
    if (edge < 0) {
      work.tensors.emplace_back();
    } else if (edge_placement_[edge] >= 0) {
      work.tensors.push_back(placed(plan_.placements()[edge_placement_[edge]], arena));
    } else {
      work.tensors.push_back(next_bound_[edge] ? next_edges_[edge] : edges_[edge]);
    }
  }
  for (const int p : scratch_placements_[index]) {
    work.scratch.push_back(placed(plan_.placements()[p], arena));
  }
  check_free_extents(index, work);
  const StageCall stage_call = call(index, work);
  const Variant& variant = node.chosen();
  if (variant.accepts != nullptr) {
    if (const Support support = variant.accepts(stage_call); !support) {
      refuse(ErrorCode::unsupported,
             fmt::format("{} [{}]: {}", node.name, variant.id, support.reason));
    }
  }
  variant.steps(stage_call, work.steps);
  if (!programmatic_) clear_programmatic(work.steps);
}

void BoundPlan::forgo_programmatic() noexcept {
  programmatic_ = false;
  for (NodeWork& work : current_) clear_programmatic(work.steps);
}

void BoundPlan::commit() noexcept {
  for (const auto& [edge, tensor] : changes_) {
    edges_[edge] = tensor;
    bound_[edge] = true;
  }
  for (const int node : affected_) std::swap(current_[node], next_[node]);
  arena_ = next_arena_;
  tokens_.current = tokens_.next;
  sequences_.current = sequences_.next;
  changes_.clear();
  affected_.clear();
}

StageCall BoundPlan::call(int index, const NodeWork& work) const noexcept {
  const Node& node = pipeline().nodes()[index];
  return {pipeline().problem(), pipeline().capacity(), pipeline().device(), node.options,
          node.stage,           work.tensors,          work.scratch,        work.tokens,
          work.sequences};
}

int BoundPlan::find_optional(std::string_view name) const {
  const int node = pipeline().node_index(name);
  if (node < 0 || !pipeline().nodes()[node].optional ||
      std::find(order_.begin(), order_.end(), node) == order_.end()) {
    std::vector<std::string_view> known;
    for (const int n : order_) {
      if (pipeline().nodes()[n].optional) known.push_back(pipeline().nodes()[n].name);
    }
    refuse(ErrorCode::invalid_argument, fmt::format("optional node: expected one of [{}], got '{}'",
                                                    fmt::join(known, ", "), name));
  }
  return node;
}

TensorView BoundPlan::intermediate(std::string_view name) const {
  const int edge = pipeline().edge_index(name);
  if (edge < 0 || edge_placement_[edge] < 0) {
    std::vector<std::string_view> known;
    for (const Edge& e : pipeline().edges()) {
      if (e.kind == EdgeKind::intermediate) known.push_back(e.name);
    }
    refuse(ErrorCode::invalid_argument, fmt::format("intermediate: expected one of [{}], got '{}'",
                                                    fmt::join(known, ", "), name));
  }
  if (!arena_) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("intermediate {}: expected a built executor", name));
  }
  return placed(plan_.placements()[edge_placement_[edge]], *arena_);
}

bool is_empty(const Step& step) noexcept {
  if (const auto* launch = std::get_if<KernelLaunch>(&step.work)) {
    return launch->grid.x == 0 || launch->grid.y == 0 || launch->grid.z == 0;
  }
  if (const auto* memset = std::get_if<Memset>(&step.work)) return memset->bytes == 0;
  return false;
}

}  // namespace gdnflow
