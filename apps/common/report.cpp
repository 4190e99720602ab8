#include "common/report.hpp"

#include <gdnflow/error.hpp>

#include "common/table.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gdnflow::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr int json_format = 1;
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

Json pipeline_json(const PipelineResult& pipeline) {
  Json stages = Json::array();
  for (const StageTime& stage : pipeline.stages) {
    stages.push_back({{"node", stage.node}, {"ms", stage.ms}});
  }
  return {{"id", pipeline.id},
          {"core_ms", optional_json(pipeline.core_ms)},
          {"forward_ms", pipeline.forward_ms},
          {"o", accuracy_json(pipeline.o)},
          {"final_state", accuracy_json(pipeline.state)},
          {"right", pipeline.right},
          {"arena_bytes", pipeline.arena_bytes},
          {"stages", stages}};
}

PipelineResult pipeline_from(const Json& json) {
  PipelineResult pipeline;
  pipeline.id = json.at("id").get<std::string>();
  if (!json.at("core_ms").is_null()) pipeline.core_ms = json.at("core_ms").get<double>();
  pipeline.forward_ms = number(json, "forward_ms");
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
    pipelines.push_back(std::move(entry));
  }
  Json refused = Json::array();
  for (const Refusal& refusal : result.refused) {
    refused.push_back({{"id", refusal.id}, {"reason", refusal.reason}});
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
    result.refused.push_back(
        {refusal.at("id").get<std::string>(), refusal.at("reason").get<std::string>()});
  }
  return result;
}

std::string stage_lines(const Report& report) {
  Table table({"case", "pipeline", "each stage by itself, ms"}, 3);
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      std::string times;
      for (const StageTime& stage : pipeline.stages) {
        times +=
            fmt::format("{}{} {}", times.empty() ? "" : "  ", stage.node, milliseconds(stage.ms));
      }
      table.add({result.measured.name, pipeline.id, times});
    }
  }
  return table.str();
}

std::string refusal_lines(const Report& report) {
  std::string lines;
  std::vector<std::string> said;
  for (const CaseResult& result : report.cases) {
    for (const Refusal& refusal : result.refused) {
      // The same reason for every case is said once.
      std::string line = fmt::format("{} not run: {}\n", refusal.id, refusal.reason);
      if (std::find(said.begin(), said.end(), line) != said.end()) continue;
      lines += line;
      said.push_back(std::move(line));
    }
  }
  return lines;
}

}  // namespace

const PipelineResult* CaseResult::find(std::string_view pipeline) const {
  const auto found = std::find_if(pipelines.begin(), pipelines.end(),
                                  [&](const PipelineResult& p) { return p.id == pipeline; });
  return found == pipelines.end() ? nullptr : &*found;
}

bool Report::all_right() const {
  return std::all_of(cases.begin(), cases.end(), [](const CaseResult& result) {
    return std::all_of(result.pipelines.begin(), result.pipelines.end(),
                       [](const PipelineResult& pipeline) { return pipeline.right; });
  });
}

std::vector<std::string> Report::pipelines() const {
  std::vector<std::string> ids;
  for (const CaseResult& result : cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      if (std::find(ids.begin(), ids.end(), pipeline.id) == ids.end()) ids.push_back(pipeline.id);
    }
  }
  return ids;
}

std::optional<double> ratio_to_baseline(const Report& report, const CaseResult& result,
                                        const PipelineResult& pipeline) {
  const PipelineResult* baseline = result.find(report.baseline);
  if (baseline == nullptr || !(pipeline.forward_ms > 0)) return std::nullopt;
  return baseline->forward_ms / pipeline.forward_ms;
}

std::string to_table(const Report& report) {
  std::string text = fmt::format("{}\n{}\n", report.device_text, report.problem);
  const bool has_floor = report.bytes_per_second > 0;
  if (has_floor) {
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
  std::vector<std::string> header{"case",    "lengths heads", "pipeline",
                                  "core ms", "forward ms",    "x " + report.baseline};
  if (has_floor) header.insert(header.end(), {"floor ms", "% of floor"});
  header.insert(header.end(), {"o rel rms", "state rel rms", "result"});
  Table table(header, 3);
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      const auto ratio = ratio_to_baseline(report, result, pipeline);
      std::vector<std::string> cells{result.measured.name,
                                     shape_text(result.measured),
                                     pipeline.id,
                                     pipeline.core_ms ? milliseconds(*pipeline.core_ms) : "-",
                                     milliseconds(pipeline.forward_ms),
                                     ratio ? fmt::format("{:.2f}", *ratio) : "-"};
      if (has_floor) {
        cells.push_back(milliseconds(result.floor_ms));
        cells.push_back(fmt::format("{:.1f}", 100 * result.floor_ms / pipeline.forward_ms));
      }
      cells.push_back(fmt::format("{:.2e}", pipeline.o.rel_rms));
      cells.push_back(fmt::format("{:.2e}", pipeline.state.rel_rms));
      cells.push_back(pipeline.right ? "right" : "WRONG");
      table.add(std::move(cells));
    }
  }
  text += fmt::format("\n{}\n{}", table.str(), stage_lines(report));
  const std::string refusals = refusal_lines(report);
  if (!refusals.empty()) text += "\n" + refusals;
  return text;
}

std::string to_csv(const Report& report) {
  std::string text =
      "case,lengths,qk_heads,v_heads,initial_state,gate,pipeline,core_ms,forward_ms,"
      "ratio_to_baseline,floor_ms,o_rel_rms,o_max_abs,state_rel_rms,state_max_abs,right";
  for (const CaseResult& result : report.cases) {
    const Case& c = result.measured;
    for (const PipelineResult& pipeline : result.pipelines) {
      const auto ratio = ratio_to_baseline(report, result, pipeline);
      text += fmt::format("\n{},{},{},{},{},{},{},{},{:.6g},{},{},{:.4g},{:.4g},{:.4g},{:.4g},{}",
                          c.name, fmt::join(c.lengths, "+"), c.qk_heads, c.v_heads,
                          c.initial_state ? 1 : 0, to_string(c.distribution), pipeline.id,
                          pipeline.core_ms ? fmt::format("{:.6g}", *pipeline.core_ms) : "",
                          pipeline.forward_ms, ratio ? fmt::format("{:.4g}", *ratio) : "",
                          result.floor_ms > 0 ? fmt::format("{:.6g}", result.floor_ms) : "",
                          pipeline.o.rel_rms, pipeline.o.max_abs, pipeline.state.rel_rms,
                          pipeline.state.max_abs, pipeline.right ? 1 : 0);
    }
  }
  return text;
}

std::string to_results_csv(const Report& report, std::string_view commit) {
  std::string text = "commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms";
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      text += fmt::format("\n{},{},{},{},{:.4f},{:.3e},{:.3e}", commit, result.measured.name,
                          pipeline.id, pipeline.core_ms ? milliseconds(*pipeline.core_ms) : "",
                          pipeline.forward_ms, pipeline.o.rel_rms, pipeline.state.rel_rms);
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
