#pragma once

#include <gdnflow/problem.hpp>

#include "device/prefix.cuh"
#include "one_pass/shares.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

/// How a sequence of so many chunks and these tokens lies in the call.
__device__ __forceinline__ Span span_of(std::int32_t first_chunk, std::int32_t chunks,
                                        std::int32_t start, std::int32_t end,
                                        const void* prefix_lens, bool wide_index,
                                        std::int32_t sequence) {
  // An empty one may have no prefix to read, and none counts.
  const std::int64_t prefix =
      chunks == 0 ? 0 : device::safe_prefix(prefix_lens, wide_index, sequence);
  return {first_chunk,
          chunks,
          start,
          end,
          static_cast<std::int32_t>(prefix % chunk_tokens),
          static_cast<std::int32_t>(prefix / chunk_tokens)};
}

/// The same by its entries in the tables of the scan.
__device__ __forceinline__ Span span_of(const std::int32_t* offsets, const std::int32_t* starts,
                                        const void* prefix_lens, bool wide_index,
                                        std::int32_t sequence) {
  const std::int32_t first = offsets[sequence];
  return span_of(first, offsets[sequence + 1] - first, starts[sequence], starts[sequence + 1],
                 prefix_lens, wide_index, sequence);
}

}  // namespace gdnflow::stages::one_pass
