#pragma once

#include <gdnflow/device.hpp>

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

}  // namespace gdnflow::test

#define GDNFLOW_REQUIRE_GPU()                             \
  do {                                                    \
    if (!gdnflow::test::has_gpu_or_counts_skip()) return; \
  } while (false)
