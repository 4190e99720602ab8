#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/stage.hpp>

#include <span>
#include <string_view>
#include <vector>

namespace gdnflow {

/// The stages that pipelines are built from: an explicit, ordered list. A value: users copy
/// `builtin_stages()` and add their own. Reading from several threads is safe, changing is not.
class GDNFLOW_API Registry {
 public:
  Registry() = default;
  explicit Registry(std::vector<Stage> stages);

  /// Errors: invalid_argument for a name that exists, a stage without ports or variants, a port
  /// name or variant id (per target) that stands twice, or a variant without `steps`.
  void add(Stage stage);
  /// Adds a variant behind a stage's own. Errors: as `add`, and for a stage that does not exist.
  void add_variant(std::string_view stage, Variant variant);

  std::span<const Stage> stages() const noexcept { return stages_; }
  /// Errors: invalid_argument, naming the stages there are.
  const Stage& find(std::string_view name) const;
  bool contains(std::string_view name) const noexcept;

 private:
  std::vector<Stage> stages_;
};

/// The stages of this library, defined by its stages part, in the order of the forward pass.
GDNFLOW_API const Registry& builtin_stages();

}  // namespace gdnflow
