#include <gdnflow/error.hpp>

namespace gdnflow {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::invalid_pipeline:
      return "invalid pipeline";
    case ErrorCode::format:
      return "format";
    case ErrorCode::io:
      return "input/output";
    case ErrorCode::cuda:
      return "CUDA";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

Error::Error(ErrorCode code, const std::string& message, SourceLocation where)
    : std::runtime_error(message), code_(code), where_(where) {}

}  // namespace gdnflow
