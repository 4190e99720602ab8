#include "common/device.hpp"

#include <gdnflow/error.hpp>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#if GDNFLOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gdnflow::apps {
namespace {

constexpr std::size_t alignment = 256;

#if GDNFLOW_WITH_CUDA
void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::cuda, fmt::format("{}: {}", what, cudaGetErrorString(status)));
}
#else
[[noreturn]] void no_cuda() {
  throw Error(ErrorCode::unsupported, "device: expected host, since this build has no GPU stages");
}
#endif

}  // namespace

void use_device(Device device) {
  if (device.type == DeviceType::host) return;
#if GDNFLOW_WITH_CUDA
  // Setting a device makes its primary context current, in place of one with a limit.
  int current = 0;
  check(cudaGetDevice(&current), "choosing the GPU");
  if (current != device.index) check(cudaSetDevice(device.index), "choosing the GPU");
#else
  no_cuda();
#endif
}

Memory::Memory(Device device, std::int64_t bytes) : bytes_(bytes), device_(device) {
  // At least a byte, so that an empty tensor has an address too.
  const std::size_t size = bytes > 0 ? static_cast<std::size_t>(bytes) : 1;
  if (device.type == DeviceType::host) {
    data_ = ::operator new (size, std::align_val_t{alignment});
    return;
  }
#if GDNFLOW_WITH_CUDA
  check(cudaMalloc(&data_, size),
        fmt::format("allocating {} bytes on {}", size, to_string(device)));
#else
  no_cuda();
#endif
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  if (device_.type == DeviceType::host) {
    ::operator delete (data_, std::align_val_t{alignment});
    return;
  }
#if GDNFLOW_WITH_CUDA
  cudaFree(data_);
#endif
}

void Memory::swap(Memory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
}

void upload(void* destination, Device device, const void* source, std::int64_t bytes) {
  if (bytes <= 0) return;
  const auto size = static_cast<std::size_t>(bytes);
  if (device.type == DeviceType::host) {
    std::memcpy(destination, source, size);
    return;
  }
#if GDNFLOW_WITH_CUDA
  check(cudaMemcpy(destination, source, size, cudaMemcpyHostToDevice), "copying to the GPU");
#else
  no_cuda();
#endif
}

void download(void* destination, const void* source, Device device, std::int64_t bytes) {
  if (bytes <= 0) return;
  const auto size = static_cast<std::size_t>(bytes);
  if (device.type == DeviceType::host) {
    std::memcpy(destination, source, size);
    return;
  }
#if GDNFLOW_WITH_CUDA
  check(cudaMemcpy(destination, source, size, cudaMemcpyDeviceToHost), "copying from the GPU");
#else
  no_cuda();
#endif
}

void fill_bytes(void* destination, Device device, int value, std::int64_t bytes) {
  if (bytes <= 0) return;
  const auto size = static_cast<std::size_t>(bytes);
  if (device.type == DeviceType::host) {
    std::memset(destination, value, size);
    return;
  }
#if GDNFLOW_WITH_CUDA
  check(cudaMemset(destination, value, size), "setting GPU memory");
  check(cudaStreamSynchronize(nullptr), "setting GPU memory");
#else
  no_cuda();
#endif
}

void synchronize(Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::host) return;
#if GDNFLOW_WITH_CUDA
  check(cudaStreamSynchronize(stream), "running on the GPU");
#else
  no_cuda();
#endif
}

OwnedStream::OwnedStream(Device device) {
  if (device.type == DeviceType::host) return;
#if GDNFLOW_WITH_CUDA
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
#else
  no_cuda();
#endif
}

OwnedStream::~OwnedStream() {
#if GDNFLOW_WITH_CUDA
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
#endif
}

struct Stopwatch::Events {
#if GDNFLOW_WITH_CUDA
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;

  Events() {
    check(cudaEventCreate(&begin), "making an event");
    check(cudaEventCreate(&end), "making an event");
  }
  ~Events() {
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
#endif
};

Stopwatch::Stopwatch(Device device) {
  if (device.type == DeviceType::cuda) events_ = std::make_unique<Events>();
}

Stopwatch::~Stopwatch() = default;

void Stopwatch::start([[maybe_unused]] Stream stream) {
#if GDNFLOW_WITH_CUDA
  if (events_) {
    check(cudaEventRecord(events_->begin, stream), "recording an event");
    return;
  }
#endif
  begin_ = std::chrono::steady_clock::now();
}

double Stopwatch::stop([[maybe_unused]] Stream stream) {
#if GDNFLOW_WITH_CUDA
  if (events_) {
    check(cudaEventRecord(events_->end, stream), "recording an event");
    check(cudaEventSynchronize(events_->end), "running on the GPU");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_->begin, events_->end), "reading events");
    return milliseconds;
  }
#endif
  const std::chrono::duration<double, std::milli> passed =
      std::chrono::steady_clock::now() - begin_;
  return passed.count();
}

double clock_rate([[maybe_unused]] Device device) {
#if GDNFLOW_WITH_CUDA
  int kilohertz = 0;
  check(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device.index),
        "reading the clock rate");
  return 1e3 * kilohertz;
#else
  no_cuda();
#endif
}

void copy_within([[maybe_unused]] void* destination, [[maybe_unused]] const void* source,
                 [[maybe_unused]] std::int64_t bytes, [[maybe_unused]] Stream stream) {
#if GDNFLOW_WITH_CUDA
  check(cudaMemcpyAsync(destination, source, static_cast<std::size_t>(bytes),
                        cudaMemcpyDeviceToDevice, stream),
        "copying on the GPU");
#else
  no_cuda();
#endif
}

void fill_within([[maybe_unused]] void* destination, [[maybe_unused]] int value,
                 [[maybe_unused]] std::int64_t bytes, [[maybe_unused]] Stream stream) {
#if GDNFLOW_WITH_CUDA
  check(cudaMemsetAsync(destination, value, static_cast<std::size_t>(bytes), stream),
        "setting GPU memory");
#else
  no_cuda();
#endif
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0;
  std::int64_t resident = 0;
  if (!(file >> all >> resident)) {
    throw Error(ErrorCode::io, "/proc/self/statm: expected this process's pages, got none");
  }
  return resident * sysconf(_SC_PAGESIZE);
}

std::int64_t free_memory([[maybe_unused]] Device device) {
#if GDNFLOW_WITH_CUDA
  std::size_t available = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&available, &total), "reading the free memory");
  return static_cast<std::int64_t>(available);
#else
  no_cuda();
#endif
}

}  // namespace gdnflow::apps
