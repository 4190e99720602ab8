#pragma once

#include <gdnflow/error.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/stage.hpp>

#include <string>

namespace gdnflow::stages::gate {

/// Whether the tensors that the problem's forms of gate and beta need are connected: all of them
/// are optional ports, of which each form takes its own.
inline Support has_inputs(const StageCall& call) {
  const Problem& p = call.problem;
  const auto missing = [&](const char* port) {
    return Support::no("gate: expected a tensor on '" + std::string(port) + "' for the " +
                       std::string(to_string(p.gate)) + " gate and " +
                       std::string(to_string(p.beta)) + " beta, got none");
  };
  if (p.gate == GateForm::raw) {
    if (!call.has("a")) return missing("a");
    if (!call.has("a_log")) return missing("a_log");
  } else if (!call.has("g")) {
    return missing("g");
  }
  const char* beta = p.beta == BetaForm::logit ? "b" : "beta";
  return call.has(beta) ? Support::yes() : missing(beta);
}

}  // namespace gdnflow::stages::gate
