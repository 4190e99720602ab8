#include "workspace.hpp"

#include <fmt/format.h>

namespace gdnflow {

std::string workspace_refusal(std::int64_t arena_bytes, const void* workspace, std::int64_t bytes) {
  const std::int64_t needed = workspace_bytes_for(arena_bytes);
  if (needed == 0 || (workspace != nullptr && bytes >= needed)) return {};
  return fmt::format("workspace: expected at least {} bytes, got {}", needed,
                     workspace == nullptr ? "a null pointer" : fmt::to_string(bytes));
}

}  // namespace gdnflow
