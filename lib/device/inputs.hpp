#pragma once

#include <gdnflow/tensor.hpp>

#include "random/input_values.hpp"

#include <cstdint>

/// The device's halves of gdnflow/inputs.hpp, for arguments that have been checked.
namespace gdnflow::device {

void fill_input(const random::InputSpec& spec, const TensorView& out);
void fill_uniform(std::uint64_t seed, float low, float high, const TensorView& out);

}  // namespace gdnflow::device
