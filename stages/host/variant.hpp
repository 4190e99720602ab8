#pragma once

#include <gdnflow/stage.hpp>

#include <string>
#include <utility>

namespace gdnflow::stages::host {

/// A host variant without options or scratch that serves every problem: any head dims, head ratio,
/// types, layouts and strides.
inline Variant host_variant(std::string description,
                            void (*steps)(const StageCall& call, StepList& out)) {
  Variant variant;
  variant.id = "host";
  variant.description = std::move(description);
  variant.target = DeviceType::host;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::host
