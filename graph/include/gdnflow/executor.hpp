#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gdnflow {

/// External tensors by edge name.
using Bindings = std::vector<std::pair<std::string, TensorView>>;

struct ExecutorOptions {
  /// Memory for intermediates, on the plan's device, 256-byte aligned, at least
  /// Plan::arena_bytes(). Null: the executor allocates its own when it builds.
  void* arena = nullptr;
  std::int64_t arena_bytes = 0;
  /// Run these nodes only (by name); empty: all. What the others would have written must be in the
  /// arena already, which takes an arena of the caller's and a plan without reuse.
  std::vector<std::string> nodes{};
  /// External tensors may have fewer rows than the capacity: those of T rows any number, all the
  /// same, and those of N rows too (cu_seqlens one more). Nothing past them is read or written;
  /// sequences that have no row are empty and without a slot. A change of either number changes the
  /// parameters of every kernel, which `bind` updates in place. Not for dense sequences.
  bool fewer_rows = false;
  /// On a GPU of sm_90 and later a kernel that waits for the one in front by itself may start while
  /// that one drains (programmatic dependent launch). false: each starts when the last has ended,
  /// for a profiler, or neighbours that take it badly.
  bool programmatic = true;
  /// The same for what `run` puts first and the caller's kernel in front of it: launched eagerly,
  /// and in a graph that the caller captures, where one kernel of the same device stands in front.
  /// Nothing of that kernel is read or overwritten before it has completed, whatever it does. Of
  /// those in front of it that holds only if it has waited for them: it was launched the ordinary
  /// way, or calls griddepcontrol.wait (cudaGridDependencySynchronize). That is the caller's to
  /// know, hence not the default. Replays are not concerned: CUDA orders a graph as a whole.
  bool behind_callers = false;
};

/// The time of a node, measured alone on a stream.
struct NodeTime {
  std::string node;
  double median_ms = 0;
};

/// Runs one plan. Life: bind -> build -> run x N -> bind again (new pointers, same shapes) -> run.
/// After `build`, `run` allocates nothing, waits for nothing and reads no device data on the host;
/// lengths are read on the device, so one built executor serves any batch within its capacity.
/// An executor is used by one thread at a time, and its arena by one stream at a time; several
/// executors share nothing and may run at once.
class GDNFLOW_API Executor {
 public:
  virtual ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  virtual std::string_view kind() const noexcept = 0;  ///< "host", "eager", "graph"
  virtual const Plan& plan() const noexcept = 0;

  /// Sets or changes the memory behind external edges; edges not named keep theirs. Before the
  /// first build every external edge must be bound. Afterwards this updates the executable in
  /// place, without instantiation. Nothing is changed when it throws. Errors: invalid_argument,
  /// naming edge, expected and got, for an unknown edge, a wrong type, rank, extent or device, a
  /// last dimension that is not contiguous, or a null pointer where there are elements; unsupported
  /// where a variant refuses the tensor, or a library step would have to be edited.
  virtual void bind(const Bindings& bindings) = 0;

  /// Allocates, warms up, instantiates, uploads; also while this thread captures a stream, in any
  /// mode. Errors: invalid_pipeline, naming them, where edges are not bound; cuda.
  virtual void build() = 0;

  /// Enqueues one pass on `stream` (the host executor runs it to completion). The stream may be
  /// one that the caller is capturing: the caller's graph then uses this executor's arena, so keep
  /// the executor as long as the graph, or give it an arena of your own. Errors: invalid_argument
  /// before `build`; cuda.
  virtual void run(Stream stream = nullptr) = 0;

  /// Switches an optional node on or off for the runs that follow. Errors: invalid_argument for a
  /// node that does not exist or is not optional.
  virtual void set_enabled(std::string_view node, bool enabled) = 0;

  /// Runs each node by itself `repeats` times, in order, and gives medians. Waits. Host and eager
  /// only; errors: unsupported.
  virtual std::vector<NodeTime> profile(int repeats, Stream stream = nullptr) = 0;

  /// The memory of an intermediate edge, for debugging: meaningful after a run of a plan without
  /// reuse. Errors: invalid_argument for an unknown edge or before `build`.
  virtual TensorView intermediate(std::string_view edge) const = 0;

 protected:
  Executor() = default;
};

GDNFLOW_API std::unique_ptr<Executor> make_host_executor(Plan plan, ExecutorOptions options = {});
/// Launches step by step on a stream. Errors: unsupported in a build without CUDA.
GDNFLOW_API std::unique_ptr<Executor> make_eager_executor(Plan plan, ExecutorOptions options = {});
/// Builds a CUDA graph with a node a kernel, branches kept parallel, and replays it.
GDNFLOW_API std::unique_ptr<Executor> make_graph_executor(Plan plan, ExecutorOptions options = {});
/// The host executor for a host plan, the eager one for a CUDA plan.
GDNFLOW_API std::unique_ptr<Executor> make_executor(Plan plan, ExecutorOptions options = {});

}  // namespace gdnflow
