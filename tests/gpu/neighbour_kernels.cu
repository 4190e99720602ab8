#include "device/dependent_launch.cuh"
#include "gpu/neighbour_kernels.hpp"
#include "support/device_tensor.hpp"
#include "support/gpu.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

namespace gdnflow::test {
namespace {

constexpr std::size_t most_copies = 32;

struct Params {
  DeviceCopy copies[most_copies];
  int count;
  bool waits;
  std::int64_t delay_ns;
};

__device__ std::int64_t now_ns() {
  std::int64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

__device__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(uint4) == 0;
}

__global__ void copy_kernel(const __grid_constant__ Params p) {
  device::allow_successors();
  if (p.waits) device::wait_for_predecessors();
  const std::int64_t begin = now_ns();
  while (now_ns() - begin < p.delay_ns) __nanosleep(1000);
  __syncthreads();
  for (int i = 0; i < p.count; ++i) {
    const DeviceCopy& copy = p.copies[i];
    const std::int64_t words = is_aligned(copy.to) && is_aligned(copy.from)
                                   ? copy.bytes / static_cast<std::int64_t>(sizeof(uint4))
                                   : 0;
    for (std::int64_t at = threadIdx.x; at < words; at += blockDim.x) {
      static_cast<uint4*>(copy.to)[at] = static_cast<const uint4*>(copy.from)[at];
    }
    const auto done = words * static_cast<std::int64_t>(sizeof(uint4));
    for (std::int64_t at = done + threadIdx.x; at < copy.bytes; at += blockDim.x) {
      static_cast<unsigned char*>(copy.to)[at] = static_cast<const unsigned char*>(copy.from)[at];
    }
    __syncthreads();
  }
}

}  // namespace

void launch(const Neighbour& neighbour, cudaStream_t stream) {
  REQUIRE(neighbour.copies.size() <= most_copies);
  Params params{};
  std::copy(neighbour.copies.begin(), neighbour.copies.end(), params.copies);
  params.count = static_cast<int>(neighbour.copies.size());
  params.waits = neighbour.waits;
  params.delay_ns = std::int64_t{1000} * neighbour.delay_us;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = {1, 1, 1};
  config.blockDim = {512, 1, 1};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = neighbour.programmatic ? 1 : 0;
  // The first launch loads the kernel, which a capture in a stricter mode forbids.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  const cudaError_t status = cudaLaunchKernelEx(&config, copy_kernel, params);
  REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  REQUIRE(status == cudaSuccess);
}

}  // namespace gdnflow::test

using namespace gdnflow;
using namespace gdnflow::test;

// What the tests with these kernels rest on: there is something to wait for.
TEST_CASE("a kernel that waits sees what the one in front writes late, one that does not need not")
{
  GDNFLOW_REQUIRE_GPU();
  int major = 0;
  REQUIRE(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
  if (major < 9) return;
  const std::int64_t bytes = 1000;  // not a multiple of 16
  std::vector<unsigned char> numbers(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<unsigned char>(i * 7);
  const TensorView host = TensorView::dense(numbers.data(), DType::u8, {bytes});
  const DeviceTensor source(host);
  for (const bool waits : {true, false}) {
    CAPTURE(waits);
    const DeviceTensor written(DType::u8, {bytes});
    const DeviceTensor seen(DType::u8, {bytes});
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    launch({.copies = {{written.view().data, source.view().data, bytes}}, .delay_us = 500},
           nullptr);
    launch({.copies = {{seen.view().data, written.view().data, bytes}},
            .programmatic = true,
            .waits = waits},
           nullptr);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<unsigned char> got(numbers.size());
    seen.download(TensorView::dense(got.data(), DType::u8, {bytes}));
    if (waits) {
      CHECK(got == numbers);
    } else {
      // That it starts before is allowed, not promised.
      WARN(got == std::vector<unsigned char>(numbers.size(), 0xff));
    }
  }
}
