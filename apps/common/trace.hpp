#pragma once

#include <string>

namespace gdnflow::apps {

/// A named range of this thread's work on a profiler's timeline (NVTX, in the domain "gdnflow"),
/// from construction to destruction. Costs next to nothing where no profiler listens, and is
/// nothing in a build without CUDA.
class TraceRange {
 public:
  explicit TraceRange(const std::string& name);
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

}  // namespace gdnflow::apps
