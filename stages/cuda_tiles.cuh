#pragma once

#include <gdnflow/problem.hpp>
#include <gdnflow/stage.hpp>

#include "cuda_variant.hpp"
#include "device/views.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Choosing a kernel's template arguments from a problem, and the chunk table of a call.

namespace gdnflow::stages {

/// f.template operator()<T, D>() for a problem that `supports_tiles` has accepted.
template <class F>
void with_type_and_dim(const Problem& problem, F&& f) {
  const auto with_type = [&]<class T>() {
    if (problem.qk_dim == 64) {
      f.template operator()<T, 64>();
    } else {
      f.template operator()<T, 128>();
    }
  };
  if (problem.activation == DType::bf16) {
    with_type.template operator()<__nv_bfloat16>();
  } else {
    with_type.template operator()<__half>();
  }
}

inline device::ChunkTable chunk_table(const StageCall& call) {
  return {call["chunk_table"].as<const int4>(), call["chunk_offsets"].as<const std::int32_t>(),
          call["chunk_counts"].as<const std::int32_t>()};
}

}  // namespace gdnflow::stages
