#include <gdnflow/recipes.hpp>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

/// Composes a recipe's pipeline: declares the external tensors that a problem asks for, renames
/// what the optional stages in front produce, and passes variants on.
class Composer {
 public:
  Composer(const Recipe& recipe, const Registry& registry, const Problem& problem,
           const Capacity& capacity, const DeviceInfo& device, const VariantOverrides& overrides)
      : builder_(std::string(recipe.id), registry, problem, capacity, device),
        registry_(registry),
        problem_(problem),
        overrides_(overrides) {
    const bool raw = problem.gate == GateForm::raw;
    const bool logit = problem.beta == BetaForm::logit;
    std::vector<std::string> inputs{"q", "k", "v"};
    const auto input = [&](bool present, std::string name) {
      if (present) inputs.push_back(std::move(name));
    };
    input(!raw, "g");
    input(raw, "a");
    input(raw, "a_log");
    input(raw, "dt_bias");
    input(!logit, "beta");
    input(logit, "b");
    input(problem.cu_seqlens, "cu_seqlens");
    input(problem.prefix_lens, "prefix_lens");
    input(problem.initial_state, "initial_state");
    input(problem.state_indices, "state_indices");
    input(problem.output_state_indices, "output_state_indices");
    input(problem.has_initial_state, "has_initial_state");
    input(problem.checkpoint_state_indices, "checkpoint_state_indices");
    builder_.inputs(std::move(inputs));
    std::vector<std::string> outputs{"o"};
    if (problem.final_state) outputs.emplace_back("final_state");
    if (problem.checkpoint_interval > 0) outputs.emplace_back("checkpoints");
    builder_.outputs(std::move(outputs));
  }

  /// The stages that turn what the caller hands over into what the others read.
  void add_front() {
    if (problem_.gate != GateForm::log_decay || problem_.beta != BetaForm::ready) {
      add("gate");
      names_["g"] = "g_ready";
      names_["beta"] = "beta_ready";
    }
    if (problem_.qk_norm) {
      add("qk_norm");
      names_["q"] = "q_normalized";
      names_["k"] = "k_normalized";
    }
  }

  void add(std::string_view stage, bool core = false, bool optional = false) {
    StageUse use;
    use.core = core;
    use.optional = optional;
    if (const auto found = overrides_.find(stage); found != overrides_.end()) {
      use.variant = found->second;
    }
    if (registry_.contains(stage)) {
      const Stage& definition = registry_.find(stage);
      for (const auto& [port, edge] : names_) {
        if (definition.port_index(port) >= 0) use.connect[port] = edge;
      }
    }
    builder_.add(stage, std::move(use));
  }

  Pipeline finish() {
    if (problem_.zero_padding) add("zero_padding", false, true);
    return builder_.build();
  }

 private:
  PipelineBuilder builder_;
  const Registry& registry_;
  const Problem& problem_;
  const VariantOverrides& overrides_;
  std::map<std::string, std::string> names_;
};

/// The pipelines of the ladder differ in their core stages; what stands in front is the same.
template <const auto& core_stages>
Pipeline chunked(const Recipe& recipe, const Registry& registry, const Problem& problem,
                 const Capacity& capacity, const DeviceInfo& device,
                 const VariantOverrides& overrides) {
  Composer composer(recipe, registry, problem, capacity, device, overrides);
  composer.add("chunk_index");
  composer.add_front();
  composer.add("chunk_cumsum");
  composer.add("kkt_solve");
  for (const std::string_view stage : core_stages) composer.add(stage, true);
  return composer.finish();
}

/// Without chunks; reads the lengths by itself.
Pipeline token_by_token(const Recipe& recipe, const Registry& registry, const Problem& problem,
                        const Capacity& capacity, const DeviceInfo& device,
                        const VariantOverrides& overrides) {
  Composer composer(recipe, registry, problem, capacity, device, overrides);
  composer.add_front();
  composer.add("one_pass");
  return composer.finish();
}

constexpr std::array<std::string_view, 3> naive_core{"wu", "chunk_state", "chunk_output"};
constexpr std::array<std::string_view, 2> residual_core{"residual_state", "chunk_output"};
constexpr std::array<std::string_view, 1> fused_core{"fused_prefill"};

constexpr std::array<Recipe, 4> ladder{{
    {"naive", "one kernel a formula: W and U are formed, then states, then outputs",
     chunked<naive_core>},
    {"residual", "the residual form: W and U are never formed, one matrix product less",
     chunked<residual_core>},
    {"fused", "states and outputs in one stage: no state of a chunk goes through memory",
     chunked<fused_core>},
    {"recurrent", "token by token, without chunks: for a handful of tokens, and as a check",
     token_by_token},
}};

const Recipe& find_recipe(std::string_view id) {
  std::vector<std::string_view> known;
  for (const Recipe& recipe : ladder) {
    if (recipe.id == id) return recipe;
    known.push_back(recipe.id);
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("recipe: expected one of [{}], got '{}'", fmt::join(known, ", "), id));
}

}  // namespace

std::span<const Recipe> recipes() { return ladder; }

std::string_view default_recipe(const Problem& problem, const Capacity& capacity,
                                const DeviceInfo& device) {
  // The later on the ladder the better, but for the recurrence, which is the last resort.
  constexpr std::array<std::string_view, 4> preferred{"fused", "residual", "naive", "recurrent"};
  for (const std::string_view id : preferred) {
    if (can_make_pipeline(id, problem, capacity, device)) return id;
  }
  return "residual";  // refused as well, and then `make_pipeline` says why
}

Pipeline make_pipeline(std::string_view id, const Problem& problem, const Capacity& capacity,
                       const DeviceInfo& device, const VariantOverrides& overrides,
                       const Registry& registry) {
  const Recipe& recipe = find_recipe(id);
  Pipeline pipeline = recipe.make(recipe, registry, problem, capacity, device, overrides);
  for (const auto& [stage, choice] : overrides) {
    const auto uses = [&stage = stage](const Node& node) { return node.stage.name == stage; };
    if (std::any_of(pipeline.nodes().begin(), pipeline.nodes().end(), uses)) continue;
    std::vector<std::string_view> known;
    for (const Node& node : pipeline.nodes()) known.push_back(node.stage.name);
    throw Error(ErrorCode::invalid_argument,
                fmt::format("recipe {}: variant {}: expected a stage among [{}], got '{}'", id,
                            to_string(choice), fmt::join(known, ", "), stage));
  }
  return pipeline;
}

Support can_make_pipeline(std::string_view recipe, const Problem& problem, const Capacity& capacity,
                          const DeviceInfo& device, const VariantOverrides& overrides,
                          const Registry& registry) {
  try {
    (void)make_pipeline(recipe, problem, capacity, device, overrides, registry);
    return Support::yes();
  } catch (const Error& error) {
    return Support::no(error.what());
  }
}

}  // namespace gdnflow
