#pragma once

#include <gdnflow/problem.hpp>

#include <cstdint>

namespace gdnflow::stages::host {

/// Value heads that read one q/k head.
inline std::int32_t heads_per_group(const Problem& p) noexcept { return p.v_heads / p.qk_heads; }

/// The i-th of the value heads that read `qk_head`: the inverse of Problem::qk_head_of.
inline std::int32_t value_head_of(const Problem& p, std::int64_t qk_head, std::int32_t i) noexcept {
  const auto head = static_cast<std::int32_t>(qk_head);
  return p.head_map == HeadMap::grouped ? head * heads_per_group(p) + i : head + i * p.qk_heads;
}

}  // namespace gdnflow::stages::host
