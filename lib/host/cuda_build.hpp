#pragma once

#include <gdnflow/error.hpp>

#include <string>
#include <string_view>

namespace gdnflow {

/// What a call for a CUDA device says in a build without CUDA.
[[noreturn]] inline void refuse_without_cuda(std::string_view what) {
  throw Error(ErrorCode::unsupported,
              std::string(what) + ": this build of gdnflow has no CUDA; expected a host tensor");
}

}  // namespace gdnflow
