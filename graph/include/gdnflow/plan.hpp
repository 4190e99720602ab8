#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/pipeline.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace gdnflow {

struct PlanOptions {
  /// Place intermediates over one another where the DAG allows it. Off: every intermediate has
  /// memory of its own, so that all of them can be read after a run (debugging, timing of parts).
  bool reuse = true;
  /// Executors fill the arena with NaN (bytes of 0xff) when they build and before each run, so that
  /// a read of memory nobody wrote shows. For debugging.
  bool poison = false;

  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

/// A piece of the arena: an intermediate edge, or scratch of a node.
struct Placement {
  std::string name;  ///< edge name, or "node/scratch"
  int edge = -1;     ///< or -1 for scratch
  int node = -1;     ///< the scratch's node, or -1 for an edge
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

/// A pipeline with memory: every intermediate and scratch at an offset of one arena. A buffer
/// takes another's place only if all that touch the old one precede, in the DAG, the first that
/// touches the new one; so parallel branches never share. Immutable, so safe to share.
class GDNFLOW_API Plan {
 public:
  static constexpr std::int64_t alignment = 256;

  explicit Plan(Pipeline pipeline, PlanOptions options = {});

  const Pipeline& pipeline() const noexcept { return *pipeline_; }
  const PlanOptions& options() const noexcept { return options_; }
  std::span<const Placement> placements() const noexcept { return placements_; }
  std::int64_t arena_bytes() const noexcept { return arena_bytes_; }
  /// What the arena would take without reuse.
  std::int64_t unshared_bytes() const noexcept { return unshared_bytes_; }

 private:
  std::shared_ptr<const Pipeline> pipeline_;
  PlanOptions options_;
  std::vector<Placement> placements_;
  std::int64_t arena_bytes_ = 0;
  std::int64_t unshared_bytes_ = 0;
};

/// The arena's map and the nodes in order.
GDNFLOW_API std::string to_string(const Plan& plan);
/// Graphviz, with offsets on the intermediates.
GDNFLOW_API std::string to_dot(const Plan& plan);

}  // namespace gdnflow
