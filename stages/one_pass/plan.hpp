#pragma once

#include <gdnflow/step.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "segments/plan.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

/// How sequences are cut, for a walk by slots; nothing where `slots` is null.
struct SlotTable {
  std::int32_t heads = 0;           ///< Hv, where cuts depend on gates; else 0
  std::int32_t useful = 0;          ///< segments that fill the machine
  std::int32_t alone = 0;           ///< segments_alone
  segments::Slot* slots = nullptr;  ///< [NS]
  std::int32_t slot_count = 0;      ///< NS
  std::int32_t* longest = nullptr;  ///< [1]: chunks of a segment, at most
};

struct ReadyGates;

/// The scan and the table, in one launch, by one block; beside it gates are made ready where they
/// are not. With a table `scan.chunk_offsets` and `.chunk_counts` are asked for.
Step plan_step(const SequenceScan& scan, const SlotTable& table, const ReadyGates& gates);

}  // namespace gdnflow::stages::one_pass
