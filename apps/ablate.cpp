// gdnflow-ablate: every pipeline on every case, right or wrong, how long, and how far from the
// machine's floor.

#include <gdnflow/gdnflow.hpp>
#include <gdnflow/version.hpp>

#include "common/arguments.hpp"
#include "common/cases.hpp"
#include "common/output.hpp"
#include "common/plot.hpp"
#include "common/program.hpp"
#include "common/progress.hpp"
#include "common/reference.hpp"
#include "common/report.hpp"
#include "common/roofline.hpp"
#include "common/tensors.hpp"
#include "common/timing.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
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
  add_variant_option(options);
  add_problem_options(options);
  options.add_options()("seed", po::value<std::uint64_t>()->default_value(1)->value_name("N"),
                        "of the inputs")(
      "seconds", po::value<double>()->default_value(0.2, "0.2")->value_name("X"),
      "time to spend on each measurement")("csv", po::value<std::string>()->value_name("FILE"),
                                           "write all numbers as CSV")(
      "json", po::value<std::string>()->implicit_value("-", "stdout")->value_name("FILE"),
      "print everything as JSON in place of the table, or write it to a file")(
      "svg", po::value<std::string>()->value_name("FILE"), "write a plot (with gnuplot)")(
      "from", po::value<std::string>()->value_name("FILE"),
      "measure nothing: take a report that --json wrote")(
      "results", po::value<std::string>()->value_name("FILE"),
      "write commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms; with --commit")(
      "commit", po::value<std::string>()->value_name("SHA"), "what --results says was measured");
}

/// The files that were asked for, refused before any work if they cannot be written.
struct Outputs {
  std::optional<std::string> csv;
  std::optional<OutputTarget> json;
  std::optional<std::string> svg;
  std::optional<std::string> results;
  std::string commit;
};

Outputs outputs_from(const po::variables_map& arguments) {
  Outputs outputs;
  const auto file = [&](const char* name) -> std::optional<std::string> {
    if (!has(arguments, name)) return std::nullopt;
    check_writable(text(arguments, name));
    return text(arguments, name);
  };
  outputs.csv = file("csv");
  outputs.svg = file("svg");
  outputs.results = file("results");
  if (has(arguments, "json")) outputs.json = OutputTarget{text(arguments, "json")};
  if (outputs.json) outputs.json->check();
  if (has(arguments, "commit")) outputs.commit = text(arguments, "commit");
  if (outputs.results && outputs.commit.empty()) {
    throw UsageError("--results: expected --commit SHA with it, got none");
  }
  return outputs;
}

void write_outputs(const Report& report, const Outputs& outputs) {
  if (outputs.csv) write_file(*outputs.csv, to_csv(report) + "\n");
  if (outputs.results) {
    write_file(*outputs.results, to_results_csv(report, outputs.commit) + "\n");
  }
  if (outputs.json) outputs.json->write(to_json(report));
  if (!outputs.json || !outputs.json->is_stdout()) fmt::print("{}", to_table(report));
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
      const std::vector<std::int64_t> lengths = parse_integers("lengths", value, 0);
      for (const Heads& h : heads) cases.push_back(case_of(lengths, h.qk, h.v));
    }
  } else if (!heads.empty()) {
    throw UsageError("--heads, --model: expected --lengths with it, got none");
  }
  if (cases.empty()) cases = standard_cases();

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
    for (const Recipe& recipe : recipes()) ids.emplace_back(recipe.id);
  }
  return ids;
}

Accuracy accuracy_of(const Comparison& comparison, std::span<const std::int64_t> cu_seqlens) {
  return {comparison.relative_rms, comparison.max_abs, comparison.over_tolerance,
          to_string(comparison, cu_seqlens)};
}

/// Measures pipelines on one case's tensors.
class Bench {
 public:
  Bench(const Workload& workload, const Reference& reference, const DeviceInfo& info,
        Distribution distribution, double seconds)
      : workload_(workload),
        reference_(reference),
        info_(info),
        stream_(workload.device),
        bounds_(bounds_for(workload.problem, distribution == Distribution::correlated)),
        // The element-wise pass mark is for inputs of the benchmark's scale.
        elementwise_(distribution == Distribution::random_decay ||
                     distribution == Distribution::mixed),
        seconds_(seconds) {}

  PipelineResult measure_pipeline(const std::string& id, const VariantOverrides& overrides) {
    const Pipeline pipeline =
        make_pipeline(id, workload_.problem, workload_.capacity, info_, overrides);
    PipelineResult result;
    result.id = id;
    measure_forward(Plan(pipeline), result);
    measure_parts(Plan(pipeline, {.reuse = false, .poison = false}), result);
    return result;
  }

 private:
  std::unique_ptr<Executor> executor(Plan plan, ExecutorOptions options = {}) const {
    return workload_.device.type == DeviceType::cuda
               ? make_graph_executor(std::move(plan), std::move(options))
               : make_host_executor(std::move(plan), std::move(options));
  }

  void start(Executor& executor) const {
    executor.bind(workload_.bindings());
    executor.build();
    workload_.poison_outputs();
    executor.run(stream_.get());
    synchronize(workload_.device);
  }

  double median(Executor& executor) const {
    return measure([&] { executor.run(stream_.get()); }, workload_.device, stream_.get(), seconds_)
        .median_ms;
  }

  bool is_right(const Comparison& o, const Comparison& state) const {
    const bool elements = !elementwise_ || (o.over_tolerance == 0 && state.over_tolerance == 0);
    return o.within(bounds_.o) && state.within(bounds_.state) && elements;
  }

  // The whole pass, as it would be used.
  void measure_forward(Plan plan, PipelineResult& result) const {
    result.arena_bytes = plan.arena_bytes();
    const std::unique_ptr<Executor> whole = executor(std::move(plan));
    start(*whole);
    const Comparison o = reference_.o(workload_.view("o"));
    const Comparison state = reference_.final_state(workload_.view("final_state"));
    result.o = accuracy_of(o, workload_.cu_seqlens);
    result.state = accuracy_of(state, {});
    result.right = is_right(o, state);
    result.forward_ms = median(*whole);
  }

  // The core nodes by themselves, and each node by itself. A pass over the whole pipeline leaves
  // every intermediate in an arena without reuse, which the executor of the core nodes shares.
  void measure_parts(const Plan& plan, PipelineResult& result) const {
    const Memory arena(workload_.device, plan.arena_bytes());
    ExecutorOptions options;
    options.arena = arena.data();
    options.arena_bytes = arena.bytes();
    const std::unique_ptr<Executor> all = make_executor(plan, options);
    start(*all);
    for (const Node& node : plan.pipeline().nodes()) {
      if (node.core) options.nodes.push_back(node.name);
    }
    if (!options.nodes.empty()) {
      const std::unique_ptr<Executor> core = executor(plan, options);
      start(*core);
      result.right =
          result.right && is_right(reference_.o(workload_.view("o")),
                                   reference_.final_state(workload_.view("final_state")));
      result.core_ms = median(*core);
    }
    constexpr int host_repeats = 3;
    constexpr int gpu_repeats = 20;
    const int repeats = workload_.device.type == DeviceType::host ? host_repeats : gpu_repeats;
    for (const NodeTime& time : all->profile(repeats, stream_.get())) {
      result.stages.push_back({time.node, time.median_ms});
    }
  }

  const Workload& workload_;
  const Reference& reference_;
  const DeviceInfo& info_;
  OwnedStream stream_;
  Bounds bounds_;
  bool elementwise_;
  double seconds_;
};

/// A case ready to run: what is measured, and what refuses it.
struct Prepared {
  CaseResult result;
  Problem problem;
  Capacity capacity;
  std::vector<std::string> pipelines;
};

Prepared prepare(const Case& original, const po::variables_map& arguments, const DeviceInfo& info,
                 const std::vector<std::string>& pipelines, const VariantOverrides& overrides) {
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
    if (support) {
      prepared.pipelines.push_back(id);
    } else {
      prepared.result.refused.push_back({id, support.reason});
    }
  }
  return prepared;
}

std::string problem_text(const Prepared& prepared) {
  const Problem& p = prepared.problem;
  return fmt::format("{}, head dim {}, state {} {}{}", to_string(p.activation), p.qk_dim,
                     to_string(p.state), to_string(p.state_layout), p.qk_norm ? ", qk norm" : "");
}

Report measure_all(const po::variables_map& arguments) {
  const Device device = device_from(arguments);
  const std::vector<Case> cases = cases_from_arguments(arguments);
  const std::vector<std::string> pipelines = pipelines_from(arguments);
  const VariantOverrides overrides = overrides_from(arguments);
  check_pipeline("baseline", text(arguments, "baseline"));
  const double seconds = arguments["seconds"].as<double>();
  if (!(seconds >= 0)) throw UsageError("--seconds: expected a number of at least 0");
  use_device(device);
  const DeviceInfo info = device_info(device);
  std::vector<Prepared> prepared;
  std::size_t runs = 0;
  for (const Case& c : cases) {
    prepared.push_back(prepare(c, arguments, info, pipelines, overrides));
    runs += prepared.back().pipelines.size();
  }
  if (runs == 0) {
    const Refusal& refusal = prepared.front().result.refused.front();
    throw Error(ErrorCode::unsupported,
                fmt::format("no pipeline can run these cases; {}: {}", refusal.id, refusal.reason));
  }

  Report report;
  report.version = version();
  report.device = device_name(device);
  report.device_text = to_string(info);
  report.problem = problem_text(prepared.front());
  report.baseline = text(arguments, "baseline");
  const Roofline roofline = measure_roofline(info);
  report.bytes_per_second = roofline.bytes_per_second;
  report.macs_per_second = roofline.macs_per_second;
  report.tensor_source = roofline.tensor_source;

  Progress progress(static_cast<int>(runs));
  for (Prepared& p : prepared) {
    const Case& c = p.result.measured;
    if (!p.pipelines.empty()) {
      const Workload workload = make_workload(p.problem, p.capacity, c.lengths, c.distribution,
                                              arguments["seed"].as<std::uint64_t>(), device);
      const Reference reference(p.problem, workload.oracle_inputs());
      p.result.floor_ms = floor_ms(required_work(p.problem, c.lengths), roofline);
      Bench bench(workload, reference, info, c.distribution, seconds);
      for (const std::string& id : p.pipelines) {
        progress.step(fmt::format("{}, {}", c.name, id));
        p.result.pipelines.push_back(bench.measure_pipeline(id, overrides));
      }
    }
    report.cases.push_back(std::move(p.result));
  }
  return report;
}

int run(const po::variables_map& arguments) {
  const Outputs outputs = outputs_from(arguments);
  Report report;
  if (has(arguments, "from")) {
    const std::string& path = text(arguments, "from");
    report = report_from_json(path, read_file(path));
  } else {
    report = measure_all(arguments);
  }
  write_outputs(report, outputs);
  if (report.all_right()) return exit_success;
  std::fflush(stdout);
  for (const CaseResult& result : report.cases) {
    for (const PipelineResult& pipeline : result.pipelines) {
      if (pipeline.right) continue;
      fmt::print(stderr, "gdnflow-ablate: {}, {}: o: {}; final_state: {}\n", result.measured.name,
                 pipeline.id, pipeline.o.worst, pipeline.state.worst);
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
       "Compares pipelines on cases: right or wrong against the fp64 oracle, core and forward\n"
       "times (medians), the ratio to a baseline, the share of the machine's floor, and each\n"
       "stage's time.",
       "  gdnflow-ablate\n"
       "  gdnflow-ablate --case 4,8192,2,8 --lengths 28672,4096 --heads 16,64 --svg plot.svg\n"
       "  gdnflow-ablate --cases cases.csv --pipelines naive,residual --csv out.csv --json "
       "out.json\n"
       "  gdnflow-ablate --from out.json --svg plot.svg",
       describe, run},
      argc, argv);
}
