#pragma once

#include <gdnflow/step.hpp>

#include <cstdint>

namespace gdnflow::stages {

/// A prefix scan over the sequences of a call, on the device, by one block: lengths made safe, and
/// what each sequence's chunks and checkpoints begin at. See gdnflow/stages.hpp for the rules.
struct SequenceScan {
  const void* cu_seqlens = nullptr;   ///< [given+1]; null: dense
  const void* prefix_lens = nullptr;  ///< [given]; null: none
  bool wide_index = false;            ///< those two are i64, else i32
  std::int64_t tokens = 0;            ///< rows that there are: at most T
  std::int64_t sequences = 0;         ///< N
  std::int64_t given = 0;             ///< sequences that there are; those behind them are empty
  std::int64_t checkpoint_interval = 0;
  std::int32_t most_unchunked = 0;  ///< sequences of at most so many tokens have no chunks here
  std::int32_t* starts = nullptr;   ///< [N+1]: first token of each sequence, and the end
  std::int32_t* chunk_offsets = nullptr;       ///< [N+1], or null
  std::int32_t* checkpoint_offsets = nullptr;  ///< [N+1], or null
  std::int32_t* chunk_counts = nullptr;        ///< [4], or null
};

/// The same with what a problem says of lengths filled in; outputs are left null.
SequenceScan sequence_scan(const StageCall& call);

Step sequence_scan_step(const SequenceScan& scan);

/// Bytes of `starts`.
std::int64_t sequence_starts_bytes(std::int64_t sequences);

}  // namespace gdnflow::stages
