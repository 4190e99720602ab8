#pragma once

#include <gdnflow/stage.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <vector>

namespace gdnflow::stages::host {

/// One sequence of the batch, after its length was made safe.
struct Sequence {
  std::int64_t first = 0;   ///< its first token's row
  std::int64_t tokens = 0;  ///< may be 0
  std::int64_t prefix = 0;  ///< tokens that came before, in earlier calls

  std::int64_t end() const noexcept { return first + tokens; }
  /// Tokens from the first up to the next absolute multiple of 64, at most those there are.
  std::int64_t first_chunk_tokens() const noexcept;
  /// Multiples of `interval` in (prefix, prefix + tokens]; none for an interval of 0.
  std::int64_t checkpoints(std::int64_t interval) const noexcept;
};

/// The capacity's sequences as the call's cu_seqlens describes them, or equal shares where its data
/// is null. Entries are clamped to [0, T] and to at least their predecessor, those behind the last
/// repeat it; prefixes are clamped to [0, 2^36].
std::vector<Sequence> read_sequences(const StageCall& call, const TensorView& prefix_lens);

}  // namespace gdnflow::stages::host
