#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/tensor.hpp>

#include <chrono>
#include <cstdint>
#include <memory>

namespace gdnflow::apps {

// Memory, streams and clocks that work alike on the host and on a GPU; with multiprocessor_limit
// the only part of the programs that calls CUDA. Errors: gdnflow::Error (cuda, unsupported), and
// std::bad_alloc on the host.

/// Makes the device the one that CUDA calls of this thread go to; a context of that device which is
/// current already stays. Nothing on the host.
void use_device(Device device);

/// Bytes on a device, owned, 256-byte aligned, uninitialised.
class Memory {
 public:
  Memory() = default;
  Memory(Device device, std::int64_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }

  void* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  Device device() const noexcept { return device_; }

 private:
  void swap(Memory& other) noexcept;

  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Device device_{};
};

/// Copies between the host and a device (or the host); waits.
void upload(void* destination, Device device, const void* source, std::int64_t bytes);
void download(void* destination, const void* source, Device device, std::int64_t bytes);
/// Sets every byte; waits.
void fill_bytes(void* destination, Device device, int value, std::int64_t bytes);
/// Waits for a stream. Not for the device: that would pass over the streams of a green context.
void synchronize(Device device, Stream stream = nullptr);

/// A stream of the device, owned; the null stream on the host.
class OwnedStream {
 public:
  explicit OwnedStream(Device device);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream get() const noexcept { return stream_; }

 private:
  Stream stream_ = nullptr;
};

/// Times work on a stream by events, or on the host by a steady clock.
class Stopwatch {
 public:
  explicit Stopwatch(Device device);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void start(Stream stream);
  /// Waits for the work enqueued since `start`; milliseconds.
  double stop(Stream stream);

 private:
  struct Events;
  std::unique_ptr<Events> events_;  ///< null on the host
  std::chrono::steady_clock::time_point begin_{};
};

/// The highest clock of a GPU's multiprocessors in Hz.
double clock_rate(Device device);
/// Copies within a GPU's memory, enqueued.
void copy_within(void* destination, const void* source, std::int64_t bytes, Stream stream);
/// Sets bytes of a GPU's memory, enqueued.
void fill_within(void* destination, int value, std::int64_t bytes, Stream stream);
/// Bytes of this process in the machine's memory. Errors: gdnflow::Error (io).
std::int64_t resident_bytes();
/// Free bytes of a GPU's memory.
std::int64_t free_memory(Device device);

}  // namespace gdnflow::apps
