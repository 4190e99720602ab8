#include <gdnflow/error.hpp>
#include <gdnflow/plan.hpp>

#include "dag.hpp"
#include "edge_text.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

/// A buffer to be placed: the nodes that touch it, the first of them in the DAG in front.
struct Buffer {
  Placement placement;
  std::vector<int> users;
  std::int64_t reserved = 0;  ///< bytes with the alignment; never 0, so every buffer has an address
};

[[noreturn]] void refuse_size(const Pipeline& pipeline, const std::string& name) {
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("plan {}: {}: expected a size of less than 2^62 bytes", pipeline.id(), name));
}

std::int64_t edge_bytes(const Pipeline& pipeline, const Edge& edge) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(edge.dtype));
  for (const Extent& extent : edge.extents) {
    const std::int64_t value = *evaluate(extent, pipeline.problem(), pipeline.capacity());
    if (value < 0 || __builtin_mul_overflow(bytes, value, &bytes)) {
      refuse_size(pipeline, edge.name);
    }
  }
  return bytes;
}

void reserve(const Pipeline& pipeline, Buffer& buffer) {
  constexpr std::int64_t most = std::int64_t{1} << 62;
  const std::int64_t bytes = buffer.placement.bytes;
  if (bytes < 0 || bytes > most) refuse_size(pipeline, buffer.placement.name);
  buffer.reserved =
      std::max<std::int64_t>(1, (bytes + Plan::alignment - 1) / Plan::alignment) * Plan::alignment;
}

std::vector<Buffer> list_buffers(const Pipeline& pipeline) {
  std::vector<Buffer> buffers;
  for (std::size_t e = 0; e < pipeline.edges().size(); ++e) {
    const Edge& edge = pipeline.edges()[e];
    if (edge.kind != EdgeKind::intermediate) continue;
    Buffer buffer;
    buffer.placement = {edge.name, static_cast<int>(e), -1, 0, edge_bytes(pipeline, edge)};
    buffer.users = users_of(edge);
    buffers.push_back(std::move(buffer));
  }
  for (const int n : pipeline.order()) {
    const Node& node = pipeline.nodes()[n];
    if (node.chosen().scratch == nullptr) continue;
    const VariantQuery query{pipeline.problem(), pipeline.capacity(), pipeline.device(),
                             node.options};
    for (const ScratchSpec& spec : node.chosen().scratch(query)) {
      Buffer buffer;
      buffer.placement = {node.name + "/" + spec.name, -1, n, 0, spec.bytes};
      buffer.users = {n};
      buffers.push_back(std::move(buffer));
    }
  }
  for (Buffer& buffer : buffers) reserve(pipeline, buffer);
  return buffers;
}

/// Whether everything that touches `first` is over before anything touches `second`.
bool before(const Ancestors& ancestors, const Buffer& first, const Buffer& second) {
  return std::all_of(first.users.begin(), first.users.end(),
                     [&](int user) { return ancestors.precedes(user, second.users.front()); });
}

/// Greedy, the largest first: each goes into the smallest gap that holds it among the buffers that
/// may be alive at the same time, else behind them. Returns the arena's size.
std::int64_t place_with_reuse(const Pipeline& pipeline, std::vector<Buffer>& buffers) {
  const Ancestors ancestors(pipeline.nodes(), pipeline.order());
  std::vector<std::size_t> by_size(buffers.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(), [&](std::size_t a, std::size_t b) {
    return buffers[a].reserved > buffers[b].reserved;
  });
  std::int64_t arena = 0;
  std::vector<const Buffer*> placed;  // by offset
  for (const std::size_t index : by_size) {
    Buffer& buffer = buffers[index];
    std::int64_t best = -1;
    std::int64_t best_gap = std::numeric_limits<std::int64_t>::max();
    std::int64_t end = 0;  // of the conflicting buffers so far
    for (const Buffer* other : placed) {
      if (before(ancestors, *other, buffer) || before(ancestors, buffer, *other)) continue;
      const std::int64_t gap = other->placement.offset - end;
      if (gap >= buffer.reserved && gap < best_gap) {
        best = end;
        best_gap = gap;
      }
      end = std::max(end, other->placement.offset + other->reserved);
    }
    buffer.placement.offset = best >= 0 ? best : end;
    arena = std::max(arena, buffer.placement.offset + buffer.reserved);
    const auto position = std::upper_bound(
        placed.begin(), placed.end(), buffer.placement.offset,
        [](std::int64_t offset, const Buffer* other) { return offset < other->placement.offset; });
    placed.insert(position, &buffer);
  }
  return arena;
}

}  // namespace

Plan::Plan(Pipeline pipeline, PlanOptions options)
    : pipeline_(std::make_shared<const Pipeline>(std::move(pipeline))), options_(options) {
  std::vector<Buffer> buffers = list_buffers(*pipeline_);
  for (Buffer& buffer : buffers) {
    buffer.placement.offset = unshared_bytes_;
    if (__builtin_add_overflow(unshared_bytes_, buffer.reserved, &unshared_bytes_)) {
      refuse_size(*pipeline_, "the arena");
    }
  }
  arena_bytes_ = options_.reuse ? place_with_reuse(*pipeline_, buffers) : unshared_bytes_;
  for (Buffer& buffer : buffers) placements_.push_back(std::move(buffer.placement));
}

}  // namespace gdnflow
