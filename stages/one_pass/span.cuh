#pragma once

#include <gdnflow/problem.hpp>

#include "device/prefix.cuh"
#include "one_pass/shares.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

/// How a sequence lies in the call, by its entries in the tables of the scan.
__device__ __forceinline__ Span span_of(const std::int32_t* offsets, const std::int32_t* starts,
                                        const void* prefix_lens, bool wide_index,
                                        std::int32_t sequence) {
  const std::int32_t first = offsets[sequence];
  const std::int32_t chunks = offsets[sequence + 1] - first;
  // An empty one may have no prefix to read, and none counts.
  const std::int64_t prefix =
      chunks == 0 ? 0 : device::safe_prefix(prefix_lens, wide_index, sequence);
  return {first,
          chunks,
          starts[sequence],
          starts[sequence + 1],
          static_cast<std::int32_t>(prefix % chunk_tokens),
          static_cast<std::int32_t>(prefix / chunk_tokens)};
}

}  // namespace gdnflow::stages::one_pass
