#pragma once

#if GDNFLOW_WITH_CUDA

#include "bound_plan.hpp"
#include "cuda.hpp"
#include "executor_base.hpp"

#include <string>

namespace gdnflow {

/// Memory of an arena on a plan's device.
ArenaMemory allocate_on_device(const Plan& plan, std::int64_t bytes);

/// Loads every kernel of a bound plan (CUDA loads lazily, which would allocate and wait in the
/// first run), raises limits that a launch needs, and lets library steps load theirs by capturing
/// them into a graph that is thrown away. Where a kernel turns out to be compiled for an
/// architecture that cannot wait, none is launched programmatically. The plan's device must be
/// current. Errors: cuda, naming node and step; internal for a step that runs on the host.
void prepare_kernels(BoundPlan& bound);

/// Enqueues one node's steps; gives whether there were any. Unless it `overlaps`, the first of them
/// waits for all in front of it on the stream to end. The plan's device must be current.
bool enqueue_node(const BoundPlan& bound, int node, cudaStream_t stream, bool overlaps);

/// Enqueues the arena's poison, where the plan asks for it, and the steps of all enabled nodes.
/// With `behind_callers` the first of them may overlap what the caller has in front.
void enqueue(const BoundPlan& bound, cudaStream_t stream, bool behind_callers);

/// "naive: kkt_solve, step kkt_solve" for messages.
std::string step_text(const BoundPlan& bound, int node, const Step& step);

}  // namespace gdnflow

#endif  // GDNFLOW_WITH_CUDA
