#pragma once

#include <gdnflow/problem.hpp>
#include <gdnflow/stage.hpp>

#include <cstdint>

// How sequences are cut, for host and device alike; gdnflow/stages.hpp says what the tensors hold.

namespace gdnflow::stages::segments {

/// What remains of the past must be below the resolution of fp32 ...
inline constexpr float log2_resolution = -24.0F;
/// ... also where the state before is larger than the state after by this factor; where it is by
/// more, the check behind finds it.
inline constexpr float log2_margin = -2.0F;
/// The farthest that a segment starts in front of its begin, in chunks.
inline constexpr std::int32_t most_lead = 64;

/// Where gates are a model's usual ones.
inline constexpr std::int32_t usual_lead = 8;

/// A row of segment_slots.
struct Slot {
  std::int32_t sequence;  ///< -1: not used
  std::int32_t begin;     ///< first chunk, in the chunk table
  std::int32_t end;
  std::int32_t number;  ///< within the sequence
};

/// gdnflow::useful_segments of the device, for blocks of half a head.
std::int64_t useful_segments(const Problem& problem, const DeviceInfo& device);
/// Refuses batch_invariant for the stage, which cuts all sequences of a call together.
Support supports_mode(const VariantQuery& query);
/// The most segments of a sequence where each is cut as if it were alone, by the model's heads and
/// whatever the machine: batch_invariant. Else 0.
std::int64_t segments_alone(const Problem& problem);
/// Slots that may be used: so many rows of segment_slots are written, and have to be looked at.
std::int64_t slot_count(const Problem& problem, const Capacity& capacity, const DeviceInfo& device);

#if defined(__CUDACC__)
#define GDNFLOW_BOTH_SIDES __host__ __device__
#else
#define GDNFLOW_BOTH_SIDES
#endif

/// Pieces of at most `length` chunks, a multiple of the grain.
struct Cut {
  std::int32_t length;

  /// Pieces no longer than it takes for `pieces` of them to hold `chunks`.
  GDNFLOW_BOTH_SIDES static constexpr Cut into(std::int32_t chunks, std::int32_t pieces) {
    constexpr auto grain = static_cast<std::int32_t>(segment_grain);
    const std::int32_t length = (chunks + pieces - 1) / pieces;
    return {(length + grain - 1) / grain * grain};
  }
  GDNFLOW_BOTH_SIDES static constexpr Cut none() { return {1 << 30}; }

  /// Segments of a sequence; one of no chunks has one, too, which hands its state on.
  GDNFLOW_BOTH_SIDES constexpr std::int32_t segments(std::int32_t chunks) const {
    return chunks <= length ? 1 : (chunks + length - 1) / length;
  }

  /// What choosing takes of all sequences of at least one chunk, with pieces no longer than `into`
  /// of all of them and the useful segments.
  struct Pieces {
    std::int32_t count;     ///< in all
    std::int32_t shortest;  ///< the shortest one's chunks
    std::int32_t longest;   ///< the longest sequence's chunks
  };
  /// How sequences are cut: `running` sequences of `total` chunks, `useful` segments that run side
  /// by side. Each sequence may round its pieces up by one; where that makes too many to run at
  /// once, either one a sequence is set aside, or the shortest wait for a place, whichever should
  /// be done first.
  GDNFLOW_BOTH_SIDES static constexpr Cut choose(std::int32_t total, std::int32_t running,
                                                 std::int32_t useful, const Pieces& pieces) {
    const Cut fine = into(total, useful);
    if (pieces.count <= useful) return fine;
    const Cut coarse = running < useful ? into(total, useful - running) : none();
    const std::int32_t count = coarse.segments(pieces.longest);
    const std::int32_t longest =
        (pieces.longest + count - 1) / count + (count > 1 ? usual_lead : 0);
    return fine.length + usual_lead + pieces.shortest < longest ? fine : coarse;
  }

  /// Border i of a sequence's `count` segments, in its chunks: evenly spread, at multiples of the
  /// grain.
  GDNFLOW_BOTH_SIDES static constexpr std::int32_t border(std::int32_t chunks, std::int32_t count,
                                                          std::int32_t i) {
    constexpr auto grain = static_cast<std::int32_t>(segment_grain);
    const std::int32_t places = (chunks + grain - 1) / grain;
    // places i / count, within 32 bits.
    const std::int32_t at = (places / count * i + places % count * i / count) * grain;
    return at < chunks ? at : chunks;
  }
};

/// How each sequence of a call is cut.
struct Cuts {
  Cut cut;  ///< all of them alike,
  std::int32_t
      alone;  ///< or, where this is not 0, into so many segments at most whatever others do

  GDNFLOW_BOTH_SIDES constexpr std::int32_t segments(std::int32_t chunks) const {
    return (alone != 0 ? Cut::into(chunks, alone) : cut).segments(chunks);
  }
};

#undef GDNFLOW_BOTH_SIDES

}  // namespace gdnflow::stages::segments
