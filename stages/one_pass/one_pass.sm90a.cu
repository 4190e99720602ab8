// one_pass, one-pass (sm_90a): from the log decay to o in one walk over the chunks, by one of two
// kernels: half a head a block (half_head.sm90a.cu), or a whole one (whole_head.sm90a.cu).

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "cuda_variant.hpp"
#include "one_pass/gates.hpp"
#include "one_pass/one_pass.cuh"
#include "one_pass/plan.hpp"
#include "one_pass/ready_gates.cuh"
#include "one_pass/recurrent.hpp"
#include "one_pass/scratch_reader.hpp"
#include "one_pass/shares.hpp"
#include "one_pass/walks.hpp"
#include "segments/plan.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gdnflow::stages::one_pass {
namespace {

// Where walking tokens and walking a chunk take as long.
constexpr std::int64_t usual_short = 8;

// Whether q and k are normalised here.
bool normalizes(const VariantQuery& query) { return option_or(query.options, "qk_norm", 0) != 0; }

int value_tile(const VariantQuery& query) {
  const std::int64_t chosen = option_or(query.options, "value_tile", 0);
  if (chosen != 0) return static_cast<int>(chosen);
  if (query.problem.mode == Mode::batch_invariant) return group_columns;
  // What should be done first: a half's chunk takes about two thirds of the time of a whole one.
  const std::int64_t sequences = std::max<std::int64_t>(query.capacity.max_sequences, 1);
  const std::int64_t chunks = ceil_div(query.capacity.max_tokens, chunk_tokens * sequences);
  const std::int64_t width = std::max(query.device.multiprocessors, 1);
  const bool cut = option_or(query.options, "segments", 1) != 0;
  const std::int64_t heads = sequences * query.problem.v_heads;
  std::int64_t whole = chunks * ceil_div(heads, width);
  if (cut) whole = std::min(whole, ceil_div(chunks * heads, width) + segments::usual_lead);
  std::int64_t half = chunks * ceil_div(2 * heads, width);
  const std::int64_t useful = segments::useful_segments(query.problem, query.device) / sequences;
  if (useful > 1 && cut) {
    const std::int64_t piece = std::max(ceil_div(chunks, useful), segment_grain);
    half = std::min(piece + segments::usual_lead, chunks);
  }
  return 2 * half < 3 * whole ? group_columns : dim;
}

// ---------------------------------------------------------------------------------------------
// Half heads, in segments.

/// Whether sequences are cut: where there is room for more segments than sequences, or where whole
/// sequences side by side leave more than an eighth of the machine idle.
bool is_cut(const VariantQuery& query) {
  if (option_or(query.options, "segments", 1) == 0) return false;
  if (query.problem.mode == Mode::batch_invariant) {
    return segments::segments_alone(query.problem) > 1;
  }
  const std::int64_t useful = segments::useful_segments(query.problem, query.device);
  if (useful == 1) return false;
  const std::int64_t sequences = query.capacity.max_sequences;
  return useful > sequences ||
         8 * sequences * query.problem.v_heads * 2 <= 7 * query.device.multiprocessors;
}

/// Slots that blocks are started for: without cuts, sequences.
std::int64_t slots_of(const VariantQuery& query) {
  return is_cut(query) ? segments::slot_count(query.problem, query.capacity, query.device)
                       : query.capacity.max_sequences;
}

std::vector<ScratchSpec> segment_pieces(const VariantQuery& query) {
  if (!is_cut(query)) return {};
  const std::int64_t entries = slots_of(query) * query.problem.v_heads;
  std::vector<ScratchSpec> pieces{
      {"slots", slots_of(query) * static_cast<std::int64_t>(sizeof(segments::Slot))},
      {"segment_starts", entries * static_cast<std::int64_t>(sizeof(std::int32_t))},
      {"segment_bounds", entries * static_cast<std::int64_t>(sizeof(float))},
      {"segment_growth", entries * 4 * static_cast<std::int64_t>(sizeof(float))},
      {"longest", sizeof(std::int32_t)}};
  for (ScratchSpec& piece : segment_scratch(query)) pieces.push_back(std::move(piece));
  return pieces;
}

void add_half(const StageCall& call, const VariantQuery& query, const SequenceScan& scan,
              const Params& common, const ReadyGates& gates, ScratchReader scratch, StepList& out) {
  HalfParams params{};
  static_cast<Params&>(params) = common;
  SlotTable table;
  if (is_cut(query)) {
    table.useful =
        static_cast<std::int32_t>(segments::useful_segments(query.problem, query.device));
    table.alone = params.segments_alone =
        static_cast<std::int32_t>(segments::segments_alone(query.problem));
    if (table.alone == 0) table.heads = query.problem.v_heads;
    table.slot_count = static_cast<std::int32_t>(slots_of(query));
    table.slots = scratch.next<segments::Slot>();
    params.segment_starts = scratch.next<std::int32_t>();
    params.log2_bounds = scratch.next<float>();
    params.segments.log2_growth = scratch.next<float>();
    table.longest = scratch.next<std::int32_t>();
    params.segments.marks = scratch.next<float>();
    params.longest_segment = table.longest;
    params.segments.slots = table.slots;
    params.segments.starts = params.segment_starts;
    params.segments.log2_bounds = params.log2_bounds;
    params.segments.capacity = table.slot_count;
    params.waiting = waiting_states(call, call.scratch.back());
  }
  out.push_back(plan_step(scan, table, gates));
  half_head(params, call.problem, is_cut(query), slots_of(query), out);
}

// ---------------------------------------------------------------------------------------------
// Whole heads, in shares.

/// No more than multiprocessors, nor than there may be chunks.
std::int64_t share_blocks(const VariantQuery& query) {
  const std::int64_t most = query.problem.v_heads * (max_chunks(query.problem, query.capacity) +
                                                     query.capacity.max_sequences);
  const std::int64_t side_by_side =
      std::clamp(query.device.multiprocessors, 1, int{ShareTable::most_blocks});
  return std::clamp<std::int64_t>(most, 1, side_by_side);
}

/// Whether a run's tensors push its instructions out of L2, from where the next one fetches them:
/// to do so ahead pays from about three quarters of L2 on.
bool leaves_cache(const VariantQuery& query) {
  const Problem& problem = query.problem;
  const std::int64_t bytes = query.capacity.max_tokens * 2 * (problem.qk_heads + problem.v_heads) *
                             dim * size_of(problem.activation);
  return 4 * bytes >= 3 * query.device.l2_bytes;
}

/// Sequences of at most so many tokens that are walked token by token, in a launch of their own: a
/// state costs less there to read and to write, and chunks would be filled for a few rows. 0: none,
/// where so few sequences of heads that the launch would cost more.
std::int32_t most_short(const VariantQuery& query) {
  const std::int64_t jobs = query.capacity.max_sequences * query.problem.v_heads;
  const bool many = jobs >= 8 * std::int64_t{query.device.multiprocessors};
  return many ? static_cast<std::int32_t>(option_or(query.options, "short", usual_short)) : 0;
}

std::vector<ScratchSpec> share_pieces(const VariantQuery& query) {
  const std::int64_t blocks = share_blocks(query);
  const std::int64_t links = option_or(query.options, "segments", 1) != 0 ? blocks : 0;
  const std::int64_t marks =
      max_chunks(query.problem, query.capacity) * query.problem.v_heads * SegmentPlan::parts;
  std::vector<ScratchSpec> pieces{
      {"shares", (blocks + 1) * static_cast<std::int64_t>(sizeof(Share))},
      {"finished", blocks * static_cast<std::int64_t>(sizeof(std::int32_t))},
      {"share_starts", blocks * static_cast<std::int64_t>(sizeof(std::int32_t))},
      {"share_bounds", blocks * static_cast<std::int64_t>(sizeof(float))},
      {"share_growth", blocks * 4 * static_cast<std::int64_t>(sizeof(float))},
      {"marks", marks * static_cast<std::int64_t>(sizeof(float))},
      {"left", blocks * static_cast<std::int64_t>(sizeof(std::int32_t))},
      {"units", sequence_starts_bytes(query.capacity.max_sequences)},
      {"link_states", links * state_bytes},
      {"link_transfers", links * transfer_bytes}};
  if (query.problem.initial_state && query.problem.final_state) {
    pieces.push_back({"waiting", blocks * state_bytes});
  }
  return pieces;
}

void add_whole(const StageCall& call, const VariantQuery& query, SequenceScan scan,
               const Params& common, const ReadyGates& gates, ScratchReader scratch,
               StepList& out) {
  WholeParams params{};
  static_cast<Params&>(params) = common;
  ShareTable table;
  table.blocks = static_cast<std::int32_t>(share_blocks(query));
  table.heads = static_cast<std::int32_t>(query.problem.v_heads);
  table.cuts = option_or(query.options, "segments", 1) != 0;
  table.shares = scratch.next<Share>();
  table.finished = scratch.next<std::int32_t>();
  params.shares = table.shares;
  params.finished = table.finished;
  params.share_starts = scratch.next<std::int32_t>();
  params.share_bounds = scratch.next<float>();
  params.segments.log2_growth = scratch.next<float>();
  params.segments.marks = scratch.next<float>();
  table.left = scratch.next<std::int32_t>();
  params.links.left = table.left;
  table.units = scratch.next<std::int32_t>();
  params.links.states = scratch.next<float>();
  params.links.transfers = scratch.next<std::byte>();
  params.rehearses = leaves_cache(query);
  // A head that is cut has a row of its own, by the block that it begins in.
  params.waiting = waiting_states(call, call.scratch.back());
  params.waiting.head_stride = 0;
  params.waiting.rows = table.blocks;
  params.waiting.pool_stride = state_elements;
  scan.most_unchunked = most_short(query);
  table.skips = params.skips_empty = scan.most_unchunked > 0;
  out.push_back(share_step(scan, table, gates));
  if (scan.most_unchunked > 0) add_recurrence(call, scan, gates, scan.most_unchunked, out);
  whole_head(params, call.problem, normalizes(query), table.blocks, out);
}

// ---------------------------------------------------------------------------------------------

Support supports(const VariantQuery& query) {
  if (query.problem.mode == Mode::batch_invariant && value_tile(query) == dim) {
    return Support::no(
        "value_tile: expected 64 with mode batch_invariant, got 128, whose shares depend on the "
        "whole call");
  }
  if (Support support = supports_fused_gate(query); !support) return support;
  if (normalizes(query)) {
    if (Support support = supports_fused_norm(query); !support) return support;
    if (value_tile(query) != dim || query.problem.activation != DType::bf16) {
      return Support::no("qk_norm: expected value_tile 128 and bf16 where it is 1, got " +
                         std::to_string(value_tile(query)) + " and " +
                         std::string(to_string(query.problem.activation)));
    }
  }
  const std::int64_t blocks = value_tile(query) == dim
                                  ? std::max(share_blocks(query), recurrence_blocks(query))
                                  : 2 * slots_of(query) * query.problem.v_heads;
  return supports_sm90(query, blocks);
}

Support accepts(const StageCall& call) {
  if (Support support = has_gates(call); !support) return support;
  return accepts_tiles(call, {"q", "k", "v", "o"});
}

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  const std::int64_t sequences = sequence_starts_bytes(query.capacity.max_sequences);
  std::vector<ScratchSpec> pieces{{"starts", sequences},
                                  {"chunk_offsets", sequences},
                                  {"checkpoint_offsets", sequences},
                                  {"counts", 4 * sizeof(std::int32_t)}};
  const auto add = [&](std::vector<ScratchSpec> more) {
    for (ScratchSpec& piece : more) pieces.push_back(std::move(piece));
  };
  add(gate_pieces(query));
  add(value_tile(query) == dim ? share_pieces(query) : segment_pieces(query));
  return pieces;
}

void steps(const StageCall& call, StepList& out) {
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  ScratchReader scratch(call);
  SequenceScan scan = sequence_scan(call);
  scan.prefix_lens = call["prefix_lens"].data;
  scan.starts = scratch.next<std::int32_t>();
  scan.chunk_offsets = scratch.next<std::int32_t>();
  scan.checkpoint_offsets = scratch.next<std::int32_t>();
  scan.chunk_counts = scratch.next<std::int32_t>();

  Params common{};
  static_cast<Sm90Params&>(common) = sm90_tensors(call);
  const ReadyGates gates = ready_gates(call, scratch);
  common.g = gates.g;
  common.beta = gates.beta;
  common.starts = scan.starts;
  common.chunks.offsets = scan.chunk_offsets;
  common.chunks.counts = scan.chunk_counts;
  common.checkpoint_offsets = scan.checkpoint_offsets;
  common.prefix_lens = scan.prefix_lens;
  common.wide_index = scan.wide_index;
  value_tile(query) == dim ? add_whole(call, query, scan, common, gates, scratch, out)
                           : add_half(call, query, scan, common, gates, scratch, out);
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
      fused_norm_option(),
      fused_gate_option(),
      {"short",
       "with value_tile 128 and many sequences: those of at most so many tokens go token by token",
       usual_short,
       {0, 4, 8, 12, 16, 24}},
  };
  variant.supports = supports;
  variant.scratch = scratch;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::one_pass
