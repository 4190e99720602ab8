#pragma once

#include <gdnflow/device.hpp>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <doctest/doctest.h>

/// Tests that need a CUDA device begin with GDNFLOW_REQUIRE_GPU(). Without a device the test ends
/// there and is counted; the runner says at the end how many were skipped, so that a green run on
/// a machine without a GPU cannot be mistaken for one with it. With the environment variable
/// GDNFLOW_REQUIRE_GPU=1 a missing device is a failure.
namespace gdnflow::test {

inline int skipped_gpu_tests = 0;

/// Whether a missing device must fail the run.
inline bool gpu_is_required() {
  const char* value = std::getenv("GDNFLOW_REQUIRE_GPU");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

inline bool has_gpu_or_counts_skip() {
  if (cuda_device_count() > 0) return true;
  if (gpu_is_required()) {
    FAIL_CHECK("no CUDA device, and GDNFLOW_REQUIRE_GPU is set");
  } else {
    ++skipped_gpu_tests;
  }
  return false;
}

/// Whether a variant or recipe of this id is to be left out: GDNFLOW_TEST_EXCLUDE holds ids with
/// commas between. For tools that cannot follow one kernel (docs/sanitizer.md).
inline bool is_excluded(std::string_view id) {
  const char* value = std::getenv("GDNFLOW_TEST_EXCLUDE");
  std::string_view rest = value == nullptr ? "" : value;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    if (item == id) return true;
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
  }
  return false;
}

}  // namespace gdnflow::test

#define GDNFLOW_REQUIRE_GPU()                             \
  do {                                                    \
    if (!gdnflow::test::has_gpu_or_counts_skip()) return; \
  } while (false)
