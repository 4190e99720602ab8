#pragma once

#include <gdnflow/oracle.hpp>

#include <cstdint>

namespace gdnflow {

/// What the oracles of both machines take from the problem and its inputs.
struct OracleShape {
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  double scale = 0;
};

/// Refuses inputs that do not fit the problem or lie elsewhere than on `device`'s kind of machine.
/// Errors: invalid_argument, naming the tensor, what is expected and what was got.
OracleShape check_oracle_inputs(const Problem& problem, const OracleInputs& inputs,
                                DeviceType device);

}  // namespace gdnflow
