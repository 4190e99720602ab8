#include "common/variations.hpp"

#include <gdnflow/stages.hpp>

#include "common/arguments.hpp"
#include "common/csv.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

const OptionSpec* find_option(const Variant& variant, std::string_view name) {
  const auto found = std::find_if(variant.options.begin(), variant.options.end(),
                                  [&](const OptionSpec& spec) { return spec.name == name; });
  return found == variant.options.end() ? nullptr : &*found;
}

/// The value of an option that a node has as given; nothing where its variant has no such option.
std::optional<std::int64_t> value_in(const Node& node, std::string_view option) {
  const OptionSpec* spec = find_option(node.chosen(), option);
  if (spec == nullptr) return std::nullopt;
  return option_or(node.options, option, spec->default_value);
}

/// Sets an option of a node's stage, on top of what the variation has already set there.
void set_option(Variation& variation, const Node& node, const std::string& option,
                std::int64_t value) {
  const auto choice =
      variation.overrides
          .try_emplace(node.stage.name, VariantChoice{node.chosen().id, node.options})
          .first;
  Options& options = choice->second.options;
  const auto found = std::find_if(options.begin(), options.end(),
                                  [&](const auto& entry) { return entry.first == option; });
  if (found == options.end()) {
    options.emplace_back(option, value);
  } else {
    found->second = value;
  }
  variation.options += fmt::format("{}{}:{}={}", variation.options.empty() ? "" : " ",
                                   node.stage.name, option, value);
  variation.as_given = variation.as_given && value_in(node, option) == value;
}

}  // namespace

std::string variation_label(std::string_view pipeline, std::string_view options) {
  return fmt::format("{}{}{}", pipeline, options.empty() ? "" : " ", options);
}

void add_sweep_options(po::options_description& options) {
  options.add_options()(
      "sweep", po::value<std::vector<std::string>>()->value_name("STAGE[=VARIANT]:OPTION=V,V,..."),
      "run each pipeline that has this variant of the stage (without VARIANT: one with the option) "
      "once a value, the others once; may be given several times: every combination")(
      "options", po::bool_switch(),
      "run each pipeline as it is and once for every other value of every option of its variants, "
      "with the ratio to the pipeline as it is");
}

Sweeps::Sweeps(const po::variables_map& arguments) : each_option_(flag(arguments, "options")) {
  if (!has(arguments, "sweep")) return;
  if (each_option_) throw UsageError("--options: expected without --sweep, got both");
  for (const std::string& text : arguments["sweep"].as<std::vector<std::string>>()) add(text);
}

void Sweeps::add(const std::string& text) {
  const auto refuse = [&] {
    throw UsageError(
        fmt::format("--sweep: expected STAGE[=VARIANT]:OPTION=VALUE,VALUE,..., got '{}'", text));
  };
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) refuse();
  const std::size_t equals = std::min(text.find('='), colon);
  const std::string stage = text.substr(0, equals);
  const std::string variant = equals < colon ? text.substr(equals + 1, colon - equals - 1) : "";
  if (equals < colon && variant.empty()) refuse();
  builtin_stages().find(stage);  // refuses an unknown stage, naming those there are
  // A piece with a name begins an option, the others are further values of it.
  const std::size_t before = sweeps_.size();
  for (const std::string& piece : split(std::string_view(text).substr(colon + 1), ',')) {
    const std::size_t assigned = piece.find('=');
    if (assigned == 0 || (assigned == std::string::npos && sweeps_.size() == before)) refuse();
    std::string_view value = piece;
    if (assigned != std::string::npos) {
      Sweep sweep{text, stage, variant, piece.substr(0, assigned), {}};
      const auto same = [&](const Sweep& other) {
        return other.stage == stage && other.option == sweep.option &&
               (other.variant == variant || other.variant.empty() || variant.empty());
      };
      if (std::any_of(sweeps_.begin(), sweeps_.end(), same)) {
        throw UsageError(fmt::format("--sweep: expected an option once, got {} of {} again",
                                     sweep.option, stage));
      }
      sweeps_.push_back(std::move(sweep));
      value.remove_prefix(assigned + 1);
    }
    sweeps_.back().values.push_back(parse_integer("sweep", value, 0));
  }
}

void Sweeps::add_every_value(std::initializer_list<std::string_view> stages,
                             const std::string& option, DeviceType device) {
  if (!sweeps_.empty() || each_option_) {
    throw UsageError("--tune: expected without --sweep and --options");
  }
  for (const std::string_view stage : stages) {
    for (const Variant& variant : builtin_stages().find(stage).variants) {
      const OptionSpec* const spec = find_option(variant, option);
      if (spec == nullptr || variant.target != device) continue;
      std::vector<std::int64_t> values = spec->allowed;
      std::erase(values, 0);
      if (values.size() < 2) continue;
      sweeps_.push_back(
          {"--tune", std::string(stage), variant.id, option, std::move(values), true});
    }
  }
}

bool Sweeps::Sweep::concerns(const Node& node) const {
  if (node.stage.name != stage) return false;
  return variant.empty() ? find_option(node.chosen(), option) != nullptr
                         : node.chosen().id == variant;
}

std::vector<Variation> Sweeps::of(const Pipeline& pipeline, const VariantOverrides& given) {
  std::vector<Variation> variations{{pipeline.id(), {}, true, given}};
  std::set<std::string, std::less<>> seen;  // an override holds for all nodes of a stage
  for (const Node& node : pipeline.nodes()) {
    if (!seen.insert(node.stage.name).second) continue;
    if (each_option_) {
      for (const OptionSpec& spec : node.chosen().options) {
        for (const std::int64_t value : spec.allowed) {
          if (value == value_in(node, spec.name)) continue;
          Variation variation = variations.front();
          set_option(variation, node, spec.name, value);
          variations.push_back(std::move(variation));
        }
      }
    }
    for (Sweep& sweep : sweeps_) {
      if (!sweep.concerns(node)) continue;
      sweep.used = true;
      std::vector<Variation> product;
      for (const Variation& variation : variations) {
        for (const std::int64_t value : sweep.values) {
          set_option(product.emplace_back(variation), node, sweep.option, value);
        }
      }
      variations = std::move(product);
    }
  }
  return variations;
}

void Sweeps::check_all_used() const {
  for (const Sweep& sweep : sweeps_) {
    if (sweep.used) continue;
    throw UsageError(
        fmt::format("--sweep: expected a stage, variant and option of a pipeline that runs here "
                    "(gdnflow-info lists them), got '{}'",
                    sweep.text));
  }
}

}  // namespace gdnflow::apps
