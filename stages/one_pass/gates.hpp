#pragma once

// Gates that the stage reads: ready, or, with the option `gate` of a variant, as the caller hands
// them over.

#include <gdnflow/stage.hpp>

#include "gate/inputs.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace gdnflow::stages::one_pass {

inline OptionSpec fused_gate_option() {
  return {"gate",
          "1: gates and beta, as they are given, are made ready inside; pipelines do so where they "
          "can",
          0,
          {0, 1}};
}

inline bool fuses_gate(const Options& options) { return option_or(options, "gate", 0) != 0; }

inline Support supports_fused_gate(const VariantQuery& query) {
  if (!fuses_gate(query.options)) return Support::yes();
  const Problem& p = query.problem;
  if (p.has_ready_gates()) {
    return Support::no("gate: expected 0 for a problem whose gates are ready, got 1");
  }
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const std::int64_t elements = query.capacity.max_tokens * p.v_heads;
  if (elements <= most) return Support::yes();
  return Support::no("gate: expected at most " + std::to_string(most) +
                     " tokens times value heads where it is 1, got " + std::to_string(elements));
}

/// Whether the tensors are there that gates come from.
inline Support has_gates(const StageCall& call) {
  if (fuses_gate(call.options)) return gate::has_inputs(call);
  for (const char* const port : {"g", "beta"}) {
    if (!call.has(port)) {
      return Support::no("one_pass: expected a tensor on '" + std::string(port) + "', got none");
    }
  }
  return Support::yes();
}

/// What the scratch has them in where they are made ready inside.
inline std::vector<ScratchSpec> gate_pieces(const VariantQuery& query) {
  if (!fuses_gate(query.options)) return {};
  const std::int64_t bytes =
      query.capacity.max_tokens * query.problem.v_heads * static_cast<std::int64_t>(sizeof(float));
  return {{"g_ready", bytes}, {"beta_ready", bytes}};
}

}  // namespace gdnflow::stages::one_pass
