#pragma once

#include "host_device.hpp"

#include <cstdint>

namespace gdnflow::random {

/// Four words: a counter, or what becomes of it.
struct Words {
  std::uint32_t w[4];
};

/// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
/// as 1, 2, 3" (SC 2011): ten rounds that each multiply two words, fold the halves and add a Weyl
/// sequence to the key. A block of four words is a function of its counter and key alone, so any
/// element can be made by any thread of any machine.
GDNFLOW_HOST_DEVICE inline Words philox(Words counter, std::uint64_t key) {
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter.w[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter.w[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.w[1] ^ key0,
                static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.w[3] ^ key1,
                static_cast<std::uint32_t>(product0)}};
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return counter;
}

}  // namespace gdnflow::random
