#pragma once

#include <gdnflow/costs.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/recipes.hpp>

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace gdnflow {

/// A pipeline with options that recipe `auto` weighs.
struct Candidate {
  std::string recipe;
  std::string options;         ///< those set by the choice: "fused_prefill:value_tile=64"
  VariantOverrides overrides;  ///< for make_pipeline: the caller's, with those options added
  Support support;             ///< whether it can run, with the reason where it cannot
  std::optional<double> predicted_us{};  ///< of a forward; nothing where no table has the form
  bool bound = false;  ///< sequences are shorter than any that were measured: an upper bound

  /// "register-state fused_prefill:value_tile=64".
  GDNFLOW_API std::string label() const;
};

/// What `auto` weighed, and what it chose.
struct Choice {
  /// Those that can run, the best first, then those that cannot, both else in the order of
  /// preference: from the top of the ladder down, the token recurrence last. Whatever has a
  /// prediction comes before what has none.
  std::vector<Candidate> candidates;
  std::string assumption;  ///< about lengths, in words
  std::string basis;       ///< where predictions come from, in words

  /// The first candidate that can run; null where none can.
  GDNFLOW_API const Candidate* chosen() const noexcept;
};

/// What recipe `auto` takes for a problem, capacity and device: a pure function of its arguments.
/// Options that the caller sets stay as they are. With tables of your own (`read_cost_table`), hand
/// what it returns to make_pipeline, PrefillOptions or GraphKey:
///
///   const Choice choice = choose(problem, capacity, device, {}, {&my_table, 1});
///   make_pipeline(choice.chosen()->recipe, problem, capacity, device, choice.chosen()->overrides);
///
/// Alignment and strides are not known here: a tensor that the chosen variant does not take is
/// refused when it is bound, and no other variant is tried. Errors: invalid_argument for a bad
/// problem or capacity.
GDNFLOW_API Choice choose(const Problem& problem, const Capacity& capacity,
                          const DeviceInfo& device, const VariantOverrides& overrides = {},
                          std::span<const CostTable> tables = builtin_cost_tables(),
                          const Registry& registry = builtin_stages());

/// Several lines: the choice, what it rests on, and every candidate with its predicted time and
/// why it was not taken.
GDNFLOW_API std::string to_string(const Choice& choice);

}  // namespace gdnflow
