#pragma once

#include "support/device_tensor.hpp"
#include "support/externals.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

namespace gdnflow::test {

/// Copies of a problem's external tensors on the device, and what is needed to look at results.
class DeviceExternals {
 public:
  explicit DeviceExternals(const Externals& host) : host_(host) {
    for (const auto& [name, tensor] : host_.tensors()) {
      tensors_.emplace_back(name, std::make_unique<DeviceTensor>(tensor.view()));
    }
  }

  Bindings bindings() const {
    Bindings list;
    for (const auto& [name, tensor] : tensors_) list.emplace_back(name, tensor->view());
    return list;
  }
  const TensorView& view(std::string_view name) const {
    for (const auto& [other, tensor] : tensors_) {
      if (other == name) return tensor->view();
    }
    FAIL("no tensor ", name);
    return tensors_.front().second->view();
  }

  /// Other contents in the same memory; outputs are poisoned again.
  void overwrite(const Externals& host) {
    host_ = host;
    for (const auto& [name, tensor] : tensors_) tensor->upload(host_.tensors().at(name));
  }

  /// Waits for the device and brings outputs to the host.
  const Externals& download() {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (const auto& [name, tensor] : tensors_) {
      if (name == "o" || name == "final_state") tensor->download(host_[name]);
    }
    return host_;
  }

  /// Bytes of outputs and states, to compare runs bit by bit.
  std::vector<unsigned char> bits() {
    std::vector<unsigned char> all;
    for (const char* name : {"o", "final_state"}) {
      const auto found = download().tensors().find(name);
      if (found == host_.tensors().end()) continue;
      const TensorView& view = found->second.view();
      const auto* bytes = static_cast<const unsigned char*>(view.data);
      all.insert(all.end(), bytes, bytes + view.bytes());
    }
    return all;
  }

 private:
  Externals host_;
  std::vector<std::pair<std::string, std::unique_ptr<DeviceTensor>>> tensors_;
};

/// A stream of its own.
class TestStream {
 public:
  TestStream() {
    REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() { (void)cudaStreamDestroy(stream_); }
  operator cudaStream_t() const noexcept { return stream_; }  // NOLINT

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace gdnflow::test
