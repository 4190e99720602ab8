#pragma once

// The two walks over the chunks, and what each needs besides.

#include <gdnflow/step.hpp>

#include "one_pass/one_pass.cuh"
#include "one_pass/shares.hpp"

#include <cstdint>

namespace gdnflow::stages::one_pass {

struct HalfParams : Params {
  const std::int32_t* longest_segment;  // [1], in chunks
  std::int32_t segments_alone;          // as in segments/plan.hpp
  std::int32_t* segment_starts;         // what SegmentPlan reads
  float* log2_bounds;
};

inline constexpr std::int64_t transfer_bytes = 4 * dim * dim;

// What shares leave for those behind, of heads whose past does not fade.
struct Links {
  enum : std::int32_t { transfer_left = 1, state_left = 2 };
  float* states;         // [B, d_k d_v]: the state behind a share, or what the share adds to one
  std::byte* transfers;  // [B, transfer_bytes]: what a share makes of the state in front of it
  std::int32_t* left;    // [B]: the state; or what it adds, and the transfer
};

struct WholeParams : Params {
  const Share* shares;         // [B+1]
  std::int32_t* finished;      // [B]: blocks done with the sequence and head that begins in one and
                               // ends in another
  std::int32_t* share_starts;  // [B]: chunk of the sequence from which on a share that begins
                               // inside one is walked
  float* share_bounds;         // [B]: log2 of what remains of the past there, by the gates alone
  Links links;
  bool skips_empty;  // sequences without chunks are not this walk's
  bool rehearses;    // whether instructions are fetched ahead of the first chunk
};

/// Adds the launches of a walk by half a head a block, in clusters of two, over sequences whole or
/// cut in so many slots.
void half_head(const HalfParams& params, const Problem& problem, bool cut, std::int64_t slots,
               StepList& out);
/// Adds the launch of a walk by a whole head a block, in so many blocks. `norm`: q and k are
/// normalised; bf16 only, since 1 / |k| enters a factor of what is rounded.
void whole_head(const WholeParams& params, const Problem& problem, bool norm, std::int64_t blocks,
                StepList& out);

}  // namespace gdnflow::stages::one_pass
