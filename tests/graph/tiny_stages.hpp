#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/pipeline.hpp>
#include <gdnflow/registry.hpp>

#include <string>
#include <utility>
#include <vector>

/// Stages that compute nothing, for tests of the rules that pipelines and plans obey.
namespace gdnflow::test {

inline Variant idle_variant(std::string id = "host", DeviceType target = DeviceType::host) {
  Variant variant;
  variant.id = std::move(id);
  variant.description = "does nothing";
  variant.target = target;
  variant.steps = [](const StageCall&, StepList& out) {
    out.push_back({"idle", HostCall{[](const StageCall&) {}}});
  };
  return variant;
}

inline Port tiny_port(std::string name, Direction direction, std::vector<Extent> extents = {"T"},
                      TypeRule type = TypeRule::f32, bool optional = false) {
  return {std::move(name), direction, type, std::move(extents), optional, Padding::untouched};
}
inline Port reads(std::string name, std::vector<Extent> extents = {"T"},
                  TypeRule type = TypeRule::f32) {
  return tiny_port(std::move(name), Direction::in, std::move(extents), type);
}
inline Port writes(std::string name, std::vector<Extent> extents = {"T"},
                   TypeRule type = TypeRule::f32) {
  return tiny_port(std::move(name), Direction::out, std::move(extents), type);
}
inline Port changes(std::string name, std::vector<Extent> extents = {"T"},
                    TypeRule type = TypeRule::f32) {
  return tiny_port(std::move(name), Direction::inout, std::move(extents), type);
}
inline Port optionally(Port port) {
  port.optional = true;
  return port;
}

inline Stage tiny_stage(std::string name, std::vector<Port> ports) {
  return {std::move(name), "for tests", std::move(ports), {idle_variant()}};
}

/// A host that looks the same on every machine, so that printed pipelines do too.
inline DeviceInfo plain_host() {
  DeviceInfo info;
  info.name = "host";
  info.multiprocessors = 2;
  return info;
}

}  // namespace gdnflow::test
