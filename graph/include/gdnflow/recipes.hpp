#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/pipeline.hpp>

#include <map>
#include <span>
#include <string>
#include <string_view>

namespace gdnflow {

/// Overrides of a recipe's variants: stage name -> choice.
using VariantOverrides = std::map<std::string, VariantChoice, std::less<>>;

/// A named way to build the forward pass from stages: one rung of the ladder.
struct Recipe {
  std::string_view id;           ///< "naive", "residual", ...
  std::string_view description;  ///< the idea it adds, one line
  Pipeline (*make)(const Recipe& recipe, const Registry& registry, const Problem& problem,
                   const Capacity& capacity, const DeviceInfo& device,
                   const VariantOverrides& overrides);
};

/// Every built-in recipe in the order of the ladder, `auto` behind them. The external tensors of
/// all of them have the names of `gdnflow/stages.hpp`: q, k, v, the gates, cu_seqlens, o, and what
/// Problem adds.
GDNFLOW_API std::span<const Recipe> recipes();

/// Whether there is a recipe of this id; "" is none.
GDNFLOW_API bool is_recipe(std::string_view id) noexcept;
/// The ids of all, as a message lists them: "naive, residual, ...".
GDNFLOW_API std::string recipe_ids();

/// Builds the pipeline of a recipe; an empty id stands for "auto", which takes one of the others by
/// predicted time (gdnflow/choice.hpp). Errors: invalid_argument for an unknown id (the message
/// lists them), and whatever PipelineBuilder::build throws.
GDNFLOW_API Pipeline make_pipeline(std::string_view recipe, const Problem& problem,
                                   const Capacity& capacity, const DeviceInfo& device,
                                   const VariantOverrides& overrides = {},
                                   const Registry& registry = builtin_stages());

/// Whether `make_pipeline` would succeed, with the reason where it would not.
GDNFLOW_API Support can_make_pipeline(std::string_view recipe, const Problem& problem,
                                      const Capacity& capacity, const DeviceInfo& device,
                                      const VariantOverrides& overrides = {},
                                      const Registry& registry = builtin_stages());

}  // namespace gdnflow
