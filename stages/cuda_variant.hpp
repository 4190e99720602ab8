#pragma once

#include <gdnflow/problem.hpp>
#include <gdnflow/stage.hpp>

#include <cstdint>
#include <initializer_list>
#include <string_view>

// The host side that variants for CUDA share: refusals, types and grids. Plain C++, no CUDA header.

namespace gdnflow::stages {

/// Refuses a device before sm_80, and grids beyond what one dimension holds.
Support supports_cuda(const VariantQuery& query, std::int64_t blocks);
/// The same, and what the kernels on 16-bit tiles need: d_k = d_v = 64 or 128, bf16 or fp16.
Support supports_tiles(const VariantQuery& query, std::int64_t blocks);

/// `working` ports hold the activations' type.
DType activation_type(const Problem& problem, std::string_view port);

/// Refuses a tensor on these ports that does not suit 16-byte loads: the base must be 16-byte
/// aligned and every stride but the last a multiple of 16 bytes. Unbound ports pass. A chunk table,
/// where the stage has one, must suit too and be dense, whether it is named or not.
Support accepts_vectors(const StageCall& call, std::initializer_list<std::string_view> ports);

/// A count of blocks that `supports_cuda` has seen, as a grid; at least one block, since an empty
/// grid is an error and blocks leave by themselves.
Dim3 grid_of(std::int64_t blocks);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace gdnflow::stages
