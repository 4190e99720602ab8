#pragma once

#include <gdnflow/oracle.hpp>

#include "host/oracle_inputs.hpp"

namespace gdnflow::device {

/// The device's half of oracle_on_device, for inputs that have been checked.
void oracle(const Problem& problem, const OracleInputs& inputs, const OracleShape& shape, double* o,
            double* final_state, Stream stream);

}  // namespace gdnflow::device
