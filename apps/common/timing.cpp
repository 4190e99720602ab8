#include "common/timing.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

namespace gdnflow::apps {
namespace {

/// Takes samples, each in milliseconds, until `seconds` have passed since `begin`.
template <class F>
Timing sample(std::chrono::steady_clock::time_point begin, double seconds, F&& next) {
  constexpr int least_samples = 5;
  constexpr int most_samples = 1000;
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::vector<double> samples;
  while (samples.size() < most_samples && (samples.size() < least_samples || spent() < seconds)) {
    samples.push_back(next());
  }
  std::sort(samples.begin(), samples.end());
  return {percentile(samples, 50), samples.front(), static_cast<int>(samples.size())};
}

}  // namespace

double percentile(std::span<const double> sorted, double percent) {
  if (sorted.empty()) return 0;
  const auto count = static_cast<double>(sorted.size());
  const double rank = std::clamp(std::ceil(percent / 100 * count), 1.0, count);
  return sorted[static_cast<std::size_t>(rank) - 1];
}

Percentiles percentiles(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {percentile(samples, 50), percentile(samples, 95), percentile(samples, 99)};
}

Timing measure(const std::function<void()>& enqueue, Device device, Stream stream, double seconds) {
  constexpr int most_calls = 100;
  constexpr double sample_ms = 0.5;
  const auto begin = std::chrono::steady_clock::now();
  Stopwatch watch(device);
  watch.start(stream);
  enqueue();
  static_cast<void>(watch.stop(stream));
  int calls = 1;
  if (device.type == DeviceType::cuda) {
    // The first call may have waited for a cold clock; the second says how long one takes.
    watch.start(stream);
    enqueue();
    const double once_ms = watch.stop(stream);
    calls =
        std::clamp(static_cast<int>(std::ceil(sample_ms / std::max(once_ms, 1e-3))), 1, most_calls);
  }
  return sample(begin, seconds, [&] {
    watch.start(stream);
    for (int call = 0; call < calls; ++call) enqueue();
    return watch.stop(stream) / calls;
  });
}

Timing measure_behind(const std::function<void()>& before, const std::function<void()>& enqueue,
                      Device device, Stream stream, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  Stopwatch watch(device);
  const auto once = [&] {
    before();
    // Recorded behind what came before, so the clock starts when that has ended; by then the host
    // has enqueued the call.
    watch.start(stream);
    enqueue();
    return watch.stop(stream);
  };
  once();
  return sample(begin, seconds, once);
}

CacheFlush::CacheFlush(const DeviceInfo& info) : buffer_(info.device, 2 * info.l2_bytes) {}

void CacheFlush::enqueue(Stream stream) const {
  fill_within(buffer_.data(), 0, buffer_.bytes(), stream);
}

}  // namespace gdnflow::apps
