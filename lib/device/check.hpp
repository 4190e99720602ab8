#pragma once

#include <gdnflow/error.hpp>

#include <string>

#include <cuda_runtime_api.h>

namespace gdnflow {

/// Turns a failed CUDA call into the library's exception; `what` names the call. Errors: cuda.
inline void check_cuda(cudaError_t status, const char* what,
                       SourceLocation where = SourceLocation::current()) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::cuda, std::string(what) + ": " + cudaGetErrorString(status), where);
  }
}

}  // namespace gdnflow
