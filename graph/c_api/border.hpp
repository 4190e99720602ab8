#pragma once

#include <gdnflow/error.hpp>
#include <gdnflow/gdnflow.h>

#include <array>
#include <cstddef>
#include <new>
#include <string>
#include <string_view>

#include <fmt/format.h>

// The border of the C interface: every exception ends here, as a status and a line of text a
// thread.

namespace gdnflow::c_api {

/// Keeps `what` as this thread's last error and gives the status back.
gdnflow_status fail(gdnflow_status status, const char* what) noexcept;

gdnflow_status status_of(ErrorCode code) noexcept;

/// Runs f() and turns what it throws into a status.
template <class F>
gdnflow_status guarded(F&& f) noexcept {
  try {
    f();
    return GDNFLOW_OK;
  } catch (const Error& error) {
    return fail(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(GDNFLOW_OUT_OF_MEMORY, "expected memory of the host, found none left");
  } catch (const std::exception& error) {
    return fail(GDNFLOW_INTERNAL, error.what());
  } catch (...) {
    return fail(GDNFLOW_INTERNAL, "expected a standard exception, got something else");
  }
}

/// Throws invalid_argument.
[[noreturn]] void refuse(const std::string& message);

template <class T>
T& expect(T* pointer, std::string_view name) {
  if (pointer == nullptr) refuse(fmt::format("{}: expected a pointer, got NULL", name));
  return *pointer;
}

inline std::string_view expect_text(const char* text, std::string_view name) {
  return &expect(text, name);
}

/// The element of `all` that is called `text`; `what` is said of it where there is none.
template <class T, std::size_t N>
const T& find_named(const std::array<T, N>& all, std::string_view T::*name, std::string_view what,
                    std::string_view text) {
  for (const T& known : all) {
    if (known.*name == text) return known;
  }
  std::string names;
  for (const T& known : all) names += fmt::format("{}{}", names.empty() ? "" : ", ", known.*name);
  refuse(fmt::format("{}: expected one of {}, got '{}'", what, names, text));
}

/// Gives a text to the caller as snprintf does. Errors: invalid_argument for a size without memory.
void give_text(std::string_view text, char* to, std::size_t size, std::size_t* length);

}  // namespace gdnflow::c_api
