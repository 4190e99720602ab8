#pragma once

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

struct ReadyGates;

/// Adds the walk token by token over the sequences of at most `most_tokens` tokens, empty ones
/// included; the others' o and states are left alone. `scan` is that of a launch in front, with
/// `starts` and `checkpoint_offsets`.
void add_recurrence(const StageCall& call, const SequenceScan& scan, const ReadyGates& gates,
                    std::int32_t most_tokens, StepList& out);

/// The option `qk_norm` of a variant that normalises q and k itself, and what it asks for.
OptionSpec fused_norm_option();
Support supports_fused_norm(const VariantQuery& query);

/// Blocks that its grid may have.
std::int64_t recurrence_blocks(const VariantQuery& query);

}  // namespace gdnflow::stages::one_pass
