#pragma once

#include <cstdint>

// Lengths that a caller gave, read with care: they may be of either width and hold anything.

namespace gdnflow::device {

/// Element n of an i64 or i32 array.
__device__ __forceinline__ std::int64_t load_index(const void* data, bool wide, std::int64_t n) {
  return wide ? static_cast<const std::int64_t*>(data)[n]
              : static_cast<const std::int32_t*>(data)[n];
}

/// Tokens before sequence n's first: 0 without prefixes, else clamped to [0, 2^36], which keeps
/// chunk numbers within 32 bits.
__device__ __forceinline__ std::int64_t safe_prefix(const void* prefix_lens, bool wide,
                                                    std::int64_t n) {
  constexpr std::int64_t most = std::int64_t{1} << 36;
  if (prefix_lens == nullptr) return 0;
  const std::int64_t prefix = load_index(prefix_lens, wide, n);
  return prefix < 0 ? 0 : prefix > most ? most : prefix;
}

}  // namespace gdnflow::device
