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

/// Medians.
struct Times {
  std::optional<double> core_ms{};  ///< g_cumsum and A given; nothing where no node is core
  double forward_ms = 0;            ///< from raw g to o and the final state
};

/// One pipeline, with one set of options, on one case.
struct PipelineResult {
  std::string id;
  std::string options;        ///< what a sweep or breakdown set (Variation::options); else empty
  bool as_given = true;       ///< every option as it is without the sweep or breakdown
  std::optional<Times> hot;   ///< replay behind replay; at least one of the two is there
  std::optional<Times> cold;  ///< each replay behind a write of all of L2
  Accuracy o;
  Accuracy state;
  bool right = false;             ///< within its bounds
  std::int64_t arena_bytes = 0;   ///< intermediates, with reuse
  std::vector<StageTime> stages;  ///< each node timed by itself

  /// Those that ratios, shares and plots of one time are about: hot where measured.
  const Times& times() const { return hot ? *hot : *cold; }
  /// Pipeline and options.
  std::string label() const;
};

struct Refusal {
  std::string id;
  std::string options;  ///< as in PipelineResult; empty: the pipeline itself is refused
  std::string reason;
};

struct CaseResult {
  Case measured;                        ///< what was run
  std::optional<std::string> original;  ///< shape of the case it was scaled down from
  double floor_ms = 0;                  ///< 0: not known
  std::vector<PipelineResult> pipelines;
  std::vector<Refusal> refused;

  /// By PipelineResult::label(); null where it did not run.
  const PipelineResult* find(std::string_view label) const;
  /// The pipeline with its options as given; null where that did not run.
  const PipelineResult* as_given(std::string_view id) const;
};

struct Report {
  std::string version;
  std::string device;       ///< "host", "cuda"
  std::string device_text;  ///< one line about the machine
  std::string gpu;          ///< its name; empty: the host, or a report of before
  std::int32_t capability = 0;
  std::int32_t multiprocessors = 0;  ///< those that the program had
  std::string limit;                 ///< of the multiprocessors, in words; empty: none
  std::string problem;               ///< type and layout, in words
  std::string baseline;              ///< the pipeline that ratios refer to
  double bytes_per_second = 0;
  double macs_per_second = 0;
  std::string tensor_source;
  std::vector<CaseResult> cases;

  bool all_right() const;
  /// Pipelines with their options that ran on any case, in order of appearance.
  std::vector<std::string> labels() const;
  /// Whether any row has options, hot times, cold times.
  bool has_options() const;
  bool has_hot() const;
  bool has_cold() const;
};

/// The baseline's forward time over this row's; nothing where the baseline did not run as given.
std::optional<double> ratio_to_baseline(const Report& report, const CaseResult& result,
                                        const PipelineResult& pipeline);

/// The forward time of the same pipeline as given over this row's; nothing where that did not run.
std::optional<double> ratio_as_given(const CaseResult& result, const PipelineResult& pipeline);

/// For a terminal: machine, one line a case, pipeline and options, stage times, refusals.
std::string to_table(const Report& report);
/// The same in Markdown.
std::string to_markdown(const Report& report);
/// All numbers, one line a case, pipeline and options; one for each option that was refused.
std::string to_csv(const Report& report);
/// commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms: what docs/results holds.
/// Errors: invalid_argument where a row has no hot times.
std::string to_results_csv(const Report& report, std::string_view commit);
std::string to_json(const Report& report);
/// Errors: gdnflow::Error (format), naming the file.
Report report_from_json(std::string_view name, std::string_view text);

}  // namespace gdnflow::apps
