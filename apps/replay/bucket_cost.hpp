#pragma once

#include <gdnflow/prefill.hpp>
#include <gdnflow/problem.hpp>

#include "common/timing.hpp"
#include "replay/settings.hpp"

#include <cstdint>
#include <vector>

namespace gdnflow::apps::replay {

/// Tokens of the batch: two chunks and a token, a small part of the largest bucket.
inline constexpr std::int64_t bucket_cost_tokens = 129;

/// The same batch in a bucket of this many tokens.
struct BucketCost {
  std::int64_t bucket_tokens = 0;
  Timing time;  ///< of the device, on the host of the call
};

/// What a bucket costs that a batch does not fill: one sequence in a bucket that just holds it and
/// in one far larger, each by replays of its session. Waits.
std::vector<BucketCost> bucket_costs(const Problem& problem, std::int64_t sequences,
                                     const PrefillOptions& prefill, const Draw& draw, Device device,
                                     Stream stream);

}  // namespace gdnflow::apps::replay
