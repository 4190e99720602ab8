#pragma once

// What the launch in front of a walk finds besides, by blocks beside the one that plans: gates from
// what the caller hands over, and norms.

#include <gdnflow/stage.hpp>

#include "device/views.cuh"
#include "gate/table.cuh"
#include "one_pass/gates.hpp"
#include "one_pass/norms.cuh"
#include "one_pass/scratch_reader.hpp"

#include <algorithm>
#include <cstdint>

namespace gdnflow::stages::one_pass {

struct Beside {
  static constexpr int threads = gate::Table::threads;
  static_assert(NormTable::threads == threads);

  gate::Table gates;        // of no elements where they are ready
  NormTable norms;          // of no rows where none are asked for
  std::int64_t blocks = 0;  // for both; 0: nothing to find

  /// For at most so many elements, one a thread, some of them in turn.
  void add_gates(const gate::Table& table, std::int64_t most_elements, int multiprocessors) {
    constexpr std::int64_t resident = 8;  // blocks a multiprocessor, about
    gates = table;
    blocks = std::max(blocks, std::min(ceil_div(most_elements, std::int64_t{threads}),
                                       resident * std::max(multiprocessors, 1)));
  }
  void add_norms(const NormTable& table, std::int64_t of_blocks) {
    norms = table;
    blocks = std::max(blocks, of_blocks);
  }
};

/// By the blocks behind the first.
__device__ __forceinline__ void find_beside(const Beside& p) {
  const unsigned block = blockIdx.x - 1;
  const unsigned blocks = gridDim.x - 1;
  const auto elements = static_cast<std::uint32_t>(p.gates.elements);  // supports_fused_gate
  const auto heads = static_cast<std::uint32_t>(p.gates.heads);
  for (std::uint32_t i = block * Beside::threads + threadIdx.x; i < elements;
       i += blocks * Beside::threads) {
    const std::uint32_t token = i / heads;
    gate::find_gates(p.gates, token, static_cast<int>(i - token * heads));
  }
  find_norms(p.norms, block, blocks);
}

/// Log decay and beta as a walk reads them.
struct ReadyGates {
  device::Scalars<const float> g;     // [T, Hv]
  device::Scalars<const float> beta;  // [T, Hv]
};

/// Those that the caller hands over, or where `beside` is now to leave them: in the next pieces of
/// the scratch (gate_pieces).
inline ReadyGates ready_gates(const StageCall& call, ScratchReader& scratch, Beside& beside) {
  ReadyGates gates;
  if (!fuses_gate(call.options)) {
    gates.g = device::Scalars<const float>(call["g"]);
    gates.beta = device::Scalars<const float>(call["beta"]);
    return gates;
  }
  const std::int64_t heads = call.problem.v_heads;
  auto* const g = scratch.next<float>();
  auto* const beta = scratch.next<float>();
  beside.add_gates(gate::Table(call, g, heads, beta, heads), call.capacity.max_tokens * heads,
                   call.device.multiprocessors);
  gates.g.data = g;
  gates.beta.data = beta;
  gates.g.token_stride = gates.beta.token_stride = heads;
  return gates;
}

}  // namespace gdnflow::stages::one_pass
