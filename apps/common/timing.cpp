#include "common/timing.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

namespace gdnflow::apps {

double percentile(std::span<const double> sorted, double percent) {
  if (sorted.empty()) return 0;
  const auto count = static_cast<double>(sorted.size());
  const double rank = std::clamp(std::ceil(percent / 100 * count), 1.0, count);
  return sorted[static_cast<std::size_t>(rank) - 1];
}

Timing measure(const std::function<void()>& enqueue, Device device, Stream stream, double seconds) {
  constexpr int least_samples = 5;
  constexpr int most_samples = 1000;
  constexpr int most_calls = 100;
  constexpr double sample_ms = 0.5;
  const auto begin = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };

  Stopwatch watch(device);
  watch.start(stream);
  enqueue();
  double once_ms = watch.stop(stream);
  int calls = 1;
  if (device.type == DeviceType::cuda) {
    // The first call may have waited for a cold clock; the second says how long one takes.
    watch.start(stream);
    enqueue();
    once_ms = watch.stop(stream);
    calls =
        std::clamp(static_cast<int>(std::ceil(sample_ms / std::max(once_ms, 1e-3))), 1, most_calls);
  }
  std::vector<double> samples;
  while (samples.size() < most_samples && (samples.size() < least_samples || spent() < seconds)) {
    watch.start(stream);
    for (int call = 0; call < calls; ++call) enqueue();
    samples.push_back(watch.stop(stream) / calls);
  }
  std::sort(samples.begin(), samples.end());
  return {percentile(samples, 50), samples.front(), static_cast<int>(samples.size())};
}

}  // namespace gdnflow::apps
