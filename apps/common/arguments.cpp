#include "common/arguments.hpp"

#include <gdnflow/stages.hpp>

#include "common/csv.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <limits>
#include <system_error>

namespace gdnflow::apps {

std::int64_t parse_integer(std::string_view option, std::string_view value, std::int64_t least) {
  std::int64_t number = 0;
  const char* end = value.data() + value.size();
  const auto parsed = std::from_chars(value.data(), end, number);
  if (parsed.ec != std::errc{} || parsed.ptr != end || number < least) {
    throw UsageError(fmt::format("--{}: expected a whole number of at least {}, got '{}'", option,
                                 least, value));
  }
  return number;
}

std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view value,
                                         std::int64_t least) {
  std::vector<std::int64_t> numbers;
  for (const std::string& piece : split(value, ',')) {
    numbers.push_back(parse_integer(option, piece, least));
  }
  return numbers;
}

void check_files_apart(const po::variables_map& arguments,
                       std::initializer_list<const char*> inputs,
                       std::initializer_list<const char*> outputs) {
  namespace fs = std::filesystem;
  struct File {
    const char* option;
    fs::path path;
    const char* use;
  };
  std::vector<File> taken;
  // By what it is, not by what it is called; a file that does not exist yet has only its name.
  const auto add = [&](const char* option, const std::string& name, const char* use) {
    if (name == "-") return;
    std::error_code ignored;
    if (fs::exists(name, ignored) && !fs::is_regular_file(name, ignored)) return;
    taken.push_back({option, fs::weakly_canonical(name, ignored), use});
  };
  for (const char* option : inputs) {
    if (!has(arguments, option)) continue;
    if (const auto* list = boost::any_cast<std::vector<std::string>>(&arguments[option].value())) {
      for (const std::string& name : *list) add(option, name, "reads");
    } else {
      add(option, text(arguments, option), "reads");
    }
  }
  for (const char* option : outputs) {
    if (!has(arguments, option)) continue;
    const std::size_t before = taken.size();
    add(option, text(arguments, option), "writes");
    if (taken.size() == before) continue;
    for (std::size_t i = 0; i < before; ++i) {
      if (taken[i].path == taken.back().path) {
        throw UsageError(fmt::format("--{}: expected a file of its own, got '{}', which --{} {}",
                                     option, text(arguments, option), taken[i].option,
                                     taken[i].use));
      }
    }
  }
}

std::optional<OutputTarget> json_target_from(const po::variables_map& arguments) {
  if (!has(arguments, "json")) return std::nullopt;
  OutputTarget json{text(arguments, "json")};
  json.check();
  return json;
}

std::int64_t count(const po::variables_map& arguments, const char* name, std::int64_t least) {
  const auto value = arguments[name].as<std::int64_t>();
  if (value < least) {
    throw UsageError(fmt::format("--{}: expected at least {}, got {}", name, least, value));
  }
  return value;
}

Heads parse_heads(std::string_view option, std::string_view value) {
  const std::vector<std::int64_t> numbers = parse_integers(option, value, 1);
  constexpr std::int64_t most = 1 << 20;
  if (numbers.size() != 2 || numbers[1] > most || numbers[1] % numbers[0] != 0) {
    throw UsageError(
        fmt::format("--{}: expected QK_HEADS,V_HEADS with V_HEADS a multiple of QK_HEADS, got '{}'",
                    option, value));
  }
  return {static_cast<std::int32_t>(numbers[0]), static_cast<std::int32_t>(numbers[1])};
}

void add_device_option(po::options_description& options) {
  options.add_options()("device", po::value<std::string>()->value_name("DEVICE"),
                        "host, cuda or cuda:N; default: the first GPU, or the host without one");
}

Device device_from(const po::variables_map& arguments) {
  const int gpus = cuda_device_count();
  if (!has(arguments, "device")) return {gpus > 0 ? DeviceType::cuda : DeviceType::host, 0};
  const std::string& name = text(arguments, "device");
  if (name == "host") return {};
  if (name != "cuda" && !name.starts_with("cuda:")) {
    throw UsageError(fmt::format("--device: expected host, cuda or cuda:N, got '{}'", name));
  }
  if (!built_with_cuda()) {
    throw UsageError("--device: expected host, since this build has no GPU stages, got '" + name +
                     "'");
  }
  if (gpus == 0)
    throw UsageError("--device: expected host, since no GPU was found, got '" + name + "'");
  const std::int64_t index =
      name == "cuda" ? 0 : parse_integer("device", std::string_view(name).substr(5), 0);
  if (index >= gpus) {
    throw UsageError(fmt::format("--device: expected one of {} GPU{} found, got '{}'", gpus,
                                 gpus == 1 ? "" : "s", name));
  }
  return {DeviceType::cuda, static_cast<std::int32_t>(index)};
}

std::string device_name(Device device) {
  return device.index == 0 ? std::string(to_string(device.type)) : to_string(device);
}

void add_variant_option(po::options_description& options) {
  options.add_options()("variant",
                        po::value<std::vector<std::string>>()->value_name("STAGE=VARIANT"),
                        "use this variant of a stage; may be given several times");
}

VariantOverrides overrides_from(const po::variables_map& arguments) {
  VariantOverrides overrides;
  if (!has(arguments, "variant")) return overrides;
  for (const std::string& value : arguments["variant"].as<std::vector<std::string>>()) {
    const std::size_t equals = value.find('=');
    if (equals == std::string::npos) {
      throw UsageError(fmt::format("--variant: expected STAGE=VARIANT, got '{}'", value));
    }
    const std::string stage = value.substr(0, equals);
    builtin_stages().find(stage);  // refuses an unknown stage, naming those there are
    overrides[stage] = parse_variant_choice(std::string_view(value).substr(equals + 1));
  }
  return overrides;
}

void add_pipeline_option(po::options_description& options) {
  options.add_options()(
      "pipeline", po::value<std::string>()->value_name("NAME"),
      "the pipeline to run (gdnflow-info lists them); default: auto, which chooses")(
      "costs", po::value<std::string>()->value_name("FILE"),
      "what auto chooses by, as gdnflow-ablate --tune wrote it; default: the built-in figures");
}

void check_pipeline(std::string_view option, std::string_view name) {
  std::string expected;
  for (const Recipe& recipe : recipes()) {
    if (recipe.id == name) return;
    expected += fmt::format("{}{}", expected.empty() ? "" : ", ", recipe.id);
  }
  throw UsageError(fmt::format("--{}: expected one of {}, got '{}'", option, expected, name));
}

Choice choice_from(const po::variables_map& arguments, const Problem& problem,
                   const Capacity& capacity, const DeviceInfo& device) {
  const VariantOverrides overrides = overrides_from(arguments);
  if (!has(arguments, "costs")) return choose(problem, capacity, device, overrides);
  const CostTable table = read_cost_table(text(arguments, "costs"));
  return choose(problem, capacity, device, overrides, {&table, 1});
}

PipelineRequest pipeline_from(const po::variables_map& arguments, const Problem& problem,
                              const Capacity& capacity, const DeviceInfo& device) {
  const std::string name = has(arguments, "pipeline") ? text(arguments, "pipeline") : "auto";
  check_pipeline("pipeline", name);
  const VariantOverrides overrides = overrides_from(arguments);
  if (name == "auto") {
    const Choice choice = choice_from(arguments, problem, capacity, device);
    if (const Candidate* chosen = choice.chosen()) {
      return {chosen->recipe, chosen->overrides, chosen->label()};
    }
  } else if (has(arguments, "costs")) {
    throw UsageError(fmt::format("--costs: expected --pipeline auto with it, got {}", name));
  }
  return {name, overrides, name};
}

void add_problem_options(po::options_description& options) {
  options.add_options()("type", po::value<std::string>()->value_name("TYPE"),
                        "type of q, k, v and o: f32, bf16 or f16; default: f32 on the host, bf16 "
                        "on a GPU")(
      "state-type", po::value<std::string>()->default_value("f32")->value_name("TYPE"),
      "type of the states: f32, bf16 or f16")(
      "state-layout", po::value<std::string>()->default_value("kv")->value_name("LAYOUT"),
      "order of a state's dimensions: kv or vk")(
      "head-map", po::value<std::string>()->default_value("grouped")->value_name("MAP"),
      "which q/k head a value head reads: grouped (h / ratio) or interleaved (h % qk_heads)")(
      "qk-norm", po::bool_switch(), "L2-normalise q and k first")(
      "scale", po::value<float>()->default_value(0.0F, "1/sqrt(d_k)")->value_name("X"),
      "factor of q k^T")("mode",
                         po::value<std::string>()->default_value("fastest")->value_name("MODE"),
                         "fastest, or batch_invariant: a sequence has the same bits in any batch")(
      "model-v-heads", po::value<std::int64_t>()->default_value(0, "those given")->value_name("N"),
      "with batch_invariant: value heads of the whole model, of which these are a shard");
}

void apply_problem_options(const po::variables_map& arguments, Device device, Problem& problem) {
  constexpr std::array types{DType::f32, DType::bf16, DType::f16};
  constexpr std::array layouts{StateLayout::kv, StateLayout::vk};
  constexpr std::array maps{HeadMap::grouped, HeadMap::interleaved};
  problem.activation = device.type == DeviceType::host ? DType::f32 : DType::bf16;
  if (has(arguments, "type")) {
    problem.activation = parse_choice<DType>("type", text(arguments, "type"), types);
  }
  problem.state = parse_choice<DType>("state-type", text(arguments, "state-type"), types);
  problem.state_layout =
      parse_choice<StateLayout>("state-layout", text(arguments, "state-layout"), layouts);
  problem.head_map = parse_choice<HeadMap>("head-map", text(arguments, "head-map"), maps);
  constexpr std::array modes{Mode::fastest, Mode::batch_invariant};
  problem.mode = parse_choice<Mode>("mode", text(arguments, "mode"), modes);
  constexpr std::int64_t most_heads = std::numeric_limits<std::int32_t>::max();
  problem.model_v_heads =
      static_cast<std::int32_t>(std::min(count(arguments, "model-v-heads", 0), most_heads));
  problem.qk_norm = flag(arguments, "qk-norm");
  problem.scale = arguments["scale"].as<float>();
  // Zero, and what rounds to it, would stand for the default.
  if (!arguments["scale"].defaulted() && !(problem.scale > 0.0F)) {
    throw UsageError(fmt::format("--scale: expected a number above 0, got {}", problem.scale));
  }
}

}  // namespace gdnflow::apps
