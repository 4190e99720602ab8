// gdnflow-run: the forward pass on the tensors of a safetensors file, compared with the results in
// the file or with the oracle.

#include <gdnflow/gdnflow.hpp>

#include "common/arguments.hpp"
#include "common/output.hpp"
#include "common/program.hpp"
#include "common/reference.hpp"
#include "common/tensors.hpp"
#include "common/timing.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gdnflow::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array known_tensors{
    "q", "k",     "v",       "g", "alpha",      "beta",          "a",
    "b", "a_log", "dt_bias", "o", "cu_seqlens", "initial_state", "final_state"};

void describe(po::options_description& options) {
  options.add_options()("input", po::value<std::string>()->value_name("FILE"),
                        "safetensors file with q, k, v, g, beta and, where there are several "
                        "sequences, cu_seqlens; also initial_state; alpha for g, a, a_log and "
                        "dt_bias for raw gates, b for beta's logits; o and final_state to compare "
                        "with")(
      "map", po::value<std::vector<std::string>>()->value_name("NAME=TENSOR"),
      "the file's tensor for a name, e.g. q=model.q; may be given several times");
  add_pipeline_option(options);
  add_device_option(options);
  add_variant_option(options);
  add_problem_options(options);
  options.add_options()("check", po::bool_switch(),
                        "compare with the fp64 oracle what the file has no expected tensor for")(
      "tolerance", po::value<double>()->value_name("X"),
      "largest relative RMS error; default: by type, 1e-5 for f32 on the host")(
      "eager", po::bool_switch(), "launch kernel by kernel on a GPU instead of replaying a graph")(
      "repeats", po::value<std::int64_t>()->value_name("N"),
      "timed runs, of which the median is given; default: 1 on the host, 20 on a GPU")(
      "output", po::value<std::string>()->value_name("FILE"),
      "write o and final_state to a safetensors file")(
      "json", po::value<std::string>()->implicit_value("-", "stdout")->value_name("FILE"),
      "print the result as JSON, or write it to a file");
}

/// The input file under the names that the programs use.
class Inputs {
 public:
  Inputs(const SafetensorsFile& file, const po::variables_map& arguments) : file_(file) {
    for (const char* name : known_tensors) names_[name] = name;
    if (!has(arguments, "map")) return;
    for (const std::string& value : arguments["map"].as<std::vector<std::string>>()) {
      const std::size_t equals = value.find('=');
      const std::string name = value.substr(0, equals);
      if (equals == std::string::npos || names_.count(name) == 0) {
        throw UsageError(fmt::format("--map: expected NAME=TENSOR with NAME one of {}, got '{}'",
                                     fmt::join(known_tensors, ", "), value));
      }
      names_[name] = value.substr(equals + 1);
      file_.find(names_[name]);  // a tensor named on the command line must be there
    }
  }

  bool contains(const std::string& name) const { return file_.contains(names_.at(name)); }
  const TensorView& find(const std::string& name) const { return file_.find(names_.at(name)); }
  /// How a message names the tensor.
  std::string label(const std::string& name) const {
    const std::string& tensor = names_.at(name);
    return tensor == name ? name : fmt::format("{} ({})", name, tensor);
  }
  bool metadata_is(std::string_view key, std::string_view value) const {
    const auto found = file_.metadata().find(key);
    return found != file_.metadata().end() && found->second == value;
  }
  const std::map<std::string, std::string, std::less<>>& metadata() const {
    return file_.metadata();
  }

 private:
  const SafetensorsFile& file_;
  std::map<std::string, std::string> names_;
};

[[noreturn]] void refuse(const std::string& what, const std::string& expected,
                         const std::string& got) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: expected {}, got {}", what, expected, got));
}

/// The shape of the run as the file's tensors give it.
struct Shape {
  Problem problem;
  std::vector<std::int64_t> lengths;
  std::int64_t rows = 0;   ///< T of the tensors, padding included
  std::int64_t batch = 0;  ///< of dense [B, T, ...] tensors; 0 where they are packed
};

/// A tensor with one row a token, [T, ...] or [B, T, ...], as [T, trailing...].
TensorView token_tensor(const Inputs& inputs, const std::string& name, const Shape& shape,
                        std::vector<std::int64_t> trailing) {
  const TensorView& tensor = inputs.find(name);
  std::vector<std::int64_t> packed{shape.rows};
  packed.insert(packed.end(), trailing.begin(), trailing.end());
  std::vector<std::int64_t> expected = packed;
  if (shape.batch > 0) {
    expected.front() = shape.rows / shape.batch;
    expected.insert(expected.begin(), shape.batch);
  }
  const std::span got(tensor.extents.data(), static_cast<std::size_t>(tensor.rank));
  if (!std::ranges::equal(got, expected) || !is_float(tensor.dtype)) {
    refuse(inputs.label(name), fmt::format("floating [{}]", fmt::join(expected, ",")),
           to_string(tensor));
  }
  return reshaped(tensor, packed);
}

std::vector<std::int64_t> read_lengths(const Inputs& inputs, std::int64_t rows) {
  const TensorView& tensor = inputs.find("cu_seqlens");
  const std::string label = inputs.label("cu_seqlens");
  if (tensor.rank != 1 || tensor.extents[0] < 2 ||
      (tensor.dtype != DType::i32 && tensor.dtype != DType::i64)) {
    refuse(label, "i32 or i64 [sequences + 1]", to_string(tensor));
  }
  const OwnedTensor offsets = copy_to({}, tensor, DType::i64);
  const auto* at = offsets.view.as<const std::int64_t>();
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i + 1 < tensor.extents[0]; ++i) {
    if (at[i] < 0 || at[i + 1] < at[i] || at[i + 1] > rows) {
      refuse(label, fmt::format("rising numbers from 0 to {} tokens", rows),
             fmt::format("{}, {} at {}", at[i], at[i + 1], i));
    }
    lengths.push_back(at[i + 1] - at[i]);
  }
  if (at[0] != 0) refuse(label, "0 first", fmt::to_string(at[0]));
  return lengths;
}

void read_gates(const Inputs& inputs, Problem& problem) {
  if (inputs.contains("g")) {
    problem.gate = GateForm::log_decay;
  } else if (inputs.contains("alpha")) {
    problem.gate = GateForm::alpha;
  } else if (inputs.contains("a")) {
    problem.gate = GateForm::raw;
  } else {
    throw Error(ErrorCode::invalid_argument,
                "expected g, alpha, or a with a_log and dt_bias in the file, got none of them "
                "(--map renames)");
  }
  problem.beta = inputs.contains("beta") ? BetaForm::ready : BetaForm::logit;
}

Shape read_shape(const Inputs& inputs, const po::variables_map& arguments, Device device) {
  Shape shape;
  Problem& p = shape.problem;
  apply_problem_options(arguments, device, p);
  const TensorView& q = inputs.find("q");
  const TensorView& v = inputs.find("v");
  if (q.rank < 3 || q.rank > 4) refuse(inputs.label("q"), "[T,Hqk,D] or [B,T,Hqk,D]", to_string(q));
  if (v.rank != q.rank) refuse(inputs.label("v"), "as many dimensions as q", to_string(v));
  const std::int32_t last = q.rank - 1;
  for (const std::int64_t extent :
       {q.extents[last - 1], q.extents[last], v.extents[last - 1], v.extents[last]}) {
    constexpr std::int64_t most = 1 << 20;
    if (extent < 1 || extent > most) {
      refuse("heads and head dims", fmt::format("1 to {}", most), fmt::to_string(extent));
    }
  }
  p.qk_heads = static_cast<std::int32_t>(q.extents[last - 1]);
  p.qk_dim = static_cast<std::int32_t>(q.extents[last]);
  p.v_heads = static_cast<std::int32_t>(v.extents[last - 1]);
  p.v_dim = static_cast<std::int32_t>(v.extents[last]);
  shape.rows = q.rank == 4 ? q.extents[0] * q.extents[1] : q.extents[0];
  shape.batch = q.rank == 4 ? q.extents[0] : 0;
  if (q.rank == 4 && shape.batch < 1)
    refuse(inputs.label("q"), "a batch of 1 or more", to_string(q));

  // On a GPU a file in half precision stays in its type unless another is asked for.
  if (device.type == DeviceType::cuda && !has(arguments, "type") && q.dtype == DType::f16) {
    p.activation = DType::f16;
  }
  const auto layout = inputs.metadata().find("state_layout");
  if (layout != inputs.metadata().end() && arguments["state-layout"].defaulted()) {
    constexpr std::array layouts{StateLayout::kv, StateLayout::vk};
    p.state_layout = parse_choice<StateLayout>("state-layout", layout->second, layouts);
  }
  if (const auto norm = inputs.metadata().find("qk_l2norm_in_kernel");
      norm != inputs.metadata().end()) {
    // Another spelling, taken for false, would be a wrong result.
    if (norm->second != "true" && norm->second != "false") {
      refuse("metadata qk_l2norm_in_kernel", "true or false", "'" + norm->second + "'");
    }
    p.qk_norm = p.qk_norm || norm->second == "true";
  }
  p.initial_state = inputs.contains("initial_state");
  p.final_state = true;
  read_gates(inputs, p);

  if (inputs.contains("cu_seqlens")) {
    shape.lengths = read_lengths(inputs, shape.rows);
  } else {
    const std::int64_t sequences = std::max<std::int64_t>(shape.batch, 1);
    shape.lengths.assign(static_cast<std::size_t>(sequences), shape.rows / sequences);
  }
  p.zero_padding = offsets_of(shape.lengths).back() < shape.rows;
  return shape;
}

void check_extents(const Inputs& inputs, const std::string& name,
                   const std::vector<std::int64_t>& expected) {
  const TensorView& tensor = inputs.find(name);
  const std::span got(tensor.extents.data(), static_cast<std::size_t>(tensor.rank));
  if (!std::ranges::equal(got, expected) || !is_float(tensor.dtype)) {
    refuse(inputs.label(name), fmt::format("floating [{}]", fmt::join(expected, ",")),
           to_string(tensor));
  }
}

Workload read_workload(const Inputs& inputs, const Shape& shape, Device device) {
  const Problem& p = shape.problem;
  const auto sequences = static_cast<std::int64_t>(shape.lengths.size());
  Workload workload{p, {shape.rows, sequences}, device, {}, {}};
  validate(p, workload.capacity);
  const auto add = [&](const char* edge, const TensorView& host, DType type) {
    workload.tensors[edge] = copy_to(device, host, type);
  };
  const std::vector<std::int64_t> qk{p.qk_heads, p.qk_dim};
  const std::vector<std::int64_t> vo{p.v_heads, p.v_dim};
  const std::vector<std::int64_t> gate{p.v_heads};
  add("q", token_tensor(inputs, "q", shape, qk), p.activation);
  add("k", token_tensor(inputs, "k", shape, qk), p.activation);
  add("v", token_tensor(inputs, "v", shape, vo), p.activation);
  if (p.gate == GateForm::raw) {
    check_extents(inputs, "a_log", gate);
    check_extents(inputs, "dt_bias", gate);
    add("a", token_tensor(inputs, "a", shape, gate), p.activation);
    add("a_log", inputs.find("a_log"), DType::f32);
    add("dt_bias", inputs.find("dt_bias"), DType::f32);
  } else {
    const char* name = p.gate == GateForm::alpha ? "alpha" : "g";
    add("g", token_tensor(inputs, name, shape, gate), DType::f32);
  }
  if (p.beta == BetaForm::logit) {
    if (!inputs.contains("b")) inputs.find("beta");  // says that it is missing
    add("b", token_tensor(inputs, "b", shape, gate), p.activation);
  } else {
    add("beta", token_tensor(inputs, "beta", shape, gate), DType::f32);
  }
  if (p.initial_state) {
    check_extents(inputs, "initial_state", state_extents(p, sequences));
    add("initial_state", inputs.find("initial_state"), p.state);
  }
  if (inputs.contains("o")) token_tensor(inputs, "o", shape, vo);
  if (inputs.contains("final_state")) {
    check_extents(inputs, "final_state", state_extents(p, sequences));
  }
  const std::array<std::int64_t, 1> offsets{sequences + 1};
  workload.tensors["cu_seqlens"] = make_tensor(device, p.index, offsets);
  workload.set_lengths(shape.lengths);
  add_outputs(workload);
  return workload;
}

/// The log decay and beta that the gates stand for, in fp64 from the values that the pipeline gets,
/// rounded to fp32 as the oracle takes them.
struct ReadyGates {
  std::optional<OwnedTensor> g;
  std::optional<OwnedTensor> beta;
};

template <class F>
OwnedTensor map_gate(const Workload& workload, const char* name, F&& f) {
  const TensorView& source = workload.view(name);
  const OwnedTensor values = copy_to({}, copy_to_host(source).view, DType::f32);
  const std::int64_t heads = workload.problem.v_heads;
  for (std::int64_t i = 0; i < values.view.elements(); ++i) {
    float& value = values.view.as<float>()[i];
    value = static_cast<float>(f(static_cast<double>(value), i % heads));
  }
  return copy_to(source.device, values.view, DType::f32);
}

ReadyGates ready_gates(const Workload& workload) {
  ReadyGates ready;
  if (workload.problem.gate == GateForm::alpha) {
    ready.g = map_gate(workload, "g", [](double alpha, std::int64_t) { return std::log(alpha); });
  }
  if (workload.problem.gate == GateForm::raw) {
    const OwnedTensor a_log = copy_to_host(workload.view("a_log"));
    const OwnedTensor dt_bias = copy_to_host(workload.view("dt_bias"));
    ready.g = map_gate(workload, "a", [&](double a, std::int64_t head) {
      const double x = a + dt_bias.view.as<const float>()[head];
      const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
      return -std::exp(static_cast<double>(a_log.view.as<const float>()[head])) * softplus;
    });
  }
  if (workload.problem.beta == BetaForm::logit) {
    ready.beta =
        map_gate(workload, "b", [](double b, std::int64_t) { return 1.0 / (1.0 + std::exp(-b)); });
  }
  return ready;
}

Reference oracle_for(const Workload& workload) {
  const ReadyGates gates = ready_gates(workload);
  OracleInputs inputs;
  const auto owned = [&](const TensorView& tensor) {
    return first_rows(tensor, workload.tokens());
  };
  inputs.q = owned(workload.view("q"));
  inputs.k = owned(workload.view("k"));
  inputs.v = owned(workload.view("v"));
  inputs.g = owned(gates.g ? gates.g->view : workload.view("g"));
  inputs.beta = owned(gates.beta ? gates.beta->view : workload.view("beta"));
  if (workload.problem.initial_state) inputs.initial_state = workload.view("initial_state");
  inputs.cu_seqlens = workload.cu_seqlens;
  return Reference(workload.problem, inputs);
}

/// Runs the pipeline `repeats` times; the median in milliseconds.
double run_pipeline(Executor& executor, const Workload& workload, std::int64_t repeats) {
  const OwnedStream stream(workload.device);
  executor.bind(workload.bindings());
  executor.build();
  workload.poison_outputs();
  synchronize(workload.device);
  Stopwatch watch(workload.device);
  std::vector<double> samples;
  for (std::int64_t i = 0; i < repeats; ++i) {
    watch.start(stream.get());
    executor.run(stream.get());
    samples.push_back(watch.stop(stream.get()));
  }
  std::sort(samples.begin(), samples.end());
  return percentile(samples, 50);
}

/// A result against what it should be.
struct Verdict {
  const char* name = "";
  std::optional<Comparison> comparison;
  std::string against;  ///< "the file" or "the oracle"
  double bound = 0;

  bool ok() const { return !comparison || comparison->within(bound); }
};

Json to_json(const Verdict& verdict) {
  if (!verdict.comparison) return nullptr;
  const Comparison measures = for_report(*verdict.comparison);
  return {{"rel_rms", measures.relative_rms}, {"max_abs", measures.max_abs}};
}

std::string to_line(const Verdict& verdict, std::span<const std::int64_t> cu_seqlens) {
  if (!verdict.comparison) return "not compared: not in the file, and --check not given";
  return fmt::format("{} (bound {:.0e}) against {}: {}", verdict.ok() ? "right" : "WRONG",
                     verdict.bound, verdict.against, to_string(*verdict.comparison, cu_seqlens));
}

void write_output(const std::string& path, const Shape& shape, const TensorView& o,
                  const TensorView& state, const std::string& pipeline, Device device) {
  TensorView written = o;
  if (shape.batch > 0) {
    const std::array<std::int64_t, 4> extents{shape.batch, shape.rows / shape.batch, o.extents[1],
                                              o.extents[2]};
    written = reshaped(o, extents);
  }
  write_safetensors(behind_links(path), {{"o", written}, {"final_state", state}},
                    {{"pipeline", pipeline},
                     {"device", device_name(device)},
                     {"state_layout", std::string(to_string(shape.problem.state_layout))}});
}

int run(const po::variables_map& arguments) {
  if (!has(arguments, "input")) throw UsageError("--input: expected a safetensors file, got none");
  const Device device = device_from(arguments);
  const std::int64_t repeats = has(arguments, "repeats")         ? count(arguments, "repeats", 1)
                               : device.type == DeviceType::host ? 1
                                                                 : 20;
  check_files_apart(arguments, {"input", "costs"}, {"output", "json"});
  const std::optional<OutputTarget> json = json_target_from(arguments);
  if (has(arguments, "output")) check_replaceable(text(arguments, "output"));
  std::optional<double> tolerance;
  if (has(arguments, "tolerance")) {
    tolerance = arguments["tolerance"].as<double>();
    if (!(*tolerance >= 0)) {
      throw UsageError(
          fmt::format("--tolerance: expected a number of at least 0, got {}", *tolerance));
    }
  }
  (void)overrides_from(arguments);  // refused before a file is read

  const SafetensorsFile file = SafetensorsFile::open(text(arguments, "input"));
  const Inputs inputs(file, arguments);
  const Shape shape = read_shape(inputs, arguments, device);
  use_device(device);
  const DeviceInfo info = device_info(device);
  const Workload workload = read_workload(inputs, shape, device);
  const auto [recipe, overrides, pipeline] =
      pipeline_from(arguments, shape.problem, workload.capacity, info);
  Plan plan(make_pipeline(recipe, shape.problem, workload.capacity, info, overrides));
  const bool graph = device.type == DeviceType::cuda && !flag(arguments, "eager");
  const std::unique_ptr<Executor> executor =
      graph ? make_graph_executor(std::move(plan)) : make_executor(std::move(plan));
  const double ms = run_pipeline(*executor, workload, repeats);

  const OwnedTensor o = copy_to_host(workload.view("o"));
  const OwnedTensor state = copy_to_host(workload.view("final_state"));
  if (has(arguments, "output")) {
    write_output(text(arguments, "output"), shape, o.view, state.view, pipeline, device);
  }

  Bounds bounds = bounds_for(shape.problem, inputs.metadata_is("keys", "correlated"));
  if (tolerance) bounds.o = bounds.state = *tolerance;
  Verdict verdicts[] = {{"o", {}, "the file", bounds.o},
                        {"final_state", {}, "the file", bounds.state}};
  std::optional<Reference> oracle;
  for (Verdict& verdict : verdicts) {
    const bool is_o = &verdict == verdicts;
    if (inputs.contains(verdict.name)) {
      const std::int64_t rows = is_o ? workload.tokens() : state.view.extents[0];
      const TensorView got = first_rows(is_o ? o.view : state.view, rows);
      const TensorView expected =
          is_o ? token_tensor(inputs, "o", shape, {shape.problem.v_heads, shape.problem.v_dim})
               : inputs.find("final_state");
      verdict.comparison = compare(got, first_rows(expected, rows));
    } else if (flag(arguments, "check")) {
      if (!oracle) oracle.emplace(oracle_for(workload));
      const TensorView& got = workload.view(verdict.name);
      verdict.comparison = is_o ? oracle->o(got) : oracle->final_state(got);
      verdict.against = "the oracle";
    }
  }

  const std::span cu_seqlens(workload.cu_seqlens);
  if (json) {
    const Json result = {{"pipeline", pipeline},        {"device", device_name(device)},
                         {"tokens", workload.tokens()}, {"ms", ms},
                         {"o", to_json(verdicts[0])},   {"final_state", to_json(verdicts[1])}};
    json->write(result.dump(2));
  } else {
    fmt::print("{} on {}: {}\n", pipeline, to_string(info), to_string(shape.problem));
    fmt::print("tokens       {} in {} sequence{}\n", workload.tokens(), shape.lengths.size(),
               shape.lengths.size() == 1 ? "" : "s");
    fmt::print("time         {:.4g} ms{}\n", ms, repeats > 1 ? " (median)" : "");
    fmt::print("o            {}\n", to_line(verdicts[0], cu_seqlens));
    fmt::print("final_state  {}\n", to_line(verdicts[1], {}));
  }
  bool right = true;
  for (const Verdict& verdict : verdicts) {
    if (verdict.ok()) continue;
    right = false;
    std::fflush(stdout);
    fmt::print(stderr, "gdnflow-run: {}: {}\n", verdict.name,
               to_line(verdict, verdict.name == std::string_view("o") ? cu_seqlens
                                                                      : decltype(cu_seqlens){}));
  }
  return right ? exit_success : exit_wrong_result;
}

}  // namespace
}  // namespace gdnflow::apps

int main(int argc, char** argv) {
  using namespace gdnflow::apps;
  return run_program(
      {"gdnflow-run",
       "Runs the Gated DeltaNet prefill on the tensors of a safetensors file and compares o and\n"
       "final_state with those in the file, or with the fp64 oracle.",
       "  gdnflow-run --input tests/golden/qwen3_next_layer.safetensors\n"
       "  gdnflow-run --input layer.safetensors --map q=model.q --map k=model.k --check --json\n"
       "  gdnflow-run --input layer.safetensors --pipeline naive --device cuda --output "
       "out.safetensors",
       describe, run},
      argc, argv);
}
