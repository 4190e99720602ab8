#pragma once

#include <gdnflow/error.hpp>

#include <optional>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

namespace gdnflow::test {

/// Checks that `body` raises an Error of the code whose one-line message holds every part given.
template <class Body>
void expect_error(ErrorCode code, std::initializer_list<std::string_view> parts, Body body) {
  std::optional<Error> error;
  try {
    body();
  } catch (const Error& caught) {
    error = caught;
  }
  REQUIRE_MESSAGE(error.has_value(), "expected an error, got none");
  const std::string message = error->what();
  CAPTURE(message);
  CHECK(error->code() == code);
  CHECK(message.find('\n') == std::string::npos);
  for (const std::string_view part : parts) {
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
  }
}

}  // namespace gdnflow::test
