#include <gdnflow/version.hpp>

#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>

TEST_CASE("the linked library's version is that of the headers, in three parts")
{
  CHECK(std::string(gdnflow::version()) == GDNFLOW_VERSION);
  CHECK(fmt::format("{}.{}.{}", GDNFLOW_VERSION_MAJOR, GDNFLOW_VERSION_MINOR,
                    GDNFLOW_VERSION_PATCH) == GDNFLOW_VERSION);
}
