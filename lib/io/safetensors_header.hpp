#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow::safetensors {

/// A tensor as the header states it, before any of it is believed.
struct Entry {
  std::optional<std::string> dtype;
  std::optional<std::vector<std::uint64_t>> shape;
  std::optional<std::vector<std::uint64_t>> offsets;
};

struct Header {
  std::map<std::string, Entry, std::less<>> entries;
  std::map<std::string, std::string, std::less<>> metadata;
};

/// Reads the header's JSON. Errors: format, naming `file`, for anything but an object of the
/// format, and for a name or field that stands twice.
Header parse_header(std::string_view json, std::string_view file);

}  // namespace gdnflow::safetensors
