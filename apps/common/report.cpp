#include "common/report.hpp"

#include <gdnflow/error.hpp>

#include "common/table.hpp"
#include "common/variations.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gdnflow::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr int json_format = 2;
constexpr std::string_view program = "gdnflow-ablate";

std::string milliseconds(double ms) { return fmt::format("{:.4f}", ms); }

std::string shape_text(const Case& c) {
  return fmt::format("{} {}/{}{}", lengths_text(c.lengths), c.qk_heads, c.v_heads,
                     c.initial_state ? " state" : "");
}

// JSON has no NaN: it is written as null, and read back as NaN.
double number(const Json& json, const char* key) {
  const Json& value = json.at(key);
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

template <class T>
Json optional_json(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json accuracy_json(const Accuracy& accuracy) {
  return {{"rel_rms", accuracy.rel_rms},
          {"max_abs", accuracy.max_abs},
          {"over_tolerance", accuracy.over_tolerance},
          {"worst", accuracy.worst}};
}

Accuracy accuracy_from(const Json& json) {
  return {number(json, "rel_rms"), number(json, "max_abs"),
          json.at("over_tolerance").get<std::int64_t>(), json.at("worst").get<std::string>()};
}

// Text as a field of comma-separated values without quotes.
std::string csv_text(std::string text) {
  std::replace(text.begin(), text.end(), ',', ';');
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string csv_number(std::optional<double> value) {
  return value ? fmt::format("{:.6g}", *value) : "";
}

std::optional<double> core_of(const std::optional<Times>& times) {
  return times ? times->core_ms : std::nullopt;
}

std::optional<double> forward_of(const std::optional<Times>& times) {
  return times ? std::optional(times->forward_ms) : std::nullopt;
}

std::optional<Times> times_from(const Json& json, const char* core, const char* forward) {
  if (json.at(forward).is_null()) return std::nullopt;
  Times times{{}, json.at(forward).get<double>()};
  if (!json.at(core).is_null()) times.core_ms = json.at(core).get<double>();
  return times;
}

Json pipeline_json(const PipelineResult& pipeline) {
  Json stages = Json::array();
  for (const StageTime& stage : pipeline.stages) {
    stages.push_back({{"node", stage.node}, {"ms", stage.ms}});
  }
  return {{"id", pipeline.id},
          {"options", pipeline.options},
          {"as_given", pipeline.as_given},
          {"core_ms", optional_json(core_of(pipeline.hot))},
          {"forward_ms", optional_json(forward_of(pipeline.hot))},
          {"core_cold_ms", optional_json(core_of(pipeline.cold))},
          {"forward_cold_ms", optional_json(forward_of(pipeline.cold))},
          {"o", accuracy_json(pipeline.o)},
          {"final_state", accuracy_json(pipeline.state)},
          {"right", pipeline.right},
          {"arena_bytes", pipeline.arena_bytes},
          {"stages", stages}};
}

PipelineResult pipeline_from(const Json& json) {
  PipelineResult pipeline;
  pipeline.id = json.at("id").get<std::string>();
  pipeline.options = json.at("options").get<std::string>();
  pipeline.as_given = json.at("as_given").get<bool>();
  pipeline.hot = times_from(json, "core_ms", "forward_ms");
  pipeline.cold = times_from(json, "core_cold_ms", "forward_cold_ms");
  if (!pipeline.hot && !pipeline.cold) {
    throw Error(ErrorCode::format,
                fmt::format("{}: expected forward_ms or forward_cold_ms", pipeline.label()));
  }
  pipeline.o = accuracy_from(json.at("o"));
  pipeline.state = accuracy_from(json.at("final_state"));
  pipeline.right = json.at("right").get<bool>();
  pipeline.arena_bytes = json.at("arena_bytes").get<std::int64_t>();
  for (const Json& stage : json.at("stages")) {
    pipeline.stages.push_back({stage.at("node").get<std::string>(), number(stage, "ms")});
  }
  return pipeline;
}

Json case_json(const Report& report, const CaseResult& result) {
  Json pipelines = Json::array();
  for (const PipelineResult& pipeline : result.pipelines) {
    Json entry = pipeline_json(pipeline);
    entry["ratio_to_baseline"] = optional_json(ratio_to_baseline(report, result, pipeline));
    entry["ratio_as_given"] = optional_json(ratio_as_given(result, pipeline));
    pipelines.push_back(std::move(entry));
  }
  Json refused = Json::array();
  for (const Refusal& refusal : result.refused) {
    refused.push_back(
        {{"id", refusal.id}, {"options", refusal.options}, {"reason", refusal.reason}});
  }
  return {{"name", result.measured.name},
          {"lengths", result.measured.lengths},
          {"qk_heads", result.measured.qk_heads},
          {"v_heads", result.measured.v_heads},
          {"initial_state", result.measured.initial_state},
          {"gate", to_string(result.measured.distribution)},
          {"scaled_down_from", optional_json(result.original)},
          {"floor_ms", result.floor_ms > 0 ? Json(result.floor_ms) : Json(nullptr)},
          {"pipelines", pipelines},
          {"refused", refused}};
}

CaseResult case_from(const Json& json) {
  CaseResult result;
  Case& c = result.measured;
  c.name = json.at("name").get<std::string>();
  c.lengths = json.at("lengths").get<std::vector<std::int64_t>>();
  c.qk_heads = json.at("qk_heads").get<std::int32_t>();
  c.v_heads = json.at("v_heads").get<std::int32_t>();
  c.initial_state = json.at("initial_state").get<bool>();
  const std::string gate = json.at("gate").get<std::string>();
  const auto distribution = parse_distribution(gate);
  if (!distribution) {
    throw Error(ErrorCode::format, fmt::format("gate: expected a distribution, got '{}'", gate));
  }
  c.distribution = *distribution;
  const Json& original = json.at("scaled_down_from");
  if (!original.is_null()) result.original = original.get<std::string>();
  if (!json.at("floor_ms").is_null()) result.floor_ms = json.at("floor_ms").get<double>();
  for (const Json& pipeline : json.at("pipelines")) {
    result.pipelines.push_back(pipeline_from(pipeline));
  }
  for (const Json& refusal : json.at("refused")) {
    result.refused.push_back({refusal.at("id").get<std::string>(),
                              refusal.at("options").get<std::string>(),
                              refusal.at("reason").get<std::string>()});
  }
  return result;
}

std::string head_lines(const Report& report) {
  std::string text = report.device_text + "\n";
  if (!report.limit.empty()) text += report.limit + "\n";
  text += report.problem + "\n";
  if (report.bytes_per_second > 0) {
    text += fmt::format("ceilings: copy {:.2f} TB/s (measured)", report.bytes_per_second * 1e-12);
    text += report.macs_per_second > 0
                ? fmt::format(", tensor cores {:.0f} TFLOP/s ({})\n",
                              2e-12 * report.macs_per_second, report.tensor_source)
                : fmt::format(", {}\n", report.tensor_source);
  }
  const bool scaled = std::any_of(report.cases.begin(), report.cases.end(),
                                  [](const CaseResult& c) { return c.original.has_value(); });
  if (scaled) {
    text +=
        "on the host the cases are scaled down, lengths and heads in proportion (--full runs "
        "them whole)\n";
  }
  return text;
}

// The columns that a report has; a row is made of the same parts, in the same order.
Table result_table(const Report& report) {
  const bool has_floor = report.bytes_per_second > 0;
  const bool has_options = report.has_options();
  const bool has_hot = report.has_hot();
  const bool has_cold = report.has_cold();
  std::vector<std::string> header{"case", "lengths heads", "pipeline"};
  const auto add = [&](bool shown, std::initializer_list<std::string> columns) {
    if (shown) header.insert(header.end(), columns);
  };
  add(has_options, {"options"});
  const std::size_t left = header.size();
  add(has_hot, {"core ms", "forward ms"});
  add(has_cold, {"core cold ms", "forward cold ms"});
  add(true, {"x " + report.baseline});
  add(has_options, {"x as given"});
  add(has_floor, {"floor ms", "% of floor"});
  add(true, {"o rel rms", "state rel rms", "result"});

  const auto ms = [](std::optional<double> value) { return value ? milliseconds(*value) : "-"; };
  const auto factor = [](std::optional<double> value) {
    return value ? fmt::format("{:.2f}", *value) : "-";
  };
  Table table(header, left, true);
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      std::vector<std::string> cells{result.measured.name, shape_text(result.measured),
                                     pipeline.id};
      const auto add_cells = [&](bool shown, std::initializer_list<std::string> more) {
        if (shown) cells.insert(cells.end(), more);
      };
      add_cells(has_options, {pipeline.options.empty() ? "as given" : pipeline.options});
      add_cells(has_hot, {ms(core_of(pipeline.hot)), ms(forward_of(pipeline.hot))});
      add_cells(has_cold, {ms(core_of(pipeline.cold)), ms(forward_of(pipeline.cold))});
      add_cells(true, {factor(ratio_to_baseline(report, result, pipeline))});
      add_cells(has_options, {factor(ratio_as_given(result, pipeline))});
      add_cells(has_floor,
                {milliseconds(result.floor_ms),
                 fmt::format("{:.1f}", 100 * result.floor_ms / pipeline.times().forward_ms)});
      add_cells(true, {fmt::format("{:.2e}", pipeline.o.rel_rms),
                       fmt::format("{:.2e}", pipeline.state.rel_rms),
                       pipeline.right ? "right" : "WRONG"});
      table.add(std::move(cells));
    }
    for (const Refusal& refusal : result.refused) {
      if (refusal.options.empty()) continue;  // said below the table
      std::vector<std::string> cells(header.size(), "-");
      cells[0] = result.measured.name;
      cells[1] = shape_text(result.measured);
      cells[2] = refusal.id;
      cells[3] = refusal.options;
      cells.back() = "refused: " + refusal.reason;
      table.add(std::move(cells));
    }
  }
  return table;
}

Table stage_table(const Report& report) {
  Table table({"case", "pipeline", "each stage by itself, ms"}, 3);
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      std::string times;
      for (const StageTime& stage : pipeline.stages) {
        times +=
            fmt::format("{}{} {}", times.empty() ? "" : "  ", stage.node, milliseconds(stage.ms));
      }
      table.add({result.measured.name, pipeline.label(), times});
    }
  }
  return table;
}

// Pipelines that could not run, a line each; the same reason for every case is said once.
std::vector<std::string> refusal_lines(const Report& report) {
  std::vector<std::string> lines;
  for (const CaseResult& result : report.cases) {
    for (const Refusal& refusal : result.refused) {
      if (!refusal.options.empty()) continue;  // a row of the table
      std::string line = fmt::format("{} not run: {}", refusal.id, refusal.reason);
      if (std::find(lines.begin(), lines.end(), line) == lines.end()) {
        lines.push_back(std::move(line));
      }
    }
  }
  return lines;
}

bool any_result(const Report& report, bool (*is)(const PipelineResult&)) {
  return std::any_of(report.cases.begin(), report.cases.end(), [&](const CaseResult& result) {
    return std::any_of(result.pipelines.begin(), result.pipelines.end(), is);
  });
}

}  // namespace

std::string PipelineResult::label() const { return variation_label(id, options); }

const PipelineResult* CaseResult::find(std::string_view label) const {
  const auto found = std::find_if(pipelines.begin(), pipelines.end(),
                                  [&](const PipelineResult& p) { return p.label() == label; });
  return found == pipelines.end() ? nullptr : &*found;
}

const PipelineResult* CaseResult::as_given(std::string_view id) const {
  const auto found = std::find_if(pipelines.begin(), pipelines.end(), [&](const PipelineResult& p) {
    return p.id == id && p.as_given;
  });
  return found == pipelines.end() ? nullptr : &*found;
}

bool Report::all_right() const {
  return !any_result(*this, [](const PipelineResult& pipeline) { return !pipeline.right; });
}

std::vector<std::string> Report::labels() const {
  std::vector<std::string> labels;
  for (const CaseResult& result : cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      const std::string label = pipeline.label();
      if (std::find(labels.begin(), labels.end(), label) == labels.end()) labels.push_back(label);
    }
  }
  return labels;
}

bool Report::has_options() const {
  const bool refused = std::any_of(cases.begin(), cases.end(), [](const CaseResult& result) {
    return std::any_of(result.refused.begin(), result.refused.end(),
                       [](const Refusal& refusal) { return !refusal.options.empty(); });
  });
  return refused || any_result(*this, [](const PipelineResult& pipeline) {
           return !pipeline.options.empty();
         });
}

bool Report::has_hot() const {
  return any_result(*this, [](const PipelineResult& pipeline) { return pipeline.hot.has_value(); });
}

bool Report::has_cold() const {
  return any_result(*this,
                    [](const PipelineResult& pipeline) { return pipeline.cold.has_value(); });
}

namespace {

std::optional<double> ratio(const PipelineResult* reference, const PipelineResult& pipeline) {
  if (reference == nullptr || !(pipeline.times().forward_ms > 0)) return std::nullopt;
  return reference->times().forward_ms / pipeline.times().forward_ms;
}

}  // namespace

std::optional<double> ratio_to_baseline(const Report& report, const CaseResult& result,
                                        const PipelineResult& pipeline) {
  return ratio(result.as_given(report.baseline), pipeline);
}

std::optional<double> ratio_as_given(const CaseResult& result, const PipelineResult& pipeline) {
  return ratio(result.as_given(pipeline.id), pipeline);
}

std::string to_table(const Report& report) {
  std::string text = fmt::format("{}\n{}\n{}", head_lines(report), result_table(report).str(),
                                 stage_table(report).str());
  const std::vector<std::string> refusals = refusal_lines(report);
  if (!refusals.empty()) text += fmt::format("\n{}\n", fmt::join(refusals, "\n"));
  return text;
}

std::string to_markdown(const Report& report) {
  std::string text;
  std::string head = head_lines(report);
  head.pop_back();
  for (const std::string& line : split(head, '\n')) text += fmt::format("- {}\n", line);
  text += fmt::format("\n{}\n{}", result_table(report).markdown(), stage_table(report).markdown());
  const std::vector<std::string> refusals = refusal_lines(report);
  if (!refusals.empty()) text += fmt::format("\n- {}\n", fmt::join(refusals, "\n- "));
  return text;
}

std::string to_csv(const Report& report) {
  std::string text =
      "case,lengths,qk_heads,v_heads,initial_state,gate,pipeline,options,core_ms,forward_ms,"
      "core_cold_ms,forward_cold_ms,ratio_to_baseline,ratio_as_given,floor_ms,o_rel_rms,o_max_abs,"
      "state_rel_rms,state_max_abs,right,refused";
  const auto ratio_text = [](std::optional<double> value) {
    return value ? fmt::format("{:.4g}", *value) : "";
  };
  for (const CaseResult& result : report.cases) {
    const Case& c = result.measured;
    const std::string shape =
        fmt::format("\n{},{},{},{},{},{}", c.name, fmt::join(c.lengths, "+"), c.qk_heads, c.v_heads,
                    c.initial_state ? 1 : 0, to_string(c.distribution));
    const std::string floor = result.floor_ms > 0 ? fmt::format("{:.6g}", result.floor_ms) : "";
    for (const PipelineResult& pipeline : result.pipelines) {
      text += fmt::format("{},{},{},{},{},{},{},{},{},{},{:.4g},{:.4g},{:.4g},{:.4g},{},", shape,
                          pipeline.id, pipeline.options, csv_number(core_of(pipeline.hot)),
                          csv_number(forward_of(pipeline.hot)), csv_number(core_of(pipeline.cold)),
                          csv_number(forward_of(pipeline.cold)),
                          ratio_text(ratio_to_baseline(report, result, pipeline)),
                          ratio_text(ratio_as_given(result, pipeline)), floor, pipeline.o.rel_rms,
                          pipeline.o.max_abs, pipeline.state.rel_rms, pipeline.state.max_abs,
                          pipeline.right ? 1 : 0);
    }
    for (const Refusal& refusal : result.refused) {
      if (refusal.options.empty()) continue;
      text += fmt::format("{},{},{},,,,,,,{},,,,,,{}", shape, refusal.id, refusal.options, floor,
                          csv_text(refusal.reason));
    }
  }
  return text;
}

std::string to_results_csv(const Report& report, std::string_view commit) {
  std::string text = "commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms";
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      if (!pipeline.hot) {
        throw Error(ErrorCode::invalid_argument,
                    "results: expected times with a hot L2, got a report of cold ones");
      }
      text += fmt::format("\n{},{},{},{},{:.4f},{:.3e},{:.3e}", commit, result.measured.name,
                          pipeline.label(),
                          pipeline.hot->core_ms ? milliseconds(*pipeline.hot->core_ms) : "",
                          pipeline.hot->forward_ms, pipeline.o.rel_rms, pipeline.state.rel_rms);
    }
  }
  return text;
}

std::string to_json(const Report& report) {
  Json cases = Json::array();
  for (const CaseResult& result : report.cases) cases.push_back(case_json(report, result));
  const Json json = {{"program", program},
                     {"format", json_format},
                     {"version", report.version},
                     {"device", report.device},
                     {"machine", report.device_text},
                     {"gpu", report.gpu},
                     {"capability", report.capability},
                     {"multiprocessors", report.multiprocessors},
                     {"limit", report.limit},
                     {"problem", report.problem},
                     {"baseline", report.baseline},
                     {"copy_bytes_per_second", report.bytes_per_second},
                     {"tensor_macs_per_second", report.macs_per_second},
                     {"tensor_rate_source", report.tensor_source},
                     {"cases", cases}};
  return json.dump(1);
}

Report report_from_json(std::string_view name, std::string_view text) {
  try {
    const Json json = Json::parse(text);
    if (json.at("program") != program || json.at("format") != json_format) {
      throw Error(ErrorCode::format,
                  fmt::format("expected program {} and format {}, got {} and {}", program,
                              json_format, json.at("program").dump(), json.at("format").dump()));
    }
    Report report;
    report.version = json.at("version").get<std::string>();
    report.device = json.at("device").get<std::string>();
    report.device_text = json.at("machine").get<std::string>();
    report.gpu = json.value("gpu", std::string{});
    report.capability = json.value("capability", 0);
    report.multiprocessors = json.value("multiprocessors", 0);
    report.limit = json.at("limit").get<std::string>();
    report.problem = json.at("problem").get<std::string>();
    report.baseline = json.at("baseline").get<std::string>();
    report.bytes_per_second = number(json, "copy_bytes_per_second");
    report.macs_per_second = number(json, "tensor_macs_per_second");
    report.tensor_source = json.at("tensor_rate_source").get<std::string>();
    for (const Json& result : json.at("cases")) report.cases.push_back(case_from(result));
    return report;
  } catch (const std::exception& error) {
    throw Error(ErrorCode::format,
                fmt::format("{}: expected a report of {}, got: {}", name, program, error.what()));
  }
}

}  // namespace gdnflow::apps
