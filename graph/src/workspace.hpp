#pragma once

#include <gdnflow/plan.hpp>

#include <cstdint>
#include <string>

namespace gdnflow {

/// Bytes to ask a caller for so that an arena fits at any alignment of theirs.
inline std::int64_t workspace_bytes_for(std::int64_t arena_bytes) noexcept {
  return arena_bytes == 0 ? 0 : arena_bytes + Plan::alignment - 1;
}

/// The arena within such memory.
inline void* aligned_arena(void* workspace) noexcept {
  constexpr auto mask = static_cast<std::uintptr_t>(Plan::alignment - 1);
  return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace) + mask) & ~mask);
}

/// What is wrong with a caller's workspace for an arena of `arena_bytes`; empty: nothing.
std::string workspace_refusal(std::int64_t arena_bytes, const void* workspace, std::int64_t bytes);

}  // namespace gdnflow
