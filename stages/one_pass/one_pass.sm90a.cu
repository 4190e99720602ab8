// one_pass, one-pass (sm_90a): from the log decay to o in one walk over the chunks, by one of two
// kernels: half a head a block (half_head.sm90a.cu), or a whole one (whole_head.sm90a.cu).

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "cuda_variant.hpp"
#include "one_pass/one_pass.cuh"
#include "one_pass/plan.hpp"
#include "segments/plan.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace gdnflow::stages::one_pass {
namespace {

int value_tile(const VariantQuery& query) {
  const std::int64_t chosen = option_or(query.options, "value_tile", 0);
  if (chosen != 0) return static_cast<int>(chosen);
  // What should be done first: a half's chunk takes about two thirds of the time of a whole one.
  const auto time = [&](std::int64_t tile, std::int64_t chunk_time) {
    const std::int64_t blocks = dim / tile;
    const std::int64_t sequences = std::max<std::int64_t>(query.capacity.max_sequences, 1);
    const std::int64_t chunks = ceil_div(query.capacity.max_tokens, chunk_tokens * sequences);
    const std::int64_t useful =
        segments::useful_segments(query.problem, query.device, blocks) / sequences;
    if (useful > 1 && option_or(query.options, "segments", 1) != 0) {
      const std::int64_t piece = std::max(ceil_div(chunks, useful), segment_grain);
      return chunk_time * std::min(piece + segments::usual_lead, chunks);
    }
    const std::int64_t width = std::max(query.device.multiprocessors, 1);
    return chunk_time * chunks * ceil_div(sequences * query.problem.v_heads * blocks, width);
  };
  return time(group_columns, 2) < time(dim, 3) ? group_columns : dim;
}

std::int64_t blocks_of_head(const VariantQuery& query) { return dim / value_tile(query); }

/// Whether sequences are cut: where there is room for more segments than sequences, or where whole
/// sequences side by side leave more than an eighth of the machine idle.
bool is_cut(const VariantQuery& query) {
  const std::int64_t blocks = blocks_of_head(query);
  const std::int64_t useful = segments::useful_segments(query.problem, query.device, blocks);
  if (option_or(query.options, "segments", 1) == 0 || useful == 1) return false;
  const std::int64_t sequences = query.capacity.max_sequences;
  return useful > sequences ||
         8 * sequences * query.problem.v_heads * blocks <= 7 * query.device.multiprocessors;
}

/// Slots that blocks are started for: without cuts, sequences.
std::int64_t slots_of(const VariantQuery& query) {
  return is_cut(query) ? segments::slot_count(query.problem, query.capacity, query.device,
                                              blocks_of_head(query))
                       : query.capacity.max_sequences;
}

Support supports(const VariantQuery& query) {
  return supports_sm90(query, slots_of(query) * query.problem.v_heads * blocks_of_head(query));
}

Support accepts(const StageCall& call) { return accepts_tiles(call, {"q", "k", "v", "o"}); }

// Pieces of the call's scratch, in this order.
enum Piece : int {
  starts,
  chunk_offsets,
  checkpoint_offsets,
  counts,
  plan_slots,
  plan_starts,
  plan_bounds,
  plan_growth,
  longest,
  finished,
  marks
};

/// One a head and cut, of which there are fewer than useful segments.
std::int64_t finished_count(const VariantQuery& query) {
  return segments::useful_segments(query.problem, query.device, blocks_of_head(query)) *
         query.problem.v_heads;
}

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  const std::int64_t sequences = sequence_starts_bytes(query.capacity.max_sequences);
  std::vector<ScratchSpec> pieces{{"starts", sequences},
                                  {"chunk_offsets", sequences},
                                  {"checkpoint_offsets", sequences},
                                  {"counts", 4 * sizeof(std::int32_t)}};
  if (!is_cut(query)) return pieces;
  const std::int64_t entries = slots_of(query) * query.problem.v_heads;
  pieces.push_back({"slots", slots_of(query) * static_cast<std::int64_t>(sizeof(segments::Slot))});
  pieces.push_back({"segment_starts", entries * static_cast<std::int64_t>(sizeof(std::int32_t))});
  pieces.push_back({"segment_bounds", entries * static_cast<std::int64_t>(sizeof(float))});
  pieces.push_back({"segment_growth", entries * 4 * static_cast<std::int64_t>(sizeof(float))});
  pieces.push_back({"longest", sizeof(std::int32_t)});
  pieces.push_back(
      {"finished", finished_count(query) * static_cast<std::int64_t>(sizeof(std::int32_t))});
  for (ScratchSpec& piece : segment_scratch(query, blocks_of_head(query)))
    pieces.push_back(std::move(piece));
  return pieces;
}

Params params_of(const StageCall& call, const VariantQuery& query) {
  Params params{};
  static_cast<Sm90Params&>(params) = sm90_tensors(call);
  params.g = device::Scalars<const float>(call["g"]);
  params.starts = call.scratch[starts].as<const std::int32_t>();
  params.chunks.offsets = call.scratch[chunk_offsets].as<const std::int32_t>();
  params.chunks.counts = call.scratch[counts].as<const std::int32_t>();
  params.checkpoint_offsets = call.scratch[checkpoint_offsets].as<const std::int32_t>();
  params.prefix_lens = call["prefix_lens"].data;
  params.wide_index = call.problem.index == DType::i64;
  if (!is_cut(query)) return params;
  params.longest_segment = call.scratch[longest].as<const std::int32_t>();
  params.segment_starts = call.scratch[plan_starts].as<std::int32_t>();
  params.log2_bounds = call.scratch[plan_bounds].as<float>();
  params.segments.slots = call.scratch[plan_slots].as<const segments::Slot>();
  params.segments.starts = params.segment_starts;
  params.segments.log2_bounds = params.log2_bounds;
  params.segments.log2_growth = call.scratch[plan_growth].as<float>();
  params.finished = call.scratch[finished].as<std::int32_t>();
  params.segments.marks = call.scratch[marks].as<float>();
  params.segments.capacity = static_cast<std::int32_t>(slots_of(query));
  params.waiting = waiting_states(call, call.scratch.back());
  return params;
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  SequenceScan scan = sequence_scan(call);
  scan.prefix_lens = call["prefix_lens"].data;
  scan.starts = call.scratch[starts].as<std::int32_t>();
  scan.chunk_offsets = call.scratch[chunk_offsets].as<std::int32_t>();
  scan.checkpoint_offsets = call.scratch[checkpoint_offsets].as<std::int32_t>();
  scan.chunk_counts = call.scratch[counts].as<std::int32_t>();
  if (is_cut(query)) {
    SlotTable table;
    table.useful = static_cast<std::int32_t>(
        segments::useful_segments(query.problem, query.device, blocks_of_head(query)));
    table.slots = call.scratch[plan_slots].as<segments::Slot>();
    table.slot_count = static_cast<std::int32_t>(slots_of(query));
    table.longest = call.scratch[longest].as<std::int32_t>();
    table.finished = call.scratch[finished].as<std::int32_t>();
    table.finished_count = static_cast<std::int32_t>(finished_count(query));
    out.push_back(plan_step(scan, table));
  } else {
    out.push_back(sequence_scan_step(scan));
  }
  const Params params = params_of(call, query);
  if (value_tile(query) == dim) {
    whole_head(params, call.problem, is_cut(query), slots_of(query), out);
  } else {
    half_head(params, call.problem, is_cut(query), slots_of(query), out);
  }
}

}  // namespace

Variant one_pass() {
  Variant variant;
  variant.id = "one-pass";
  variant.description = "sums, inverse and recurrence in one walk, in registers where it can be";
  variant.target = DeviceType::cuda;
  variant.options = {
      {"value_tile", "value columns of a block; 0: by the number of heads", 0, {0, 64, 128}},
      segments_option(),
  };
  variant.supports = supports;
  variant.scratch = scratch;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::one_pass
