#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

/// Kernels such as an engine has in front of a run and behind it.
namespace gdnflow::test {

struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::int64_t bytes = 0;
};

struct Neighbour {
  std::vector<DeviceCopy> copies;  ///< made one behind the other, in memory on the device
  bool programmatic = false;       ///< launched so that it may overlap what is in front of it,
  bool waits = true;               ///< for which it waits
  int delay_us = 0;                ///< how long it does nothing first
};

/// A kernel of one block that lets the next one start at once, then waits, then makes the copies.
void launch(const Neighbour& neighbour, cudaStream_t stream);

}  // namespace gdnflow::test
