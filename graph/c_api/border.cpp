#include "border.hpp"

#include <algorithm>
#include <cstring>

namespace gdnflow::c_api {
namespace {

/// This thread's last error. Of a fixed size, so that saying that memory is out takes none.
thread_local std::array<char, 1024> last_error{};

}  // namespace

// One line: what would begin another, or be none that can be read, becomes a space.
gdnflow_status fail(gdnflow_status status, const char* what) noexcept {
  constexpr std::string_view cut = "...";
  std::size_t length = std::strlen(what);
  const bool whole = length < last_error.size();
  if (!whole) {
    length = last_error.size() - 1 - cut.size();
    // Not within a character of several bytes.
    while (length > 0 && (static_cast<unsigned char>(what[length]) & 0xc0U) == 0x80U) --length;
  }
  std::transform(what, what + length, last_error.begin(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20U || byte == 0x7fU ? ' ' : c;
  });
  if (!whole)
    length = static_cast<std::size_t>(
        std::copy(cut.begin(), cut.end(),
                  last_error.begin() + static_cast<std::ptrdiff_t>(length)) -
        last_error.begin());
  last_error[length] = '\0';
  return status;
}

gdnflow_status status_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return GDNFLOW_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return GDNFLOW_UNSUPPORTED;
    case ErrorCode::invalid_pipeline:
      return GDNFLOW_INVALID_PIPELINE;
    case ErrorCode::format:
      return GDNFLOW_FORMAT;
    case ErrorCode::io:
      return GDNFLOW_IO;
    case ErrorCode::cuda:
      return GDNFLOW_CUDA;
    case ErrorCode::internal:
      return GDNFLOW_INTERNAL;
  }
  return GDNFLOW_INTERNAL;
}

void refuse(const std::string& message) { throw Error(ErrorCode::invalid_argument, message); }

void give_text(std::string_view text, char* to, std::size_t size, std::size_t* length) {
  if (to == nullptr && size > 0) {
    refuse(fmt::format("text: expected a pointer for {} bytes, got NULL", size));
  }
  if (size > 0) {
    const std::size_t kept = std::min(text.size(), size - 1);
    std::copy_n(text.begin(), kept, to);
    to[kept] = '\0';
  }
  if (length != nullptr) *length = text.size();
}

}  // namespace gdnflow::c_api

extern "C" const char* gdnflow_error(void) { return gdnflow::c_api::last_error.data(); }
