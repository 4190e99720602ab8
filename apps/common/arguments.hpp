#pragma once

#include <gdnflow/choice.hpp>
#include <gdnflow/device.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/recipes.hpp>

#include "common/output.hpp"
#include "common/program.hpp"

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps {

// Reading of option values that several programs share. Every function throws UsageError with the
// option's name, what was expected and what was got.

/// A whole number of at least `least`.
std::int64_t parse_integer(std::string_view option, std::string_view value, std::int64_t least);

/// "28672,4096".
std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view value,
                                         std::int64_t least);

/// Refuses an output that is one of the files read, or another output: its contents would be lost.
/// Options that are not given, standard output ("-") and devices pass.
void check_files_apart(const po::variables_map& arguments,
                       std::initializer_list<const char*> inputs,
                       std::initializer_list<const char*> outputs);

/// Where the result as JSON goes; nothing where it is not asked for. A file that cannot be written
/// is refused here, in front of all work. Errors: io.
std::optional<OutputTarget> json_target_from(const po::variables_map& arguments);

/// A count given as an integer option, checked against its least value.
std::int64_t count(const po::variables_map& arguments, const char* name, std::int64_t least);

/// One of `values`, by its name.
template <class T>
T parse_choice(std::string_view option, std::string_view value, std::span<const T> values) {
  std::string expected;
  for (const T& candidate : values) {
    if (to_string(candidate) == value) return candidate;
    expected += fmt::format("{}{}", expected.empty() ? "" : ", ", to_string(candidate));
  }
  throw UsageError(fmt::format("--{}: expected one of {}, got '{}'", option, expected, value));
}

/// Query/key heads and value heads.
struct Heads {
  std::int32_t qk = 0;
  std::int32_t v = 0;
};

/// "2,8": query/key heads and value heads, which must be a multiple of them.
Heads parse_heads(std::string_view option, std::string_view value);

/// --device host | cuda | cuda:N; without it the first GPU where there is one, else the host.
void add_device_option(po::options_description& options);
Device device_from(const po::variables_map& arguments);
/// "host", "cuda", or "cuda:N" for N > 0: as --device takes it.
std::string device_name(Device device);

/// --variant STAGE=CHOICE, any number of times.
void add_variant_option(po::options_description& options);
VariantOverrides overrides_from(const po::variables_map& arguments);

/// --pipeline NAME and --costs FILE.
void add_pipeline_option(po::options_description& options);

/// A pipeline to make: a recipe, and overrides with the options that were chosen for it.
struct PipelineRequest {
  std::string recipe;
  VariantOverrides overrides;
  std::string label;  ///< the recipe, with chosen options
};

/// What `auto` makes of --variant and --costs.
Choice choice_from(const po::variables_map& arguments, const Problem& problem,
                   const Capacity& capacity, const DeviceInfo& device);
/// The pipeline asked for with --variant's overrides; without one, or for auto, what that chooses.
PipelineRequest pipeline_from(const po::variables_map& arguments, const Problem& problem,
                              const Capacity& capacity, const DeviceInfo& device);
/// Errors for a name that no recipe has, listing those there are.
void check_pipeline(std::string_view option, std::string_view name);

/// --type, --state-type, --state-layout, --head-map, --qk-norm, --scale: what a problem may vary
/// in every program.
void add_problem_options(po::options_description& options);
/// Sets the fields of those options. Without --type: f32 on the host, where it is exact, and bf16
/// on a GPU.
void apply_problem_options(const po::variables_map& arguments, Device device, Problem& problem);

}  // namespace gdnflow::apps
