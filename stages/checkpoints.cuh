#pragma once

#include <gdnflow/stage.hpp>

#include "device/state_io.cuh"
#include "device/views.cuh"

#include <cstdint>

namespace gdnflow::stages {

/// Where the state behind a chunk goes as a checkpoint: a row of the checkpoints' pool, -1 where it
/// is none. `offsets` is the checkpoint_offsets tensor or null, `first_number` the number of the
/// sequence's first chunk. The rule is that of gdnflow/stages.hpp.
__device__ __forceinline__ std::int64_t checkpoint_row(const device::StatePorts& states,
                                                       const std::int32_t* offsets,
                                                       const device::Chunk& chunk,
                                                       std::int32_t first_number) {
  // Chunk numbers fit in 32 bits; dividing 64 bits would call a function in the middle of a kernel.
  const std::int32_t every = states.checkpoint_chunks;
  if (every == 0 || offsets == nullptr) return -1;
  const std::int32_t reached = chunk.number + 1;
  if (reached % every != 0) return -1;
  const std::int32_t compact = offsets[chunk.sequence] + reached / every - first_number / every - 1;
  // A last chunk that stops short of its border has no row.
  if (compact >= offsets[chunk.sequence + 1]) return -1;
  return states.checkpoint_row(compact);
}

}  // namespace gdnflow::stages
