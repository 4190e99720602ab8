#pragma once

#include <gdnflow/executor.hpp>

#include "common/reference.hpp"
#include "common/report.hpp"
#include "common/tensors.hpp"
#include "common/timing.hpp"
#include "common/variations.hpp"

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace gdnflow::apps {

struct BenchOptions {
  double seconds = 0.2;  ///< on each median
  bool hot = true;       ///< measure replays behind one another
  bool cold = false;     ///< measure replays behind a write of all of L2; GPU only
  bool trace = false;    ///< mark measurements and stages for a profiler
};

/// Measures pipelines on one case's tensors: results against the oracle, times, stages.
class Bench {
 public:
  /// `workload` and `reference` must outlive the bench.
  Bench(std::string_view case_name, const Workload& workload, const Reference& reference,
        const DeviceInfo& info, Distribution distribution, const BenchOptions& options);

  PipelineResult measure(const Variation& variation) const;

 private:
  std::unique_ptr<Executor> replayed(Plan plan, ExecutorOptions options = {}) const;
  void start(Executor& executor) const;
  std::optional<double> hot_median(Executor& executor) const;
  std::optional<double> cold_median(Executor& executor) const;
  bool is_right(const Comparison& o, const Comparison& state) const;
  void measure_forward(Plan plan, PipelineResult& result) const;
  void measure_parts(const Plan& plan, PipelineResult& result) const;
  void trace_stages(const Plan& plan, ExecutorOptions options) const;

  std::string case_name_;
  const Workload& workload_;
  const Reference& reference_;
  DeviceInfo info_;
  OwnedStream stream_;
  Bounds bounds_;
  bool elementwise_;
  BenchOptions options_;
  std::optional<CacheFlush> flush_;
};

}  // namespace gdnflow::apps
