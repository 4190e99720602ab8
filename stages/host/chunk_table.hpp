#pragma once

#include <gdnflow/stage.hpp>

#include "host/matrix.hpp"

#include <cstdint>

namespace gdnflow::stages::host {

/// Up to 64 consecutive tokens of one sequence.
struct Chunk {
  std::int64_t index = 0;  ///< row of the chunk table, and of chunk_states
  std::int64_t sequence = 0;
  std::int64_t first = 0;   ///< its first token's row
  std::int64_t tokens = 0;  ///< 1 to 64
  std::int64_t number = 0;  ///< counted from the start of the sequence's prefix
};

/// The chunk table that `chunk_index` made, as the stages behind it read it.
class ChunkTable {
 public:
  explicit ChunkTable(const StageCall& call)
      : table_(call["chunk_table"]),
        offsets_(call["chunk_offsets"]),
        counts_(call["chunk_counts"]) {}

  std::int64_t chunks() const noexcept { return *counts_.as<const std::int32_t>(); }
  /// The chunks of sequence n are [first_of(n), first_of(n + 1)).
  std::int64_t first_of(std::int64_t sequence) const noexcept {
    return offsets_.as<const std::int32_t>()[sequence * offsets_.strides[0]];
  }
  Chunk operator[](std::int64_t index) const noexcept {
    const std::int32_t* row = table_.as<const std::int32_t>() + index * table_.strides[0];
    const std::int64_t step = table_.strides[1];
    return {index, row[0], row[step], row[2 * step], row[3 * step]};
  }

 private:
  TensorView table_;
  TensorView offsets_;
  TensorView counts_;
};

/// The l x l part of `A` [T, Hv, 64] that holds a chunk's inverse; the columns behind it are zero.
inline Window inverse_of(const TensorView& a, std::int64_t head, const Chunk& chunk) {
  Window window = rows_of(a, head, chunk.first, chunk.tokens);
  window.columns = chunk.tokens;
  return window;
}

}  // namespace gdnflow::stages::host
