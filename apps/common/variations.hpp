#pragma once

#include <gdnflow/pipeline.hpp>
#include <gdnflow/recipes.hpp>

#include "common/program.hpp"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow::apps {

/// A way to run a pipeline: as the command line gives it, or with options of its variants changed.
struct Variation {
  std::string pipeline;
  /// What a sweep or a breakdown sets: "fused_prefill:value_tile=64", several with spaces between
  /// them; empty: nothing.
  std::string options{};
  /// Every option has the value that it has without the sweep.
  bool as_given = true;
  VariantOverrides overrides{};
};

/// "fused-128", or with options "fused-128 fused_prefill:value_tile=64".
std::string variation_label(std::string_view pipeline, std::string_view options);

/// --sweep and --options.
void add_sweep_options(po::options_description& options);

/// What --sweep and --options make of pipelines.
class Sweeps {
 public:
  /// Errors: UsageError for text that is no sweep, an option swept twice, and both options
  /// together; gdnflow::Error (invalid_argument) for an unknown stage.
  explicit Sweeps(const po::variables_map& arguments);

  /// Sweeps an option over all values but 0, which leaves it to the variant, for each variant of
  /// these stages for a device that has a choice. Errors: UsageError together with --sweep or
  /// --options.
  void add_every_value(std::initializer_list<std::string_view> stages, const std::string& option,
                       DeviceType device);

  /// The ways to run a pipeline that was made with `given`: for sweeps every combination of the
  /// values of those that concern it; for --options itself, and once for each other value of each
  /// option; else itself alone. Whether the variants take the values is not asked.
  std::vector<Variation> of(const Pipeline& pipeline, const VariantOverrides& given);

  /// Errors: UsageError for a sweep that concerned no pipeline so far.
  void check_all_used() const;

 private:
  struct Sweep {
    std::string text;  ///< as it was given
    std::string stage;
    std::string variant;  ///< empty: whichever the pipeline has, if it has the option
    std::string option;
    std::vector<std::int64_t> values;
    bool used = false;

    bool concerns(const Node& node) const;
  };

  void add(const std::string& text);

  std::vector<Sweep> sweeps_;
  bool each_option_ = false;
};

}  // namespace gdnflow::apps
