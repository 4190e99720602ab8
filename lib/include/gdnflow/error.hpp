#pragma once

#include <gdnflow/export.hpp>

#include <stdexcept>
#include <string>
#include <string_view>

namespace gdnflow {

/// What kind of thing went wrong; stable, so that a caller may branch on it.
enum class ErrorCode {
  invalid_argument,  ///< a value, shape, type or stride that the call does not take
  unsupported,       ///< a valid request that this variant, device or build cannot serve
  invalid_pipeline,  ///< a pipeline that does not validate (types, writers, cycles, bindings)
  format,            ///< a file whose contents are not what its format demands
  io,                ///< the operating system refused to read or write
  cuda,              ///< a CUDA call failed
  internal,          ///< a broken invariant of this library
};

GDNFLOW_API std::string_view to_string(ErrorCode code) noexcept;

/// A place in the source; std::source_location in the compilers that lack it (clang before 16).
struct SourceLocation {
  const char* file = "";
  unsigned line = 0;

  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          unsigned line = __builtin_LINE()) noexcept {
    return {file, line};
  }
};

/// The one exception type of the library. `what()` is a single line: what is wrong, what was
/// expected, what was got. Refusals that a caller can expect are values (`Support`), not this.
class GDNFLOW_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message,
        SourceLocation where = SourceLocation::current());

  ErrorCode code() const noexcept { return code_; }
  /// The place in the library's source that raised the error; not part of `what()`.
  const SourceLocation& where() const noexcept { return where_; }

 private:
  ErrorCode code_;
  SourceLocation where_;
};

/// An answer to "can you do this?", with the reason where the answer is no.
struct Support {
  bool ok = true;
  std::string reason;

  static Support yes() { return {}; }
  static Support no(std::string why) { return {false, std::move(why)}; }
  explicit operator bool() const noexcept { return ok; }
};

}  // namespace gdnflow
