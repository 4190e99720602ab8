#pragma once

#include <gdnflow/step.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "segments/plan.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

/// How sequences are cut, for a walk by slots; nothing where `slots` is null.
struct SlotTable {
  std::int32_t useful = 0;          ///< segments that fill the machine
  std::int32_t alone = 0;           ///< segments_alone
  segments::Slot* slots = nullptr;  ///< [NS]
  std::int32_t slot_count = 0;      ///< NS
  std::int32_t* longest = nullptr;  ///< [1]: chunks of a segment, at most
};

struct Beside;

/// The scan and the table, in one launch, by one block; beside it what is to be found besides. With
/// a table `scan.chunk_offsets` and `.chunk_counts` are asked for.
Step plan_step(const SequenceScan& scan, const SlotTable& table, const Beside& beside);

}  // namespace gdnflow::stages::one_pass
