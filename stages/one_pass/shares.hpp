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

/// Where the share of the work of each of `blocks` blocks begins.
struct ShareTable {
  Place* places = nullptr;           ///< [B+1]; the last is the end
  std::int32_t* finished = nullptr;  ///< [B]: set to zero
  std::int32_t blocks = 0;           ///< B
  std::int32_t heads = 0;            ///< Hv
  bool cuts = false;                 ///< whether shares may begin inside a sequence
};

/// The scan and the table, in one launch of one block. `scan.chunk_offsets` is asked for.
Step share_step(const SequenceScan& scan, const ShareTable& table);

}  // namespace gdnflow::stages::one_pass
