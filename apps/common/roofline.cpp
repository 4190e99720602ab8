#include "common/roofline.hpp"

#include "common/device.hpp"
#include "common/timing.hpp"

#include <algorithm>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

// Dense bf16 multiply-adds a clock and multiprocessor, with fp32 accumulation. `sustained` is the
// part of it that a large matrix product reaches at the card's power limit: 808 TFLOP/s of 1070
// for 8192^3 on an H200; 1 where no card was measured, and for a part of a card, which is far from
// that limit, so that the floor stays a floor.
// Architectures whose rate differs between products of one capability are not listed.
struct TensorRate {
  std::int32_t capability;
  double macs_per_clock;
  double sustained;
};
constexpr TensorRate tensor_rates[] = {
    {80, 1024, 1.0},
    {90, 2048, 0.755},
    {100, 4096, 1.0},
};

double copy_bandwidth(const DeviceInfo& info) {
  // Large against any L2, small against the memory.
  const std::int64_t bytes =
      std::min<std::int64_t>(std::int64_t{1} << 30, free_memory(info.device) / 8);
  const Memory source(info.device, bytes);
  const Memory destination(info.device, bytes);
  fill_bytes(source.data(), info.device, 0, bytes);
  const OwnedStream stream(info.device);
  constexpr double seconds = 0.1;
  const Timing timing =
      measure([&] { copy_within(destination.data(), source.data(), bytes, stream.get()); },
              info.device, stream.get(), seconds);
  return 2.0 * static_cast<double>(bytes) / (timing.median_ms * 1e-3);
}

}  // namespace

Work required_work(const Problem& problem, std::span<const std::int64_t> lengths) {
  std::int64_t tokens = 0;
  std::int64_t chunks = 0;
  for (const std::int64_t length : lengths) {
    tokens += length;
    chunks += (length + chunk_tokens - 1) / chunk_tokens;
  }
  const double hqk = problem.qk_heads;
  const double hv = problem.v_heads;
  const double dk = problem.qk_dim;
  const double dv = problem.v_dim;
  const double c = chunk_tokens;
  const auto element = static_cast<double>(size_of(problem.activation));
  const double token_bytes =
      2 * hqk * dk * element + 2 * hv * dv * element + 2 * hv * sizeof(float);
  const double states = (problem.initial_state ? 1 : 0) + (problem.final_state ? 1 : 0);
  const double state_bytes = hv * dk * dv * static_cast<double>(size_of(problem.state));
  const double chunk_macs = hv * (3 * c * dk * dv + 2 * c * c * dv) + hqk * (2 * c * c * dk);
  return {static_cast<double>(tokens) * token_bytes +
              static_cast<double>(lengths.size()) * states * state_bytes,
          static_cast<double>(chunks) * chunk_macs};
}

Roofline measure_roofline(const DeviceInfo& info, bool whole_card) {
  Roofline roofline;
  if (info.device.type == DeviceType::host) return roofline;
  roofline.bytes_per_second = copy_bandwidth(info);
  roofline.tensor_source = fmt::format("tensor rate of sm_{} not known", info.capability);
  for (const TensorRate& rate : tensor_rates) {
    if (rate.capability != info.capability) continue;
    const double clock = clock_rate(info.device);
    const double sustained = whole_card ? rate.sustained : 1.0;
    roofline.macs_per_second = rate.macs_per_clock * sustained * clock * info.multiprocessors;
    roofline.tensor_source =
        fmt::format("{} multiply-adds a clock x {} multiprocessors x {:.2f} GHz x {} sustained",
                    rate.macs_per_clock, info.multiprocessors, clock * 1e-9, sustained);
  }
  return roofline;
}

double floor_ms(const Work& work, const Roofline& roofline) {
  if (!roofline.known()) return 0;
  double seconds = work.bytes / roofline.bytes_per_second;
  if (roofline.macs_per_second > 0) {
    seconds = std::max(seconds, work.macs / roofline.macs_per_second);
  }
  return seconds * 1e3;
}

}  // namespace gdnflow::apps
