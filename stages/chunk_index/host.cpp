#include "host/sequences.hpp"
#include "host/variant.hpp"

#include <algorithm>

// Cuts every sequence at absolute multiples of 64 tokens and numbers chunks and checkpoints.

namespace gdnflow::stages::chunk_index {
namespace {

void run(const StageCall& call) {
  const auto at = [](const TensorView& view, std::int64_t i, std::int64_t j = 0) -> std::int32_t& {
    return view.as<std::int32_t>()[i * view.strides[0] + j * view.strides[1]];
  };
  const TensorView& table = call["chunk_table"];
  const TensorView& offsets = call["chunk_offsets"];
  const TensorView& checkpoint_offsets = call["checkpoint_offsets"];
  const TensorView& counts = call["chunk_counts"];
  const auto fill_row = [&](std::int64_t row, std::int64_t sequence, std::int64_t first,
                            std::int64_t tokens, std::int64_t number) {
    at(table, row, 0) = static_cast<std::int32_t>(sequence);
    at(table, row, 1) = static_cast<std::int32_t>(first);
    at(table, row, 2) = static_cast<std::int32_t>(tokens);
    at(table, row, 3) = static_cast<std::int32_t>(number);
  };

  std::int64_t chunks = 0;
  std::int64_t tokens = 0;
  std::int64_t checkpoints = 0;
  std::int64_t not_empty = 0;
  std::int64_t n = 0;
  for (const host::Sequence& sequence : host::read_sequences(call, call["prefix_lens"])) {
    at(offsets, n) = static_cast<std::int32_t>(chunks);
    at(checkpoint_offsets, n) = static_cast<std::int32_t>(checkpoints);
    std::int64_t number = sequence.prefix / chunk_tokens;
    std::int64_t length = sequence.first_chunk_tokens();
    for (std::int64_t first = sequence.first; first < sequence.end(); first += length) {
      // Only the first chunk may end short of 64 tokens from its start for the prefix's sake.
      if (first != sequence.first) length = std::min(chunk_tokens, sequence.end() - first);
      fill_row(chunks++, n, first, length, number++);
    }
    tokens += sequence.tokens;
    checkpoints += sequence.checkpoints(call.problem.checkpoint_interval);
    not_empty += sequence.tokens > 0 ? 1 : 0;
    ++n;
  }
  at(offsets, n) = static_cast<std::int32_t>(chunks);
  at(checkpoint_offsets, n) = static_cast<std::int32_t>(checkpoints);
  for (std::int64_t row = chunks; row < table.extents[0]; ++row) fill_row(row, 0, 0, 0, 0);
  at(counts, 0) = static_cast<std::int32_t>(chunks);
  at(counts, 1) = static_cast<std::int32_t>(tokens);
  at(counts, 2) = static_cast<std::int32_t>(checkpoints);
  at(counts, 3) = static_cast<std::int32_t>(not_empty);
}

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"chunk_index", HostCall{run}});
}

}  // namespace

Variant host() { return host::host_variant("one pass over the sequences", steps); }

}  // namespace gdnflow::stages::chunk_index
