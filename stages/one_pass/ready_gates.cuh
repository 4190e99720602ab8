#pragma once

// Gates that a walk reads: as the caller hands them over, or made ready in the launch in front, by
// blocks beside the one that plans.

#include <gdnflow/stage.hpp>

#include "device/gates.cuh"
#include "device/views.cuh"
#include "gate/table.cuh"
#include "one_pass/gates.hpp"
#include "one_pass/scratch_reader.hpp"
#include "segments/plan.hpp"

#include <algorithm>
#include <cstdint>

namespace gdnflow::stages::one_pass {

/// What the blocks beside are given.
struct GateMaking {
  static constexpr int threads = gate::Table::threads;

  gate::Table gates;
  std::int64_t blocks = 0;  // 0: the gates are ready

  GateMaking() = default;
  /// For at most so many elements, one a thread, some of them in turn.
  GateMaking(const gate::Table& table, std::int64_t most_elements, int multiprocessors)
      : gates(table),
        blocks(std::min(ceil_div(most_elements, std::int64_t{threads}),
                        std::int64_t{8} * std::max(multiprocessors, 1))) {}
};

/// By the blocks behind the first.
__device__ __forceinline__ void make_gates(const GateMaking& p) {
  const auto elements = static_cast<std::uint32_t>(p.gates.elements);  // supports_fused_gate
  const auto heads = static_cast<std::uint32_t>(p.gates.heads);
  for (std::uint32_t i = (blockIdx.x - 1) * GateMaking::threads + threadIdx.x; i < elements;
       i += (gridDim.x - 1) * GateMaking::threads) {
    const std::uint32_t token = i / heads;
    gate::find_gates(p.gates, token, static_cast<int>(i - token * heads));
  }
}

/// Log decay and beta as a walk reads them, and how the launch in front makes them where they are
/// not handed over so.
struct ReadyGates {
  device::Scalars<const float> g;     // [T, Hv]
  device::Scalars<const float> beta;  // [T, Hv]
  GateMaking making;
};

/// A log decay where gates may be on their way to being ready. `i` is which of some samples of a
/// head, spread over a sequence of at least twice as many tokens from `start` on, even ones and odd
/// ones.
template <bool MakesGates>
__device__ __forceinline__ float sampled_log_decay(const device::Scalars<const float>& g,
                                                   const GateMaking& making, std::int32_t start,
                                                   std::uint32_t tokens, std::int32_t i,
                                                   std::int32_t samples, std::int32_t head) {
  const auto token =
      start + static_cast<std::int32_t>(tokens / (2 * samples) * (2 * i + 1) ^ (i % 2));
  const gate::Table& raw = making.gates;
  return device::clamp_log_decay(MakesGates && raw.elements > 0
                                     ? gate::log_decay(raw, raw.gate.at(token, head), head)
                                     : g.at(token, head));
}

/// The sum of so many samples of a head at which its past fades over `lead` chunks.
__device__ __forceinline__ constexpr float fading_sum(std::int32_t samples, std::int32_t lead) {
  return (segments::log2_resolution + segments::log2_margin) * static_cast<float>(samples) /
         (device::log2_e * static_cast<float>(chunk_tokens * lead));
}

/// Those that the caller hands over, or that are to be left in the next pieces of the scratch
/// (gate_pieces).
inline ReadyGates ready_gates(const StageCall& call, ScratchReader& scratch) {
  ReadyGates gates;
  if (!fuses_gate(call.options)) {
    gates.g = device::Scalars<const float>(call["g"]);
    gates.beta = device::Scalars<const float>(call["beta"]);
    return gates;
  }
  const std::int64_t heads = call.problem.v_heads;
  auto* const g = scratch.next<float>();
  auto* const beta = scratch.next<float>();
  gates.making = GateMaking(gate::Table(call, g, heads, beta, heads),
                            call.capacity.max_tokens * heads, call.device.multiprocessors);
  gates.g.data = g;
  gates.beta.data = beta;
  gates.g.token_stride = gates.beta.token_stride = heads;
  return gates;
}

}  // namespace gdnflow::stages::one_pass
