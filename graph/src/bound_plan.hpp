#pragma once

#include <gdnflow/executor.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/stage.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gdnflow {

/// External tensors by index of their edge.
using EdgeTensors = std::vector<std::pair<int, TensorView>>;

/// A plan with memory behind its edges, and the steps that follow from it: what every executor
/// runs. Changes come in two halves, so that an executor can carry them into its executable before
/// they count: `propose` works out the new tensors and steps beside those in force, `commit` makes
/// them the ones in force. Neither allocates once shapes have been seen.
class BoundPlan {
 public:
  /// Devices from this capability on, and kernels for them, can wait by themselves.
  static constexpr int least_programmatic = 90;

  /// One node's tensors and work.
  struct NodeWork {
    std::vector<TensorView> tensors;  ///< by port
    std::vector<TensorView> scratch;
    StepList steps;
    std::int64_t tokens = 0;     ///< rows that there are, as StageCall
    std::int64_t sequences = 0;  ///< the same
  };

  /// `who` starts every message. Of the options nodes, rows and launches count here. Errors:
  /// invalid_argument for a name that no node has, or for fewer rows of dense sequences.
  BoundPlan(Plan plan, std::string who, const ExecutorOptions& options);

  const Plan& plan() const noexcept { return plan_; }
  const Pipeline& pipeline() const noexcept { return plan_.pipeline(); }
  /// Where the intermediates are; null where there are none, or no place yet.
  void* arena() const noexcept { return arena_.value_or(nullptr); }

  /// The bindings' edges by index. Errors: invalid_argument for a name that is no external edge,
  /// or that stands twice.
  void resolve(const Bindings& bindings, EdgeTensors& out) const;

  /// Checks tensors and works out what changes with them, and with a new `arena` where one is
  /// given. Until the first one is (nothing is built), tensors are only checked and kept for later.
  /// Errors: as Executor::bind; invalid_pipeline, naming them, where edges are unbound when an
  /// arena is given. Nothing counts until `commit`.
  void propose(const EdgeTensors& tensors, std::optional<void*> arena = std::nullopt);
  /// Errors: invalid_pipeline, naming them, where external edges are unbound.
  void check_all_bound() const;
  /// Nodes whose steps the proposal changes, in order of execution.
  std::span<const int> proposed_nodes() const noexcept { return affected_; }
  const NodeWork& proposed(int node) const noexcept { return next_[node]; }
  void commit() noexcept;

  /// Nodes that run, in order; switched-off ones are among them.
  std::span<const int> order() const noexcept { return order_; }
  bool enabled(int node) const noexcept { return enabled_[node]; }
  const NodeWork& work(int node) const noexcept { return current_[node]; }
  /// The call as the stage's functions see it; valid while the work is.
  StageCall call(int node, const NodeWork& work) const noexcept;

  /// Index of an optional node that runs. Errors: as Executor::set_enabled.
  int find_optional(std::string_view node) const;
  void set_enabled(int node, bool enabled) noexcept { enabled_[node] = enabled; }

  /// From here on no launch is programmatic, neither those in force nor those of later proposals.
  void forgo_programmatic() noexcept;

  /// The memory of an intermediate. Errors: as Executor::intermediate.
  TensorView intermediate(std::string_view edge) const;

 private:
  /// A free extent of a port: equal symbols of a node must get equal numbers.
  struct FreeExtent {
    int port = 0;
    int dimension = 0;
    int first = 0;  ///< index in the node's list of the first with this symbol
    std::int64_t offset = 0;
  };

  /// The external edges whose first extent is T, or is N (plus an offset), with what all of them
  /// must agree on.
  struct RowGroup {
    struct Member {
      int edge = 0;
      std::int64_t offset = 0;
    };
    std::vector<Member> members;
    std::int64_t most = 0;     ///< the capacity's
    std::int64_t current = 0;  ///< in force
    std::int64_t next = 0;     ///< proposed
  };

  [[noreturn]] void refuse(ErrorCode code, const std::string& message) const;
  std::vector<FreeExtent> list_free_extents(const Node& node) const;
  void check_tensor(int edge, const TensorView& tensor) const;
  void check_free_extents(int node, const NodeWork& work) const;
  void list_row_groups();
  /// Whether the first extent of an edge may be below the capacity's.
  bool may_be_short(int edge) const noexcept;
  /// Works out the rows that a proposal has. Errors: invalid_argument where tensors differ.
  void count_rows(RowGroup& group) const;
  void find_affected(bool all);
  void prepare(int node, void* arena);
  TensorView placed(const Placement& placement, void* arena) const;

  Plan plan_;
  std::string who_;
  bool fewer_rows_;
  bool programmatic_;  ///< launches that are marked so stay so
  RowGroup tokens_;
  RowGroup sequences_;
  std::vector<int> order_;
  std::vector<bool> enabled_;
  std::unordered_map<std::string_view, int> external_;  ///< name -> edge; keys in the plan
  std::vector<std::vector<std::int64_t>> extents_;      ///< by edge; -1: free
  std::vector<std::vector<int>> users_;                 ///< by edge, nodes that run
  std::vector<int> edge_placement_;                     ///< by edge, -1 for external ones
  std::vector<std::vector<int>> scratch_placements_;    ///< by node
  std::vector<std::vector<FreeExtent>> free_extents_;   ///< by node
  std::vector<TensorView> edges_;                       ///< external tensors in force
  std::vector<bool> bound_;                             ///< by edge
  std::optional<void*> arena_;
  std::vector<NodeWork> current_;
  std::vector<NodeWork> next_;

  // The proposal.
  EdgeTensors changes_;
  std::optional<void*> next_arena_;
  std::vector<TensorView> next_edges_;
  std::vector<bool> next_bound_;
  std::vector<bool> is_affected_;
  std::vector<int> affected_;
};

/// Whether two views are of the same memory in the same shape.
bool same_tensor(const TensorView& a, const TensorView& b) noexcept;

/// Whether a step would launch nothing: an empty grid or no bytes. A capacity of 0 tokens makes
/// such steps, and CUDA refuses them.
bool is_empty(const Step& step) noexcept;

/// Errors: internal for a step that is no call on the host.
void check_host_steps(const BoundPlan& bound);

/// Runs the host steps of every enabled node on this thread.
void run_on_host(const BoundPlan& bound);

/// Sets the arena to bytes of 0xff on the host where the plan asks for poison.
void poison_on_host(const BoundPlan& bound);

}  // namespace gdnflow
