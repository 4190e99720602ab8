#include <gdnflow/choice.hpp>
#include <gdnflow/recipes.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

/// A stage of a recipe and the variant it takes; "" leaves the choice to the stage's list.
struct Use {
  std::string_view stage;
  std::string_view variant = "";
  bool on_gpu_only =
      false;  ///< elsewhere the stage's list chooses; else the recipe is refused there
  bool where_supported = false;  ///< left out where no variant serves the problem, or none uses it
};

/// Stages in front that variants of others do without, by an option of the stage's name.
constexpr std::array<std::string_view, 2> fusible{"gate", "qk_norm"};

/// What the stage `gate` reads.
constexpr std::array<std::string_view, 4> raw_gates{"a", "a_log", "dt_bias", "b"};

/// The kernel that cuts sequences as the stage `segments` says.
constexpr std::string_view cutting_variant = "register-state";

/// Composes a recipe's pipeline: declares the external tensors that a problem asks for, renames
/// what the optional stages in front produce, and passes variants on.
class Composer {
 public:
  Composer(const Recipe& recipe, const Registry& registry, const Problem& problem,
           const Capacity& capacity, const DeviceInfo& device, const VariantOverrides& overrides)
      : builder_(std::string(recipe.id), registry, problem, capacity, device),
        registry_(registry),
        problem_(problem),
        capacity_(capacity),
        device_(device),
        overrides_(overrides),
        on_gpu_(device.device.type == DeviceType::cuda) {
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

  /// The stages that turn what the caller hands over into what the others read: `core`, unless one
  /// of those does so itself.
  void add_front(std::span<const Use> core) {
    for (const std::string_view stage : fusible) {
      const auto does = [&](const Use& use) { return fuses(use, stage); };
      if (is_needed(stage) && std::none_of(core.begin(), core.end(), does)) add_fusible(stage);
    }
  }

  void add(const Use& recipe, StageUse use = {}) {
    const std::string_view stage = recipe.stage;
    if (recipe.where_supported && !(is_supported(stage) && segments_are_used())) return;
    use.variant = variant_of(recipe);
    for (const std::string_view option : fusible) {
      if (fuses(recipe, option) && !has_option(*use.variant, option)) {
        use.variant->options.emplace_back(option, 1);
      }
    }
    if (registry_.contains(stage)) {
      const Stage& definition = registry_.find(stage);
      const auto connect = [&](std::string_view port, const std::string& edge) {
        if (definition.port_index(port) >= 0) use.connect[std::string(port)] = edge;
      };
      for (const auto& [port, edge] : names_) connect(port, edge);
      if (stage != "gate" && !fuses(recipe, "gate")) {
        for (const std::string_view port : raw_gates) connect(port, "");
      }
    }
    builder_.add(stage, std::move(use));
  }

  /// The variant that is asked for; none where the stage's list chooses.
  std::optional<VariantChoice> variant_of(const Use& use) const {
    if (const auto found = overrides_.find(use.stage); found != overrides_.end()) {
      return found->second;
    }
    if (use.variant.empty() || (!on_gpu_ && use.on_gpu_only)) return std::nullopt;
    return VariantChoice{std::string(use.variant), {}};
  }

  static bool has_option(const VariantChoice& choice, std::string_view name) {
    return std::any_of(choice.options.begin(), choice.options.end(),
                       [&](const auto& option) { return option.first == name; });
  }

  bool is_needed(std::string_view stage) const {
    if (stage == "qk_norm") return problem_.qk_norm;
    return !problem_.has_ready_gates();
  }

  /// Whether a stage's variant does what the stage `fused` in front does: as it is asked to, or
  /// else where it can and nobody asks for that stage.
  bool fuses(const Use& use, std::string_view fused) const {
    std::optional<VariantChoice> choice = variant_of(use);
    if (!is_needed(fused) || !choice || !registry_.contains(use.stage)) return false;
    const Variant* const variant = registry_.find(use.stage).find(choice->id, device_.device.type);
    if (variant == nullptr) return false;
    const std::vector<OptionSpec>& known = variant->options;
    if (std::none_of(known.begin(), known.end(),
                     [&](const OptionSpec& spec) { return spec.name == fused; })) {
      return false;
    }
    if (has_option(*choice, fused)) return option_or(choice->options, fused, 0) != 0;
    if (overrides_.find(fused) != overrides_.end()) return false;
    choice->options.emplace_back(fused, 1);
    return supports(*variant, {problem_, capacity_, device_, choice->options}).ok;
  }

  /// Whether the kernel that overrides leave in place cuts sequences.
  bool segments_are_used() const {
    if (problem_.mode == Mode::batch_invariant) return false;
    const auto found = overrides_.find("fused_prefill");
    return found == overrides_.end() || (found->second.id == cutting_variant &&
                                         option_or(found->second.options, "segments", 1) != 0);
  }

  bool is_supported(std::string_view stage) const {
    const std::vector<Variant>& variants = registry_.find(stage).variants;
    return std::any_of(variants.begin(), variants.end(), [&](const Variant& variant) {
      return supports(variant, {problem_, capacity_, device_, {}}).ok;
    });
  }

  Pipeline finish() {
    if (problem_.zero_padding) add({"zero_padding"}, {.optional = true});
    return builder_.build();
  }

 private:
  void add_fusible(std::string_view stage) {
    add({stage});
    if (stage == "gate") {
      names_["g"] = "g_ready";
      names_["beta"] = "beta_ready";
    } else {
      names_["q"] = "q_normalized";
      names_["k"] = "k_normalized";
    }
  }

  PipelineBuilder builder_;
  const Registry& registry_;
  const Problem& problem_;
  const Capacity& capacity_;
  const DeviceInfo& device_;
  const VariantOverrides& overrides_;
  bool on_gpu_;
  std::map<std::string, std::string> names_;
};

/// The pipelines of the ladder differ in their core stages and, for the plainest, in how what
/// stands in front is made.
template <const auto& front, const auto& core>
Pipeline chunked(const Recipe& recipe, const Registry& registry, const Problem& problem,
                 const Capacity& capacity, const DeviceInfo& device,
                 const VariantOverrides& overrides) {
  Composer composer(recipe, registry, problem, capacity, device, overrides);
  composer.add({"chunk_index"});
  composer.add_front(core);
  for (const Use& use : front) composer.add(use);
  for (const Use& use : core) composer.add(use, {.core = true});
  return composer.finish();
}

/// One stage, which reads the lengths by itself.
template <const auto& core>
Pipeline in_one(const Recipe& recipe, const Registry& registry, const Problem& problem,
                const Capacity& capacity, const DeviceInfo& device,
                const VariantOverrides& overrides) {
  Composer composer(recipe, registry, problem, capacity, device, overrides);
  composer.add_front(core);
  for (const Use& use : core) composer.add(use);
  return composer.finish();
}

/// Whichever of the others `choose` takes, under the name of this one.
Pipeline automatic(const Recipe& recipe, const Registry& registry, const Problem& problem,
                   const Capacity& capacity, const DeviceInfo& device,
                   const VariantOverrides& overrides);

constexpr std::array<Use, 2> plain_front{
    {{"chunk_cumsum", "naive", true}, {"kkt_solve", "naive", true}}};
constexpr std::array<Use, 2> best_front{{{"chunk_cumsum"}, {"kkt_solve"}}};
constexpr std::array<Use, 3> naive_core{
    {{"wu", "naive", true}, {"chunk_state", "naive", true}, {"chunk_output", "naive", true}}};
constexpr std::array<Use, 2> residual_core{{{"residual_state"}, {"chunk_output"}}};
constexpr std::array<Use, 1> fused_host{{{"fused_prefill", "host"}}};
constexpr std::array<Use, 1> fused_64{{{"fused_prefill", "fused-64"}}};
constexpr std::array<Use, 1> fused_128{{{"fused_prefill", "fused-128"}}};
constexpr std::array<Use, 1> fused_128x512{{{"fused_prefill", "fused-128x512"}}};
constexpr std::array<Use, 1> warp_specialized{{{"fused_prefill", "warp-specialized"}}};
constexpr std::array<Use, 2> register_state{
    {{"segments", "", false, true}, {"fused_prefill", cutting_variant}}};

constexpr std::array<Use, 1> one_pass{{{"one_pass", "one-pass"}}};
constexpr std::array<Use, 1> recurrent{{{"one_pass", "recurrent", true}}};

constexpr std::array<Recipe, 11> ladder{{
    {"naive", "one kernel a formula: W and U are formed, then states, then outputs",
     chunked<plain_front, naive_core>},
    {"residual", "the residual form: W and U are never formed, one matrix product less",
     chunked<best_front, residual_core>},
    {"fused", "states and outputs in one walk, on the host", chunked<best_front, fused_host>},
    {"fused-64", "states and outputs in one kernel: no state of a chunk goes through memory",
     chunked<best_front, fused_64>},
    {"fused-128", "one block a head, the next chunk's tiles loaded ahead",
     chunked<best_front, fused_128>},
    {"fused-128x512", "state and output by different warps of a block of 512 threads",
     chunked<best_front, fused_128x512>},
    {"warp-specialized", "TMA producer, state, value and output warp groups on WGMMA",
     chunked<best_front, warp_specialized>},
    {"register-state", "the recurrence transposed, in registers from product to product",
     chunked<best_front, register_state>},
    {"one-pass", "everything from the gates on, in one walk over the chunks", in_one<one_pass>},
    {"recurrent", "token by token, without chunks: for a handful of tokens, and as a check",
     in_one<recurrent>},
    {"auto", "the one of the others that a model of measured times expects to be done first",
     automatic},
}};

const Recipe& find_recipe(std::string_view id) {
  if (id.empty()) id = "auto";
  const auto found = std::find_if(ladder.begin(), ladder.end(),
                                  [&](const Recipe& recipe) { return recipe.id == id; });
  if (found != ladder.end()) return *found;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("recipe: expected one of [{}], got '{}'", recipe_ids(), id));
}

Pipeline automatic(const Recipe& recipe, const Registry& registry, const Problem& problem,
                   const Capacity& capacity, const DeviceInfo& device,
                   const VariantOverrides& overrides) {
  const Choice choice =
      choose(problem, capacity, device, overrides, builtin_cost_tables(), registry);
  const Candidate* const chosen = choice.chosen();
  // Where all are refused, the most widely supported one says why.
  const Recipe& taken = find_recipe(chosen == nullptr ? "residual" : chosen->recipe);
  return taken.make({recipe.id, recipe.description, nullptr}, registry, problem, capacity, device,
                    chosen == nullptr ? overrides : chosen->overrides);
}

}  // namespace

std::span<const Recipe> recipes() { return ladder; }

bool is_recipe(std::string_view id) noexcept {
  return std::any_of(ladder.begin(), ladder.end(),
                     [&](const Recipe& recipe) { return recipe.id == id; });
}

std::string recipe_ids() {
  std::vector<std::string_view> ids;
  for (const Recipe& recipe : ladder) ids.push_back(recipe.id);
  return fmt::format("{}", fmt::join(ids, ", "));
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
