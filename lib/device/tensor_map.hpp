#pragma once

#include <gdnflow/tensor.hpp>

#include <cstdint>

#include <cuda.h>

namespace gdnflow::device {

/// A map of a [tokens, heads, columns] tensor for boxes of 64 columns x 1 head x `tokens` tokens
/// in the 128-byte swizzle; coordinates are column, head, token. A pure function of the view: it
/// encodes on the host and touches no device. Errors: cuda where there is no driver.
CUtensorMap tile_map(const TensorView& view, std::uint32_t tokens);

}  // namespace gdnflow::device
