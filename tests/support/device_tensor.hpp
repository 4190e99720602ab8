#pragma once

#include <gdnflow/tensor.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

namespace gdnflow::test {

/// A copy of a host tensor in the current device's memory, with the same strides.
class DeviceTensor {
 public:
  explicit DeviceTensor(const TensorView& host) : view_(host) {
    const std::size_t bytes = std::max<std::size_t>(span_bytes(), 1);
    REQUIRE(cudaMalloc(&view_.data, bytes) == cudaSuccess);
    view_.device = current_device();
    REQUIRE(cudaMemcpy(view_.data, host.data, span_bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  /// A dense tensor whose every byte is 0xff: NaN in each floating type, -1 in the integers.
  DeviceTensor(DType dtype, const std::vector<std::int64_t>& extents)
      : view_(TensorView::dense(nullptr, dtype, extents, current_device())) {
    const std::size_t bytes = std::max<std::size_t>(span_bytes(), 1);
    REQUIRE(cudaMalloc(&view_.data, bytes) == cudaSuccess);
    REQUIRE(cudaMemset(view_.data, 0xff, bytes) == cudaSuccess);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { (void)cudaFree(view_.data); }

  const TensorView& view() const noexcept { return view_; }

  /// Copies a host tensor of the same shape and strides over this one. Waits for the device.
  void upload(const TensorView& host) const {
    REQUIRE(cudaMemcpy(view_.data, host.data, span_bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  /// Waits for the device and copies everything back, gaps between strides included.
  void download(const TensorView& host) const {
    REQUIRE(cudaMemcpy(host.data, view_.data, span_bytes(), cudaMemcpyDeviceToHost) == cudaSuccess);
  }

 private:
  static Device current_device() {
    int index = 0;
    REQUIRE(cudaGetDevice(&index) == cudaSuccess);
    return {DeviceType::cuda, index};
  }

  /// From the first element to the last.
  std::size_t span_bytes() const {
    std::int64_t span = 1;
    for (std::int32_t i = 0; i < view_.rank; ++i) {
      if (view_.extents[i] == 0) return 0;
      span += (view_.extents[i] - 1) * view_.strides[i];
    }
    return static_cast<std::size_t>(span) * size_of(view_.dtype);
  }

  TensorView view_;
};

}  // namespace gdnflow::test
