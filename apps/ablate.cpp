// gdnflow-ablate: every pipeline on every case, with the options that are asked about: right or
// wrong, how long, and how far from the machine's floor.

#include <gdnflow/gdnflow.hpp>
#include <gdnflow/version.hpp>

#include "common/arguments.hpp"
#include "common/bench.hpp"
#include "common/cases.hpp"
#include "common/cost_fit.hpp"
#include "common/cost_rows.hpp"
#include "common/multiprocessor_limit.hpp"
#include "common/output.hpp"
#include "common/plot.hpp"
#include "common/program.hpp"
#include "common/progress.hpp"
#include "common/reference.hpp"
#include "common/report.hpp"
#include "common/roofline.hpp"
#include "common/tensors.hpp"
#include "common/variations.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

// What a case is scaled down to on the host: enough for several chunks and heads, and all standard
// cases in seconds on two cores.
constexpr std::int64_t host_tokens = 256;
constexpr std::int32_t host_v_heads = 8;

void describe(po::options_description& options) {
  using Texts = std::vector<std::string>;
  options.add_options()("cases", po::value<std::string>()->value_name("FILE"),
                        "cases from a CSV file, with columns as apps/cases/seed.csv or with "
                        "lengths,qk_heads,v_heads; default: the eight standard cases")(
      "case", po::value<Texts>()->value_name("B,T,QK,V[,state]"),
      "B sequences of T tokens; may be given several times")(
      "lengths", po::value<Texts>()->value_name("N,N,..."),
      "sequences of these lengths, with --heads or --model; may be given several times")(
      "heads", po::value<Texts>()->value_name("QK,V"),
      "query/key heads and value heads of --lengths; may be given several times")(
      "model", po::value<std::string>()->value_name("NAME"),
      "the head counts of a model (gdnflow-info --json lists them), for --lengths")(
      "tp", po::value<std::int64_t>()->value_name("N"),
      "of a model, only the heads left by this tensor parallelism")(
      "only", po::value<std::string>()->value_name("NAME,..."), "only the cases of these names")(
      "distribution", po::value<std::string>()->value_name("NAME"),
      "distribution of the inputs; default: the case's own")(
      "head-dim", po::value<std::int64_t>()->default_value(128)->value_name("D"), "head dim")(
      "full", po::bool_switch(),
      "run whole cases on the host too; else the whole chunks of a case's sequences are scaled "
      "down to about 256 tokens together, tails shorter than a chunk stay, and heads are divided "
      "so that at most 8 value heads stay, at the same ratio")(
      "pipelines", po::value<std::string>()->value_name("NAME,..."),
      "the pipelines to run; default: all")(
      "baseline", po::value<std::string>()->default_value("naive")->value_name("NAME"),
      "the pipeline that ratios refer to");
  add_device_option(options);
  add_limit_option(options);
  add_variant_option(options);
  add_sweep_options(options);
  add_problem_options(options);
  options.add_options()("raw-gates", po::bool_switch(),
                        "a, A_log, dt_bias and b in place of log decay and beta, as layers hand "
                        "them over");
  options.add_options()("seed", po::value<std::uint64_t>()->default_value(1)->value_name("N"),
                        "of the inputs")(
      "seconds", po::value<double>()->default_value(0.2, "0.2")->value_name("X"),
      "time to spend on each measurement")(
      "l2", po::value<std::string>()->default_value("hot")->value_name("hot|cold|both"),
      "time replays behind one another, or each behind a write of twice the GPU's L2")(
      "trace", po::bool_switch(),
      "mark each measurement for a profiler (NVTX), and run each pipeline once more stage by "
      "stage with a range around each stage")("csv", po::value<std::string>()->value_name("FILE"),
                                              "write all numbers as CSV")(
      "json", po::value<std::string>()->implicit_value("-", "stdout")->value_name("FILE"),
      "print everything as JSON in place of the table, or write it to a file")(
      "markdown", po::value<std::string>()->implicit_value("-", "stdout")->value_name("FILE"),
      "print the tables as Markdown, or write them to a file")(
      "svg", po::value<std::string>()->value_name("FILE"), "write a plot (with gnuplot)")(
      "from", po::value<std::string>()->value_name("FILE"),
      "measure nothing: take a report that --json wrote")(
      "results", po::value<std::string>()->value_name("FILE"),
      "write commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms of a hot L2; with "
      "--commit")("commit", po::value<std::string>()->value_name("SHA"),
                  "what --results and --rows say was measured")(
      "tune", po::value<std::string>()->value_name("FILE"),
      "measure apps/cases/tuning.csv, or the cases given, with every value tile, and write the "
      "figures fitted to the times, which recipe auto then chooses by (--costs of the programs)")(
      "rows", po::value<std::string>()->value_name("FILE"),
      "with --tune: write the rows measured as CSV, for --fit; with --commit")(
      "fit", po::value<std::vector<std::string>>()->value_name("FILE"),
      "with --tune: measure nothing, fit to these rows; may be given several times");
}

/// The files that were asked for, refused before any work if they cannot be written.
struct Outputs {
  std::optional<std::string> csv;
  std::optional<OutputTarget> json;
  std::optional<OutputTarget> markdown;
  std::optional<std::string> svg;
  std::optional<std::string> results;
  std::string commit;

  /// Whether standard output is taken, so that the table is not printed there.
  bool take_stdout() const {
    return (json && json->is_stdout()) || (markdown && markdown->is_stdout());
  }
};

Outputs outputs_from(const po::variables_map& arguments) {
  Outputs outputs;
  const auto file = [&](const char* name) -> std::optional<std::string> {
    if (!has(arguments, name)) return std::nullopt;
    check_writable(text(arguments, name));
    return text(arguments, name);
  };
  outputs.csv = file("csv");
  if (has(arguments, "svg")) {
    check_replaceable(text(arguments, "svg"));
    outputs.svg = text(arguments, "svg");
  }
  outputs.results = file("results");
  file("tune");
  file("rows");
  const auto target = [&](const char* name) -> std::optional<OutputTarget> {
    if (!has(arguments, name)) return std::nullopt;
    OutputTarget asked{text(arguments, name)};
    asked.check();
    return asked;
  };
  outputs.json = target("json");
  outputs.markdown = target("markdown");
  if (outputs.json && outputs.json->is_stdout() && outputs.markdown &&
      outputs.markdown->is_stdout()) {
    throw UsageError("--json, --markdown: expected one of them on standard output, got both");
  }
  check_files_apart(arguments, {"cases", "from", "fit"},
                    {"csv", "json", "markdown", "svg", "results", "tune", "rows"});
  if (has(arguments, "commit")) outputs.commit = text(arguments, "commit");
  for (const char* named : {"results", "rows"}) {
    if (has(arguments, named) && outputs.commit.empty()) {
      throw UsageError(fmt::format("--{}: expected --commit SHA with it, got none", named));
    }
  }
  for (const char* tuning : {"fit", "rows"}) {
    if (has(arguments, tuning) && !has(arguments, "tune")) {
      throw UsageError(fmt::format("--{}: expected --tune FILE with it, got none", tuning));
    }
  }
  if (has(arguments, "tune") && outputs.take_stdout()) {
    throw UsageError("--tune: expected --json and --markdown with a file, got them on stdout");
  }
  return outputs;
}

void write_outputs(const Report& report, const Outputs& outputs) {
  if (outputs.csv) write_file(*outputs.csv, to_csv(report) + "\n");
  if (outputs.results) {
    write_file(*outputs.results, to_results_csv(report, outputs.commit) + "\n");
  }
  if (outputs.json) outputs.json->write(to_json(report));
  if (outputs.markdown) {
    std::string tables = to_markdown(report);
    tables.pop_back();  // the target ends the last line itself
    outputs.markdown->write(std::move(tables));
  }
  if (!outputs.take_stdout()) fmt::print("{}", to_table(report));
  if (outputs.svg) {
    if (const Support drawn = write_plot(report, *outputs.svg); !drawn) {
      std::fflush(stdout);
      fmt::print(stderr, "gdnflow-ablate: no plot: {}; the other outputs are written\n",
                 drawn.reason);
    }
  }
}

std::vector<Heads> heads_from(const po::variables_map& arguments) {
  std::vector<Heads> heads;
  if (has(arguments, "heads")) {
    for (const std::string& value : arguments["heads"].as<std::vector<std::string>>()) {
      heads.push_back(parse_heads("heads", value));
    }
  }
  const bool has_tp = has(arguments, "tp");
  if (has_tp && !has(arguments, "model")) throw UsageError("--tp: expected --model with it");
  if (has(arguments, "model")) {
    const std::string& name = text(arguments, "model");
    std::string known;
    bool found = false;
    for (const ModelHeads& model : model_heads()) {
      known += fmt::format("{}{} (tp {})", known.empty() ? "" : ", ", model.model,
                           model.tensor_parallel);
      if (model.model != name || (has_tp && count(arguments, "tp", 1) != model.tensor_parallel)) {
        continue;
      }
      heads.push_back({model.qk_heads, model.v_heads});
      found = true;
    }
    if (!found)
      throw UsageError(fmt::format("--model: expected one of {}, got '{}'{}", known, name,
                                   has_tp ? " with that --tp" : ""));
  }
  return heads;
}

std::vector<Case> cases_from_arguments(const po::variables_map& arguments) {
  std::vector<Case> cases;
  if (has(arguments, "cases")) {
    const std::string& path = text(arguments, "cases");
    cases = cases_from(Csv::parse(path, read_file(path)));
  }
  if (has(arguments, "case")) {
    for (const std::string& value : arguments["case"].as<std::vector<std::string>>()) {
      cases.push_back(parse_case(value));
    }
  }
  const std::vector<Heads> heads = heads_from(arguments);
  if (has(arguments, "lengths")) {
    if (heads.empty()) throw UsageError("--lengths: expected --heads or --model with it, got none");
    for (const std::string& value : arguments["lengths"].as<std::vector<std::string>>()) {
      const std::vector<std::int64_t> lengths = parse_lengths(value);
      for (const Heads& h : heads) cases.push_back(case_of(lengths, h.qk, h.v));
    }
  } else if (!heads.empty()) {
    throw UsageError("--heads, --model: expected --lengths with it, got none");
  }
  if (cases.empty()) cases = has(arguments, "tune") ? tuning_cases() : standard_cases();

  if (has(arguments, "only")) {
    const std::vector<std::string> names = split(text(arguments, "only"), ',');
    for (const std::string& name : names) {
      if (std::none_of(cases.begin(), cases.end(), [&](const Case& c) { return c.name == name; })) {
        throw UsageError(fmt::format("--only: expected the name of a case, got '{}'", name));
      }
    }
    std::erase_if(cases, [&](const Case& c) {
      return std::find(names.begin(), names.end(), c.name) == names.end();
    });
  }
  if (has(arguments, "distribution")) {
    const Distribution distribution = parse_choice<Distribution>(
        "distribution", text(arguments, "distribution"), distributions());
    for (Case& c : cases) c.distribution = distribution;
  }
  return cases;
}

std::vector<std::string> pipelines_from(const po::variables_map& arguments) {
  std::vector<std::string> ids;
  if (has(arguments, "pipelines")) {
    ids = split(text(arguments, "pipelines"), ',');
    for (const std::string& id : ids) check_pipeline("pipelines", id);
  } else {
    for (const Recipe& recipe : recipes()) {
      // What is tuned is what it chooses from.
      if (recipe.id != "auto" || !has(arguments, "tune")) ids.emplace_back(recipe.id);
    }
  }
  return ids;
}

BenchOptions bench_options_from(const po::variables_map& arguments, Device device) {
  BenchOptions options;
  options.seconds = arguments["seconds"].as<double>();
  if (!(options.seconds >= 0) || !std::isfinite(options.seconds)) {
    throw UsageError(
        fmt::format("--seconds: expected a finite number of at least 0, got {}", options.seconds));
  }
  const std::string& l2 = text(arguments, "l2");
  options.hot = l2 == "hot" || l2 == "both";
  options.cold = l2 == "cold" || l2 == "both";
  if (!options.hot && !options.cold) {
    throw UsageError(fmt::format("--l2: expected hot, cold or both, got '{}'", l2));
  }
  if (options.cold && device.type == DeviceType::host) {
    throw UsageError(fmt::format("--l2: expected hot on the host, got {}", l2));
  }
  if (!options.hot && has(arguments, "results")) {
    throw UsageError("--results: expected --l2 hot or both with it, got cold");
  }
  options.trace = flag(arguments, "trace");
  return options;
}

/// What --tune asks for besides a measurement.
void check_tuning(const po::variables_map& arguments, Device device) {
  if (device.type == DeviceType::host) {
    throw UsageError("--tune: expected a GPU, or rows of one with --fit, got the host");
  }
  if (text(arguments, "l2") == "cold") {
    throw UsageError("--tune: expected --l2 hot or both with it, got cold");
  }
  if (count(arguments, "head-dim", 1) != 128) {
    throw UsageError(
        fmt::format("--tune: expected --head-dim 128, got {}", count(arguments, "head-dim", 1)));
  }
}

/// A case ready to run: what is measured, and what refuses it.
struct Prepared {
  CaseResult result;
  Problem problem;
  Capacity capacity;
  std::vector<Variation> variations;
};

Prepared prepare(const Case& original, const po::variables_map& arguments, const DeviceInfo& info,
                 const std::vector<std::string>& pipelines, const VariantOverrides& overrides,
                 Sweeps& sweeps) {
  Prepared prepared;
  Case& c = prepared.result.measured;
  c = original;
  if (info.device.type == DeviceType::host && !flag(arguments, "full")) {
    c = scaled_down(original, host_tokens, host_v_heads);
    if (c.lengths != original.lengths || c.v_heads != original.v_heads) {
      prepared.result.original = fmt::format("{} {}/{}", lengths_text(original.lengths),
                                             original.qk_heads, original.v_heads);
    }
  }
  Problem& p = prepared.problem;
  apply_problem_options(arguments, info.device, p);
  if (flag(arguments, "raw-gates")) {
    p.gate = GateForm::raw;
    p.beta = BetaForm::logit;
  }
  constexpr std::int64_t most_dim = 1 << 20;
  p.qk_dim = p.v_dim =
      static_cast<std::int32_t>(std::min(count(arguments, "head-dim", 1), most_dim));
  p.qk_heads = c.qk_heads;
  p.v_heads = c.v_heads;
  p.initial_state = c.initial_state;
  prepared.capacity = {c.tokens(), static_cast<std::int64_t>(c.lengths.size())};
  validate(p, prepared.capacity);
  for (const std::string& id : pipelines) {
    const Support support = can_make_pipeline(id, p, prepared.capacity, info, overrides);
    if (!support) {
      prepared.result.refused.push_back({id, {}, support.reason});
      continue;
    }
    const Pipeline pipeline = make_pipeline(id, p, prepared.capacity, info, overrides);
    for (Variation& variation : sweeps.of(pipeline, overrides)) {
      const Support value = can_make_pipeline(id, p, prepared.capacity, info, variation.overrides);
      if (value) {
        prepared.variations.push_back(std::move(variation));
      } else {
        prepared.result.refused.push_back({id, variation.options, value.reason});
      }
    }
  }
  return prepared;
}

std::string problem_text(const Prepared& prepared) {
  const Problem& p = prepared.problem;
  return fmt::format("{}, head dim {}, state {} {}{}{}", to_string(p.activation), p.qk_dim,
                     to_string(p.state), to_string(p.state_layout), p.qk_norm ? ", qk norm" : "",
                     p.gate == GateForm::raw ? ", raw gates" : "");
}

Report measure_all(const po::variables_map& arguments) {
  const Device device = device_from(arguments);
  const std::vector<Case> cases = cases_from_arguments(arguments);
  const std::vector<std::string> pipelines = pipelines_from(arguments);
  const VariantOverrides overrides = overrides_from(arguments);
  Sweeps sweeps(arguments);
  if (has(arguments, "tune")) {
    check_tuning(arguments, device);
    sweeps.add_every_value({"fused_prefill", "one_pass"}, "value_tile", device.type);
  }
  check_pipeline("baseline", text(arguments, "baseline"));
  const BenchOptions options = bench_options_from(arguments, device);
  const std::unique_ptr<MultiprocessorLimit> limit = limited_device(arguments, device);
  const DeviceInfo info = device_info(device);
  std::vector<Prepared> prepared;
  std::size_t runs = 0;
  for (const Case& c : cases) {
    prepared.push_back(prepare(c, arguments, info, pipelines, overrides, sweeps));
    runs += prepared.back().variations.size();
  }
  if (runs == 0) {
    const Refusal& refusal = prepared.front().result.refused.front();
    throw Error(ErrorCode::unsupported,
                fmt::format("no pipeline can run these cases; {}: {}",
                            variation_label(refusal.id, refusal.options), refusal.reason));
  }
  sweeps.check_all_used();

  Report report;
  report.version = version();
  report.device = device_name(device);
  report.device_text = to_string(info);
  if (device.type == DeviceType::cuda) {
    report.gpu = info.name;
    report.capability = info.capability;
    report.multiprocessors = info.multiprocessors;
  }
  if (limit) report.limit = limit->text();
  report.problem = problem_text(prepared.front());
  report.baseline = text(arguments, "baseline");
  const Roofline roofline = measure_roofline(info, limit == nullptr);
  report.bytes_per_second = roofline.bytes_per_second;
  report.macs_per_second = roofline.macs_per_second;
  report.tensor_source = roofline.tensor_source;

  Progress progress(static_cast<int>(runs));
  for (Prepared& p : prepared) {
    const Case& c = p.result.measured;
    if (!p.variations.empty()) {
      const Workload workload = make_workload(p.problem, p.capacity, c.lengths, c.distribution,
                                              arguments["seed"].as<std::uint64_t>(), device);
      const Reference reference(p.problem, workload.oracle_inputs());
      p.result.floor_ms = floor_ms(required_work(p.problem, c.lengths), roofline);
      const Bench bench(c.name, workload, reference, info, c.distribution, options);
      for (const Variation& variation : p.variations) {
        progress.step(
            fmt::format("{}, {}", c.name, variation_label(variation.pipeline, variation.options)));
        p.result.pipelines.push_back(bench.measure(variation));
      }
    }
    report.cases.push_back(std::move(p.result));
  }
  return report;
}

/// Fits the costs that auto chooses by, and writes them.
void tune(const std::vector<CostRow>& rows, const po::variables_map& arguments) {
  const CostTable table = fit_costs(rows);
  write_file(text(arguments, "tune"), to_json(table));
  if (has(arguments, "rows")) {
    write_file(text(arguments, "rows"), to_csv(rows, text(arguments, "commit")));
  }
  fmt::print("{}", describe_fit(table, rows));
}

int run(const po::variables_map& arguments) {
  const Outputs outputs = outputs_from(arguments);
  if (has(arguments, "fit")) {
    for (const auto& [name, value] : arguments) {
      if (name != "fit" && name != "tune" && !value.defaulted()) {
        throw UsageError(fmt::format("--{}: expected without --fit, which measures nothing", name));
      }
    }
    std::vector<CostRow> rows;
    std::set<std::filesystem::path> seen;
    for (const std::string& path : arguments["fit"].as<std::vector<std::string>>()) {
      std::error_code none;
      if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none)) {
        throw Error(ErrorCode::io, fmt::format("--fit {}: expected a file of rows, got something "
                                               "else",
                                               path));
      }
      if (!seen.insert(std::filesystem::weakly_canonical(path, none)).second) {
        throw UsageError(fmt::format("--fit: expected each file once, got '{}' again", path));
      }
      std::vector<CostRow> more = cost_rows_from(path, read_file(path));
      rows.insert(rows.end(), std::make_move_iterator(more.begin()),
                  std::make_move_iterator(more.end()));
    }
    tune(rows, arguments);
    return exit_success;
  }
  Report report;
  if (has(arguments, "from")) {
    const std::string& path = text(arguments, "from");
    report = report_from_json(path, read_file(path));
  } else {
    report = measure_all(arguments);
  }
  write_outputs(report, outputs);
  if (has(arguments, "tune")) tune(cost_rows(report), arguments);
  if (report.all_right()) return exit_success;
  std::fflush(stdout);
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      if (pipeline.right) continue;
      fmt::print(stderr, "gdnflow-ablate: {}, {}: o: {}; final_state: {}\n", result.measured.name,
                 pipeline.label(), pipeline.o.worst, pipeline.state.worst);
    }
  }
  return exit_wrong_result;
}

}  // namespace
}  // namespace gdnflow::apps

int main(int argc, char** argv) {
  using namespace gdnflow::apps;
  return run_program(
      {"gdnflow-ablate",
       "Compares pipelines, and options of their variants, on cases: right or wrong against the\n"
       "fp64 oracle, core and forward times (medians), the ratio to a baseline, the share of the\n"
       "machine's floor, and each stage's time.",
       "  gdnflow-ablate\n"
       "  gdnflow-ablate --case 4,8192,2,8 --lengths 28672,4096 --heads 16,64 --svg plot.svg\n"
       "  gdnflow-ablate --cases cases.csv --pipelines naive,residual --csv out.csv --json "
       "out.json\n"
       "  gdnflow-ablate --pipelines fused-128 --sweep fused_prefill:value_tile=64,128 --l2 both\n"
       "  gdnflow-ablate --pipelines warp-specialized --options --markdown\n"
       "  gdnflow-ablate --sms 16 --trace\n"
       "  gdnflow-ablate --from out.json --svg plot.svg\n"
       "  gdnflow-ablate --tune costs.json --rows rows.csv --commit $(git rev-parse HEAD)",
       describe, run},
      argc, argv);
}
