#include <gdnflow/registry.hpp>

#include <algorithm>
#include <set>

#include <fmt/format.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

void check_variant(const Stage& stage, const Variant& variant, std::size_t others) {
  if (variant.id.empty()) refuse(fmt::format("stage {}: a variant has no id", stage.name));
  if (variant.steps == nullptr) {
    refuse(fmt::format("stage {}, variant {}: has no steps function", stage.name, variant.id));
  }
  const auto same = [&](const Variant& v) {
    return v.id == variant.id && v.target == variant.target;
  };
  if (static_cast<std::size_t>(std::count_if(stage.variants.begin(), stage.variants.end(), same)) >
      others) {
    refuse(fmt::format("stage {}: variant {} for {} stands twice", stage.name, variant.id,
                       to_string(variant.target)));
  }
}

}  // namespace

Registry::Registry(std::vector<Stage> stages) {
  for (Stage& stage : stages) add(std::move(stage));
}

void Registry::add(Stage stage) {
  if (stage.name.empty()) refuse("stage: expected a name, got none");
  if (contains(stage.name))
    refuse(fmt::format("stage {} stands in the registry already", stage.name));
  if (stage.ports.empty()) refuse(fmt::format("stage {} has no ports", stage.name));
  std::set<std::string_view> names;
  for (const Port& port : stage.ports) {
    if (port.name.empty()) refuse(fmt::format("stage {}: a port has no name", stage.name));
    if (!names.insert(port.name).second) {
      refuse(fmt::format("stage {}: port {} stands twice", stage.name, port.name));
    }
    if (port.extents.size() > TensorView::max_rank) {
      refuse(fmt::format("stage {}, port {}: expected at most {} extents, got {}", stage.name,
                         port.name, +TensorView::max_rank, port.extents.size()));
    }
  }
  if (stage.variants.empty()) refuse(fmt::format("stage {} has no variants", stage.name));
  for (const Variant& variant : stage.variants) check_variant(stage, variant, 1);
  stages_.push_back(std::move(stage));
}

void Registry::add_variant(std::string_view stage, Variant variant) {
  Stage& target = const_cast<Stage&>(find(stage));
  check_variant(target, variant, 0);
  target.variants.push_back(std::move(variant));
}

const Stage& Registry::find(std::string_view name) const {
  std::string known;
  for (const Stage& stage : stages_) {
    if (stage.name == name) return stage;
    known += (known.empty() ? "" : ", ") + stage.name;
  }
  refuse(fmt::format("stage: expected one of [{}], got '{}'", known, name));
}

bool Registry::contains(std::string_view name) const noexcept {
  return std::any_of(stages_.begin(), stages_.end(),
                     [&](const Stage& stage) { return stage.name == name; });
}

}  // namespace gdnflow
