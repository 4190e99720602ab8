#pragma once

#include <gdnflow/step.hpp>

#include "chunk_index/sequence_scan.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

/// Between two chunks of a sequence and value head, in the order in which they are shared out: by
/// sequence, head and chunk.
struct Place {
  std::int32_t sequence;  ///< N for the end
  std::int32_t head;
  std::int32_t chunk;  ///< of the sequence: that many are in front of it
};

/// A sequence as it lies in the call.
struct Span {
  std::int32_t first_chunk;  ///< in the chunk table
  std::int32_t chunks;
  std::int32_t start, end;    ///< tokens
  std::int32_t in_first;      ///< tokens that a cached prefix has of its first chunk
  std::int32_t first_number;  ///< of that chunk, counted from the prefix's first
};

/// A block's share: from here to where the next block's begins.
struct Share {
  Place begin;
  std::int32_t first_block;  ///< where it begins inside a sequence: the block that this sequence
                             ///< and head begins in,
  std::int32_t last_block;   ///< and the last one that begins inside it
  std::int32_t most_lead;    ///< chunks in front of a begin inside that cost less than a link,
  std::int32_t most_start;   ///< and those from the sequence's start
  Span span;                 ///< the sequence; of the end `first_chunk` alone
};

/// Where the share of each of `blocks` blocks begins.
struct ShareTable {
  static constexpr std::int32_t most_blocks = 255;

  Share* shares = nullptr;           ///< [B+1]; the last is the end
  std::int32_t* finished = nullptr;  ///< [B]: set to zero
  std::int32_t* left = nullptr;      ///< [B]: set to zero
  std::int32_t* units = nullptr;     ///< [N+1]: scratch, of many sequences
  std::int32_t blocks = 0;           ///< B, at most `most_blocks`
  std::int32_t heads = 0;            ///< Hv
  bool cuts = false;                 ///< whether shares may begin inside a sequence
  bool skips = false;                ///< whether sequences without chunks cost nothing
};

struct ReadyGates;

/// The scan and the table, in one launch, by one block; beside it gates are made ready where they
/// are not. `scan.starts` and `scan.chunk_offsets` are asked for.
Step share_step(const SequenceScan& scan, const ShareTable& table, const ReadyGates& gates);

}  // namespace gdnflow::stages::one_pass
