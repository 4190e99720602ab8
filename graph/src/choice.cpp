#include <gdnflow/choice.hpp>

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

constexpr std::string_view own_id = "auto";
/// The options of variants that are chosen by predicted time.
constexpr std::array<std::string_view, 1> chosen_options{"value_tile"};

/// The recipes from the most to the least preferred where nothing is known of their times: the
/// higher on the ladder the better, but for the recurrence, which is the last resort.
std::vector<const Recipe*> by_preference() {
  std::vector<const Recipe*> order;
  for (const Recipe& recipe : recipes()) {
    if (recipe.id != own_id) order.insert(order.begin(), &recipe);
  }
  std::stable_partition(order.begin(), order.end(),
                        [](const Recipe* recipe) { return recipe->id != "recurrent"; });
  return order;
}

/// What a pipeline's times are known by: the kernel that recipes are named after, which an override
/// may have replaced, else the recipe.
std::string form_of(const Pipeline& pipeline) {
  const auto nodes = pipeline.nodes();
  const auto kernel = std::find_if(nodes.begin(), nodes.end(), [](const Node& node) {
    return node.stage.name == "fused_prefill" || node.stage.name == "one_pass";
  });
  if (kernel == nodes.end()) return pipeline.id();
  const std::string& id = kernel->chosen().id;
  return is_recipe(id) ? id : fmt::format("{}={}", kernel->stage.name, id);
}

/// The values to choose an option from; none where there is no choice. 0 leaves it to the variant.
std::vector<std::int64_t> values_of(const OptionSpec& spec) {
  std::vector<std::int64_t> values;
  std::copy_if(spec.allowed.begin(), spec.allowed.end(), std::back_inserter(values),
               [](std::int64_t value) { return value != 0; });
  return values.size() > 1 ? values : std::vector<std::int64_t>{};
}

std::string option_text(const Node& node, const OptionSpec& spec, std::int64_t value) {
  return fmt::format("{}:{}={}", node.stage.name, spec.name, value);
}

/// A pipeline's candidates: itself, or one a value of each option that is chosen.
std::vector<Candidate> variations(const Pipeline& pipeline, Candidate given) {
  std::vector<Candidate> all{std::move(given)};
  for (const Node& node : pipeline.nodes()) {
    for (const OptionSpec& spec : node.chosen().options) {
      if (std::find(chosen_options.begin(), chosen_options.end(), spec.name) ==
          chosen_options.end()) {
        continue;
      }
      const std::vector<std::int64_t> values = values_of(spec);
      const std::int64_t set = option_or(node.options, spec.name, 0);
      std::vector<Candidate> product;
      for (const Candidate& candidate : all) {
        for (const std::int64_t value : values) {
          if (set != 0 && value != set) continue;
          Candidate& next = product.emplace_back(candidate);
          if (!next.options.empty()) next.options += ' ';
          next.options += option_text(node, spec, value);
          // Options that the recipe has set by itself it sets again where they hold.
          VariantChoice& choice =
              next.overrides.try_emplace(node.stage.name, VariantChoice{node.chosen().id, {}})
                  .first->second;
          std::erase_if(choice.options, [&](const auto& o) { return o.first == spec.name; });
          choice.options.emplace_back(spec.name, value);
          next.support = supports(node.chosen(), {pipeline.problem(), pipeline.capacity(),
                                                  pipeline.device(), choice.options});
        }
      }
      if (!product.empty()) all = std::move(product);
    }
  }
  return all;
}

/// Whether the caller asks for sequences in one piece.
bool never_cuts(const VariantOverrides& overrides) {
  return std::any_of(overrides.begin(), overrides.end(), [](const auto& choice) {
    return option_or(choice.second.options, "segments", 1) == 0;
  });
}

/// Microseconds of the stages in front that a candidate may do without, where they are:
/// measurements are without them. On an H200 a launch, and reading and writing at two thirds of the
/// speed of memory.
double front_us(const Pipeline& pipeline) {
  constexpr double launch = 2.5;
  constexpr double bytes_per_us = 3.2e6;
  const Problem& problem = pipeline.problem();
  const auto tokens = static_cast<double>(pipeline.capacity().max_tokens);
  const auto activation = static_cast<double>(size_of(problem.activation));
  double us = 0;
  if (pipeline.node_index("qk_norm") >= 0) {
    us += launch + tokens * problem.qk_heads * problem.qk_dim * 4 * activation / bytes_per_us;
  }
  if (pipeline.node_index("gate") >= 0) {
    us += launch + tokens * problem.v_heads * (2 * activation + 8) / bytes_per_us;
  }
  return us;
}

std::string basis_of(const Problem& problem, const DeviceInfo& device, const CostTable* table) {
  if (problem.mode == Mode::batch_invariant) {
    return "none in batch_invariant mode: the first that can run is taken, whatever the capacity";
  }
  if (device.device.type == DeviceType::host) {
    return "none on the host: the first that can run is taken";
  }
  if (table == nullptr) return "no cost table: the first that can run is taken";
  return fmt::format("cost table of {}, sm_{}, {} multiprocessors; this is {}, {} of them",
                     table->gpu, table->capability, table->multiprocessors,
                     device.name == table->gpu
                         ? std::string("the same GPU")
                         : fmt::format("{}, sm_{}", device.name, device.capability),
                     device.multiprocessors);
}

std::string assumption_of(const Problem& problem, const Capacity& capacity) {
  return fmt::format(
      "{} spread evenly{}{}", to_string(capacity),
      problem.cu_seqlens ? ", since lengths are not known when a plan is made" : "",
      problem.v_dim == 128 && problem.qk_dim == 128 ? "" : "; times are those of head dim 128");
}

}  // namespace

std::string Candidate::label() const {
  return options.empty() ? recipe : fmt::format("{} {}", recipe, options);
}

const Candidate* Choice::chosen() const noexcept {
  return candidates.empty() || !candidates.front().support ? nullptr : &candidates.front();
}

Choice choose(const Problem& problem, const Capacity& capacity, const DeviceInfo& device,
              const VariantOverrides& overrides, std::span<const CostTable> tables,
              const Registry& registry) {
  validate(problem, capacity);
  const CostTable* const table =
      problem.mode == Mode::batch_invariant ? nullptr : cost_table_for(device, tables);
  Choice choice;
  choice.assumption = assumption_of(problem, capacity);
  choice.basis = basis_of(problem, device, table);
  std::set<std::string> seen;
  for (const Recipe* recipe : by_preference()) {
    Candidate given;
    given.recipe = recipe->id;
    given.overrides = overrides;
    try {
      const Pipeline pipeline =
          make_pipeline(recipe->id, problem, capacity, device, overrides, registry);
      const std::string form = form_of(pipeline);
      // An override can make several recipes the same.
      if ((form != recipe->id && is_recipe(form)) || !seen.insert(form).second) {
        given.support =
            Support::no(fmt::format("with the variants asked for the same as {}", form));
        choice.candidates.push_back(std::move(given));
        continue;
      }
      for (Candidate& candidate : variations(pipeline, std::move(given))) {
        const CostForm* const costs =
            table == nullptr ? nullptr : table->find(form, candidate.options);
        if (costs != nullptr && candidate.support) {
          CostForm form_costs = *costs;
          if (never_cuts(candidate.overrides)) {
            // Measurements are of what cuts; the sum of terms is left.
            form_costs.cut = form_costs.shares = false;
            form_costs.points.clear();
          }
          candidate.predicted_us = predicted_us(*table, form_costs, problem, capacity, device);
          if (problem.qk_norm || !problem.has_ready_gates()) {
            *candidate.predicted_us += front_us(make_pipeline(recipe->id, problem, capacity, device,
                                                              candidate.overrides, registry));
          }
          candidate.bound = capacity.max_tokens < costs->least_tokens * capacity.max_sequences;
        }
        choice.candidates.push_back(std::move(candidate));
      }
    } catch (const Error& error) {
      given.support = Support::no(error.what());
      choice.candidates.push_back(std::move(given));
    }
  }
  const auto rank = [](const Candidate& c) { return !c.support ? 2 : c.predicted_us ? 0 : 1; };
  std::stable_sort(choice.candidates.begin(), choice.candidates.end(),
                   [&](const Candidate& a, const Candidate& b) {
                     if (rank(a) != rank(b)) return rank(a) < rank(b);
                     return rank(a) == 0 && *a.predicted_us < *b.predicted_us;
                   });
  return choice;
}

std::string to_string(const Choice& choice) {
  const Candidate* const chosen = choice.chosen();
  std::string text = fmt::format("auto: {}\n  assumed: {}\n  times: {}\n",
                                 chosen == nullptr ? "nothing can run" : chosen->label(),
                                 choice.assumption, choice.basis);
  std::size_t width = 0;
  for (const Candidate& candidate : choice.candidates) {
    width = std::max(width, candidate.label().size());
  }
  for (const Candidate& candidate : choice.candidates) {
    std::string why;
    if (&candidate == chosen) {
      why = "chosen";
    } else if (!candidate.support) {
      why = "refused: " + candidate.support.reason;
    } else if (candidate.predicted_us) {
      const double shortest = std::max(*chosen->predicted_us, 1e-3);
      why = fmt::format("{:.2f} times as long", *candidate.predicted_us / shortest);
    } else {
      why = chosen->predicted_us ? "no measured times: behind those with them"
                                 : "behind in the order of preference";
    }
    const std::string time = candidate.predicted_us
                                 ? fmt::format("{}{:.4f} ms", candidate.bound ? "<= " : "",
                                               *candidate.predicted_us / 1e3)
                                 : "-";
    text += fmt::format("  {:<{}}  {:>13}  {}\n", candidate.label(), width, time, why);
  }
  return text;
}

}  // namespace gdnflow
