// gdnflow-info: the machine, the pipelines and variants with what they refuse, and the plan.

#include <gdnflow/gdnflow.hpp>
#include <gdnflow/version.hpp>

#include "common/arguments.hpp"
#include "common/cases.hpp"
#include "common/multiprocessor_limit.hpp"
#include "common/output.hpp"
#include "common/program.hpp"
#include "common/table.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gdnflow::apps {
namespace {

using Json = nlohmann::ordered_json;

void describe(po::options_description& options) {
  add_device_option(options);
  add_limit_option(options);
  add_pipeline_option(options);
  add_variant_option(options);
  options.add_options()("heads",
                        po::value<std::string>()->default_value("16,32")->value_name("QK,V"),
                        "query/key heads and value heads")(
      "head-dim", po::value<std::string>()->default_value("128")->value_name("D"),
      "head dim, or DK,DV")("tokens",
                            po::value<std::int64_t>()->default_value(8192)->value_name("N"),
                            "most tokens together")(
      "sequences", po::value<std::int64_t>()->default_value(1)->value_name("N"), "most sequences");
  add_problem_options(options);
  options.add_options()("index", po::value<std::string>()->default_value("i32")->value_name("TYPE"),
                        "type of cu_seqlens: i32 or i64")(
      "dense", po::bool_switch(), "sequences of one length, without cu_seqlens")(
      "gate", po::value<std::string>()->default_value("log_decay")->value_name("FORM"),
      "what g holds: log_decay, alpha or raw")(
      "beta", po::value<std::string>()->default_value("ready")->value_name("FORM"),
      "what beta holds: ready or logit")("prefix-lens", po::bool_switch(),
                                         "sequences continue a prefix")(
      "initial-state", po::bool_switch(), "sequences start from given states")(
      "no-final-state", po::bool_switch(), "final states are not wanted")(
      "state-indices", po::bool_switch(), "states are rows of a pool")(
      "output-state-indices", po::bool_switch(), "final states go to other rows of a pool")(
      "has-initial-state", po::bool_switch(), "a flag a sequence says whether it has a state")(
      "checkpoints", po::value<std::int64_t>()->default_value(0)->value_name("N"),
      "checkpoint the state every N tokens, a multiple of 64; 0: never")(
      "checkpoint-indices", po::bool_switch(), "checkpoints go to rows of a pool")(
      "zero-padding", po::bool_switch(), "zero the rows of o that no sequence owns")(
      "explain", po::bool_switch(),
      "print only what auto weighs for the problem: predicted times, refusals and the choice")(
      "dot", po::value<std::string>()->implicit_value("pipeline")->value_name("WHAT"),
      "print only the pipeline (or with plan its plan and arena) as Graphviz")(
      "json", po::value<std::string>()->implicit_value("-", "stdout")->value_name("FILE"),
      "print everything as JSON, or write it to a file");
}

Problem problem_from(const po::variables_map& arguments, Device device) {
  constexpr std::array indices{DType::i32, DType::i64};
  constexpr std::array gates{GateForm::log_decay, GateForm::alpha, GateForm::raw};
  constexpr std::array betas{BetaForm::ready, BetaForm::logit};
  Problem p;
  const Heads heads = parse_heads("heads", text(arguments, "heads"));
  p.qk_heads = heads.qk;
  p.v_heads = heads.v;
  const std::vector<std::int64_t> dims = parse_integers("head-dim", text(arguments, "head-dim"), 1);
  constexpr std::int64_t most_dim = 1 << 20;
  if (dims.size() > 2 || *std::max_element(dims.begin(), dims.end()) > most_dim) {
    throw UsageError(
        fmt::format("--head-dim: expected D or DK,DV, got '{}'", text(arguments, "head-dim")));
  }
  p.qk_dim = static_cast<std::int32_t>(dims.front());
  p.v_dim = static_cast<std::int32_t>(dims.back());
  apply_problem_options(arguments, device, p);
  p.index = parse_choice<DType>("index", text(arguments, "index"), indices);
  p.cu_seqlens = !flag(arguments, "dense");
  p.gate = parse_choice<GateForm>("gate", text(arguments, "gate"), gates);
  p.beta = parse_choice<BetaForm>("beta", text(arguments, "beta"), betas);
  p.prefix_lens = flag(arguments, "prefix-lens");
  p.initial_state = flag(arguments, "initial-state");
  p.final_state = !flag(arguments, "no-final-state");
  p.state_indices = flag(arguments, "state-indices");
  p.output_state_indices = flag(arguments, "output-state-indices");
  p.has_initial_state = flag(arguments, "has-initial-state");
  const std::int64_t interval = count(arguments, "checkpoints", 0);
  constexpr std::int64_t most_interval = 1 << 30;
  if (interval > most_interval) {
    throw UsageError(
        fmt::format("--checkpoints: expected at most {}, got {}", most_interval, interval));
  }
  p.checkpoint_interval = static_cast<std::int32_t>(interval);
  p.checkpoint_state_indices = flag(arguments, "checkpoint-indices");
  p.zero_padding = flag(arguments, "zero-padding");
  return p;
}

/// What the command line asks about.
struct Question {
  Device device{};
  std::string limit;  ///< of the multiprocessors, in words; empty: none
  DeviceInfo info;
  Problem problem;
  Capacity capacity;
  PipelineRequest pipeline;
  VariantOverrides overrides;
  Choice choice;

  Support can_run(std::string_view recipe) const {
    return can_make_pipeline(recipe, problem, capacity, info, overrides);
  }
  Support can_run(const PipelineRequest& request) const {
    return can_make_pipeline(request.recipe, problem, capacity, info, request.overrides);
  }
  Plan plan() const {
    return Plan(make_pipeline(pipeline.recipe, problem, capacity, info, pipeline.overrides));
  }
};

std::vector<DeviceInfo> machine() {
  std::vector<DeviceInfo> devices{device_info({})};
  for (int i = 0; i < cuda_device_count(); ++i) {
    devices.push_back(device_info({DeviceType::cuda, i}));
  }
  return devices;
}

// Variants for the other kind of device are no answer to the question, so they are left out.
template <class F>
void for_each_variant(const Question& question, F&& f) {
  const Options options;
  for (const Stage& stage : builtin_stages().stages()) {
    for (const Variant& variant : stage.variants) {
      if (variant.target != question.device.type) continue;
      f(stage, variant,
        supports(variant, {question.problem, question.capacity, question.info, options}));
    }
  }
}

Json to_json(const Support& support) { return support.ok ? Json(nullptr) : Json(support.reason); }

Json device_json(const DeviceInfo& info) {
  return {{"device", device_name(info.device)},
          {"name", info.name},
          {"capability", info.capability},
          {"multiprocessors", info.multiprocessors},
          {"shared_bytes_per_block", info.shared_bytes_per_block},
          {"l2_bytes", info.l2_bytes},
          {"memory_bytes", info.memory_bytes},
          {"driver_version", info.driver_version},
          {"runtime_version", info.runtime_version}};
}

Json plan_json(const Plan& plan) {
  Json nodes = Json::array();
  for (const int index : plan.pipeline().order()) {
    const Node& node = plan.pipeline().nodes()[static_cast<std::size_t>(index)];
    nodes.push_back({{"node", node.name},
                     {"stage", node.stage.name},
                     {"variant", to_string(VariantChoice{node.chosen().id, node.options})},
                     {"core", node.core}});
  }
  Json placements = Json::array();
  for (const Placement& placement : plan.placements()) {
    placements.push_back(
        {{"name", placement.name}, {"offset", placement.offset}, {"bytes", placement.bytes}});
  }
  return {{"pipeline", plan.pipeline().id()},
          {"nodes", nodes},
          {"arena_bytes", plan.arena_bytes()},
          {"unshared_bytes", plan.unshared_bytes()},
          {"placements", placements}};
}

Json choice_json(const Choice& choice) {
  Json candidates = Json::array();
  for (const Candidate& candidate : choice.candidates) {
    candidates.push_back(
        {{"pipeline", candidate.recipe},
         {"options", candidate.options},
         {"runs", candidate.support.ok},
         {"refusal", to_json(candidate.support)},
         {"predicted_ms", candidate.predicted_us ? Json(*candidate.predicted_us / 1e3) : Json()},
         {"upper_bound", candidate.bound}});
  }
  const Candidate* const chosen = choice.chosen();
  return {{"chosen", chosen == nullptr ? Json() : Json(chosen->label())},
          {"assumption", choice.assumption},
          {"basis", choice.basis},
          {"candidates", candidates}};
}

Json everything(const Question& question, const std::optional<Plan>& plan) {
  Json devices = Json::array();
  for (const DeviceInfo& info : machine()) devices.push_back(device_json(info));
  Json pipelines = Json::array();
  for (const Recipe& recipe : recipes()) {
    const Support support = question.can_run(recipe.id);
    pipelines.push_back({{"id", recipe.id},
                         {"description", recipe.description},
                         {"runs", support.ok},
                         {"refusal", to_json(support)}});
  }
  Json stages = Json::array();
  for (const Stage& stage : builtin_stages().stages()) {
    stages.push_back(
        {{"name", stage.name}, {"description", stage.description}, {"variants", Json::array()}});
  }
  for_each_variant(
      question, [&](const Stage& stage, const Variant& variant, const Support& support) {
        Json options = Json::array();
        for (const OptionSpec& option : variant.options) {
          options.push_back({{"name", option.name},
                             {"description", option.description},
                             {"default", option.default_value},
                             {"allowed", option.allowed}});
        }
        const auto entry = std::find_if(stages.begin(), stages.end(), [&](const Json& candidate) {
          return candidate["name"] == stage.name;
        });
        (*entry)["variants"].push_back({{"id", variant.id},
                                        {"description", variant.description},
                                        {"runs", support.ok},
                                        {"refusal", to_json(support)},
                                        {"options", options}});
      });
  Json models = Json::array();
  for (const ModelHeads& model : model_heads()) {
    models.push_back({{"model", model.model},
                      {"tensor_parallel", model.tensor_parallel},
                      {"qk_heads", model.qk_heads},
                      {"v_heads", model.v_heads}});
  }
  return {{"version", version()},
          {"cuda_build", built_with_cuda()},
          {"devices", devices},
          {"device", device_name(question.device)},
          {"limit", question.limit},
          {"problem", to_string(question.problem)},
          {"capacity", to_string(question.capacity)},
          {"pipelines", pipelines},
          {"stages", stages},
          {"auto", choice_json(question.choice)},
          {"plan", plan ? plan_json(*plan) : Json(nullptr)},
          {"models", models}};
}

std::string verdict(const Support& support) {
  return support.ok ? "runs" : "refuses: " + support.reason;
}

void print_options(const Question& question) {
  Table options({"variant", "option", "default", "allowed", "description"}, 5);
  bool any = false;
  for_each_variant(question, [&](const Stage& stage, const Variant& variant, const Support&) {
    for (const OptionSpec& option : variant.options) {
      any = true;
      options.add({fmt::format("{}={}", stage.name, variant.id), option.name,
                   fmt::to_string(option.default_value),
                   fmt::to_string(fmt::join(option.allowed, ",")), option.description});
    }
  });
  if (any) fmt::print("Options of variants\n{}\n", options.str());
}

void print_everything(const Question& question, const std::optional<Plan>& plan) {
  fmt::print("gdnflow {}, {}\n\nMachine\n", version(),
             built_with_cuda() ? "with GPU stages" : "host only");
  for (const DeviceInfo& info : machine()) {
    fmt::print("  {}: {}\n", device_name(info.device), to_string(info));
  }
  if (!question.limit.empty()) {
    fmt::print("  {}: {}\n", device_name(question.device), question.limit);
  }
  fmt::print("\nProblem on {}\n  {}; at most {}\n\nPipelines\n", device_name(question.device),
             to_string(question.problem), to_string(question.capacity));
  Table pipelines({"pipeline", "idea", "for this problem"}, 3);
  for (const Recipe& recipe : recipes()) {
    pipelines.add({std::string(recipe.id), std::string(recipe.description),
                   verdict(question.can_run(recipe.id))});
  }
  fmt::print("{}\nStages and their variants on {}\n", pipelines.str(),
             to_string(question.device.type));
  Table stages({"stage", "variant", "description", "for this problem"}, 4);
  for_each_variant(question,
                   [&](const Stage& stage, const Variant& variant, const Support& support) {
                     stages.add({stage.name, variant.id, variant.description, verdict(support)});
                   });
  fmt::print("{}\n", stages.str());
  print_options(question);
  if (plan) {
    fmt::print("Plan\n{}\n", to_string(*plan));
  } else {
    fmt::print("No plan: {} cannot run this problem.\n", question.pipeline.label);
  }
}

int run(const po::variables_map& arguments) {
  check_files_apart(arguments, {"costs"}, {"json"});
  Question question;
  question.device = device_from(arguments);
  const std::unique_ptr<MultiprocessorLimit> limit = limited_device(arguments, question.device);
  if (limit) question.limit = limit->text();
  question.info = device_info(question.device);
  question.problem = problem_from(arguments, question.device);
  question.capacity = {count(arguments, "tokens", 0), count(arguments, "sequences", 1)};
  validate(question.problem, question.capacity);
  question.overrides = overrides_from(arguments);
  question.pipeline = pipeline_from(arguments, question.problem, question.capacity, question.info);
  question.choice = choice_from(arguments, question.problem, question.capacity, question.info);
  const std::optional<OutputTarget> json = json_target_from(arguments);

  if (has(arguments, "dot")) {
    if (flag(arguments, "explain")) {
      throw UsageError("--dot, --explain: expected one of them, got both");
    }
    const std::string& what = text(arguments, "dot");
    if (what != "plan" && what != "pipeline") {
      throw UsageError(fmt::format("--dot: expected nothing, pipeline or plan, got '{}'", what));
    }
    const Plan plan = question.plan();
    fmt::print("{}", what == "plan" ? to_dot(plan) : to_dot(plan.pipeline()));
    return exit_success;
  }
  if (flag(arguments, "explain")) {
    if (json) {
      json->write(choice_json(question.choice).dump(2));
    } else {
      fmt::print("{}", to_string(question.choice));
    }
    return exit_success;
  }
  std::optional<Plan> plan;
  if (question.can_run(question.pipeline)) plan = question.plan();
  if (json) {
    json->write(everything(question, plan).dump(2));
  } else {
    print_everything(question, plan);
  }
  return exit_success;
}

}  // namespace
}  // namespace gdnflow::apps

int main(int argc, char** argv) {
  using namespace gdnflow::apps;
  return run_program(
      {"gdnflow-info",
       "Shows the machine, the pipelines and the stages' variants with the reason why one cannot\n"
       "run a problem, and the plan of a pipeline.",
       "  gdnflow-info\n"
       "  gdnflow-info --heads 2,8 --tokens 32768 --initial-state --state-layout vk\n"
       "  gdnflow-info --explain --heads 16,64 --tokens 8192 --sequences 4\n"
       "  gdnflow-info --pipeline residual --dot | dot -Tsvg > residual.svg",
       describe, run},
      argc, argv);
}
