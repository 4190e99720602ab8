#pragma once

#include "common/cases.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow::apps {

// What an ablation found, as data: measured once, then written as table, CSV, JSON and plot, or
// read back from JSON.

/// A result against the oracle.
struct Accuracy {
  double rel_rms = 0;
  double max_abs = 0;
  std::int64_t over_tolerance = 0;  ///< elements outside 5e-3 + 5e-3 |expected|
  std::string worst;                ///< the worst element in words
};

struct StageTime {
  std::string node;
  double ms = 0;
};

/// One pipeline on one case.
struct PipelineResult {
  std::string id;
  std::optional<double> core_ms;  ///< g_cumsum and A given; nothing where no node is core
  double forward_ms = 0;          ///< from raw g to o and the final state
  Accuracy o;
  Accuracy state;
  bool right = false;             ///< within its bounds
  std::int64_t arena_bytes = 0;   ///< intermediates, with reuse
  std::vector<StageTime> stages;  ///< each node timed by itself
};

struct Refusal {
  std::string id;
  std::string reason;
};

struct CaseResult {
  Case measured;                        ///< what was run
  std::optional<std::string> original;  ///< shape of the case it was scaled down from
  double floor_ms = 0;                  ///< 0: not known
  std::vector<PipelineResult> pipelines;
  std::vector<Refusal> refused;

  const PipelineResult* find(std::string_view pipeline) const;
};

struct Report {
  std::string version;
  std::string device;       ///< "host", "cuda"
  std::string device_text;  ///< one line about the machine
  std::string problem;      ///< type and layout, in words
  std::string baseline;     ///< the pipeline that ratios refer to
  double bytes_per_second = 0;
  double macs_per_second = 0;
  std::string tensor_source;
  std::vector<CaseResult> cases;

  bool all_right() const;
  /// The pipelines that ran on any case, in order of appearance.
  std::vector<std::string> pipelines() const;
};

/// The baseline's forward time over this pipeline's; nothing where the baseline did not run.
std::optional<double> ratio_to_baseline(const Report& report, const CaseResult& result,
                                        const PipelineResult& pipeline);

/// For a terminal: machine, one line a case and pipeline, stage times, refusals.
std::string to_table(const Report& report);
/// All numbers, one line a case and pipeline.
std::string to_csv(const Report& report);
/// commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms: what docs/results holds.
std::string to_results_csv(const Report& report, std::string_view commit);
std::string to_json(const Report& report);
/// Errors: gdnflow::Error (format), naming the file.
Report report_from_json(std::string_view name, std::string_view text);

}  // namespace gdnflow::apps
