#pragma once

#include "common/device.hpp"

#include <chrono>
#include <functional>
#include <span>
#include <vector>

namespace gdnflow::apps {

struct Timing {
  double median_ms = 0;
  double least_ms = 0;
  int samples = 0;
};

/// Times a repeatable piece of work: a warm-up, then samples for about `seconds`, at least five. On
/// a GPU a sample is a run of back-to-back calls between two events, long enough (half a
/// millisecond) that the events' own cost and the host's launch do not count; caches are warm. On
/// the host a sample is one call by a steady clock.
Timing measure(const std::function<void()>& enqueue, Device device, Stream stream, double seconds);

/// The same with something enqueued ahead of every sample that is not timed. A sample is one call
/// on any device, so a few microseconds of events and launch are in it.
Timing measure_behind(const std::function<void()>& before, const std::function<void()>& enqueue,
                      Device device, Stream stream, double seconds);

/// Makes a GPU's L2 cold: writes a buffer of twice its size, so that nothing of what ran before is
/// left in it.
class CacheFlush {
 public:
  explicit CacheFlush(const DeviceInfo& info);
  void enqueue(Stream stream) const;

 private:
  Memory buffer_;
};

/// The value below which `percent` of the sorted samples lie (nearest rank). Errors: none; 0 for
/// no samples.
double percentile(std::span<const double> sorted, double percent);

struct Percentiles {
  double p50 = 0;
  double p95 = 0;
  double p99 = 0;
};
Percentiles percentiles(std::vector<double> samples);

/// Microseconds of host time that `work` takes.
template <class F>
double host_microseconds(F&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

}  // namespace gdnflow::apps
