#pragma once

#include <gdnflow/tensor.hpp>

#include "device/check.hpp"

namespace gdnflow {

/// Makes a CUDA device current and the previous one again at the end. Errors: cuda.
class ScopedDevice {
 public:
  explicit ScopedDevice(Device device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device.index), "cudaSetDevice");
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;
  ~ScopedDevice() { (void)cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

}  // namespace gdnflow
