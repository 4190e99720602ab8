#include "options.hpp"

#include <gdnflow/recipes.hpp>

#include "border.hpp"

#include <string>
#include <string_view>

#include <fmt/format.h>

namespace gdnflow::c_api {

void set_recipe(PrefillOptions& options, const char* recipe) {
  const std::string_view id = expect_text(recipe, "recipe");
  if (!is_recipe(id)) refuse(fmt::format("recipe: expected one of {}, got '{}'", recipe_ids(), id));
  options.recipe = id;
}

void set_variant(PrefillOptions& options, const char* stage, const char* choice) {
  const std::string name(expect_text(stage, "stage"));
  if (!builtin_stages().contains(name)) {
    refuse(fmt::format("stage: expected one of the library's, got '{}'", name));
  }
  if (choice == nullptr) {
    options.overrides.erase(name);
  } else {
    options.overrides.insert_or_assign(name, parse_variant_choice(choice));
  }
}

}  // namespace gdnflow::c_api
