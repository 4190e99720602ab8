#pragma once

#include <gdnflow/tensor.hpp>

#include "device/check.hpp"

namespace gdnflow {

/// Makes a CUDA device current and the previous one again at the end. Errors: cuda.
class ScopedDevice {
 public:
  explicit ScopedDevice(Device device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    // Setting a device makes its primary context current, which would take the place of a context
    // of the caller's on the same device.
    if (previous_ == device.index) return;
    check_cuda(cudaSetDevice(device.index), "cudaSetDevice");
    changed_ = true;
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;
  ~ScopedDevice() {
    if (changed_) (void)cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace gdnflow
