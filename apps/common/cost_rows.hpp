#pragma once

#include <gdnflow/problem.hpp>

#include "common/report.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow::apps {

/// A measurement that costs are fitted to: a pipeline with options on one case and machine.
struct CostRow {
  std::string gpu;
  std::int32_t capability = 0;
  std::int32_t multiprocessors = 0;
  std::vector<std::int64_t> lengths;
  std::int32_t qk_heads = 0;
  std::int32_t v_heads = 0;
  bool initial_state = false;
  std::string pipeline;
  std::string options;  ///< as Variation::options
  std::optional<double> core_ms{};
  double forward_ms = 0;

  bool equal_lengths() const;
  /// Heads alone; all else as by default.
  Problem problem() const;
  Capacity capacity() const;
  /// "28672+4096_2_8", "4x8192_2_8", "1025_2_8_state".
  std::string case_name() const;
};

/// The rows with right results and hot times of a report on a GPU. Errors: gdnflow::Error
/// (invalid_argument) where the report does not name its GPU.
std::vector<CostRow> cost_rows(const Report& report);

/// Reads commit,gpu,capability,multiprocessors,case,pipeline,options,core_ms,forward_ms; `commit`
/// is not looked at. Errors: gdnflow::Error (format), with file and line.
std::vector<CostRow> cost_rows_from(std::string_view name, std::string_view csv);
/// The same columns, with `commit` in each row.
std::string to_csv(const std::vector<CostRow>& rows, std::string_view commit);

}  // namespace gdnflow::apps
