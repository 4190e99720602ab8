#include "common/cost_rows.hpp"

#include <gdnflow/error.hpp>
#include <gdnflow/recipes.hpp>

#include "common/arguments.hpp"
#include "common/csv.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

/// An hour.
constexpr double most_ms = 3.6e6;

class RowReader {
 public:
  RowReader(const Csv& csv, const Csv::Row& row) : csv_(csv), row_(row) {}

  CostRow read() const {
    CostRow cost;
    cost.gpu = csv_.at(row_, "gpu");
    cost.capability = small("capability");
    cost.multiprocessors = small("multiprocessors");
    read_case(cost);
    cost.pipeline = csv_.at(row_, "pipeline");
    if (!is_recipe(cost.pipeline)) {
      refuse(fmt::format("pipeline: expected one of {}, got '{}'", recipe_ids(), cost.pipeline));
    }
    cost.options = csv_.at(row_, "options");
    if (!csv_.at(row_, "core_ms").empty()) cost.core_ms = milliseconds("core_ms");
    cost.forward_ms = milliseconds("forward_ms");
    return cost;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::format, fmt::format("{}:{}: {}", csv_.name, row_.line, what));
  }

  std::int32_t small(std::string_view column) const {
    return static_cast<std::int32_t>(
        std::min<std::int64_t>(csv_.integer(row_, column, 1), 1 << 20));
  }

  double milliseconds(std::string_view column) const {
    const std::string& text = csv_.at(row_, column);
    double value = 0;
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, value);
    if (parsed.ec != std::errc{} || parsed.ptr != end || !(value > 0) || value > most_ms) {
      refuse(fmt::format("{}: expected a number above 0, at most {}, got '{}'", column, most_ms,
                         text));
    }
    return value;
  }

  void read_case(CostRow& cost) const {
    const std::string& name = csv_.at(row_, "case");
    std::vector<std::string> pieces = split(name, '_');
    if (pieces.size() == 4 && pieces.back() == "state") {
      cost.initial_state = true;
      pieces.pop_back();
    }
    try {
      if (pieces.size() != 3) throw UsageError("");
      const Heads heads = parse_heads("case", fmt::format("{},{}", pieces[1], pieces[2]));
      cost.qk_heads = heads.qk;
      cost.v_heads = heads.v;
      const std::size_t times = pieces[0].find('x');
      if (times != std::string::npos) {
        const std::int64_t sequences = parse_integer("case", pieces[0].substr(0, times), 1);
        if (sequences > 1 << 20) throw UsageError("");
        cost.lengths.assign(static_cast<std::size_t>(sequences),
                            parse_integer("case", pieces[0].substr(times + 1), 0));
      } else {
        std::replace(pieces[0].begin(), pieces[0].end(), '+', ',');
        cost.lengths = parse_lengths(pieces[0]);
      }
    } catch (const UsageError&) {
      refuse(fmt::format("case: expected a name like 28672+4096_2_8, got '{}'", name));
    }
  }

  const Csv& csv_;
  const Csv::Row& row_;
};

}  // namespace

bool CostRow::equal_lengths() const { return apps::equal_lengths(lengths); }

Problem CostRow::problem() const {
  Problem problem;
  problem.qk_heads = qk_heads;
  problem.v_heads = v_heads;
  problem.initial_state = initial_state;
  return problem;
}

Capacity CostRow::capacity() const {
  return {std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}),
          static_cast<std::int64_t>(lengths.size())};
}

std::string CostRow::case_name() const {
  return fmt::format("{}_{}_{}{}", lengths_text(lengths), qk_heads, v_heads,
                     initial_state ? "_state" : "");
}

std::vector<CostRow> cost_rows(const Report& report) {
  if (report.gpu.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "costs: expected a report of a GPU that it names, got one without");
  }
  std::vector<CostRow> rows;
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      if (!pipeline.hot || !pipeline.right) continue;
      const Case& c = result.measured;
      rows.push_back({report.gpu, report.capability, report.multiprocessors, c.lengths, c.qk_heads,
                      c.v_heads, c.initial_state, pipeline.id, pipeline.options,
                      pipeline.hot->core_ms, pipeline.hot->forward_ms});
    }
  }
  return rows;
}

std::vector<CostRow> cost_rows_from(std::string_view name, std::string_view text) {
  const Csv csv = Csv::parse(std::string(name), text);
  std::vector<CostRow> rows;
  for (const Csv::Row& row : csv.rows) rows.push_back(RowReader(csv, row).read());
  return rows;
}

std::string to_csv(const std::vector<CostRow>& rows, std::string_view commit) {
  std::string text =
      "commit,gpu,capability,multiprocessors,case,pipeline,options,core_ms,forward_ms\n";
  for (const CostRow& row : rows) {
    text += fmt::format("{},{},{},{},{},{},{},{},{:.5g}\n", commit, row.gpu, row.capability,
                        row.multiprocessors, row.case_name(), row.pipeline, row.options,
                        row.core_ms ? fmt::format("{:.5g}", *row.core_ms) : "", row.forward_ms);
  }
  return text;
}

}  // namespace gdnflow::apps
