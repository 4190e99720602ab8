#pragma once

#include <gdnflow/prefill.hpp>

namespace gdnflow::c_api {

/// Sets the recipe. Errors: invalid_argument for one that there is not.
void set_recipe(PrefillOptions& options, const char* recipe);

/// Sets a stage's variant, or with null takes it away. Errors: invalid_argument for a stage that
/// there is not, or text that is no choice.
void set_variant(PrefillOptions& options, const char* stage, const char* choice);

}  // namespace gdnflow::c_api
