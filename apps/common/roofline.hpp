#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/problem.hpp>

#include <cstdint>
#include <span>
#include <string>

namespace gdnflow::apps {

/// What a forward pass must move and multiply, whatever computes it: every input read once and
/// every output written once; per chunk and value head K S, Q S and K^T V' (C x Dk x Dv each), A R
/// and P V' (C x C x Dv each), per chunk and q/k head K K^T and Q K^T (C x C x Dk each).
struct Work {
  double bytes = 0;
  double macs = 0;
};

Work required_work(const Problem& problem, std::span<const std::int64_t> lengths);

/// The ceilings of a GPU.
struct Roofline {
  double bytes_per_second = 0;  ///< read and written together, of a large copy, measured
  double macs_per_second = 0;   ///< of tensor cores on 16-bit operands; 0: not known
  std::string tensor_source;    ///< where the rate comes from

  bool known() const { return bytes_per_second > 0; }
};

/// Measures the copy and looks the tensor rate up, for the multiprocessors that the information
/// names. `whole_card`: they are all that the card has, which then meets its power limit. On the
/// host: nothing is known.
Roofline measure_roofline(const DeviceInfo& device, bool whole_card = true);

/// No implementation can be faster than this, in milliseconds. 0 where the roofline is not known.
double floor_ms(const Work& work, const Roofline& roofline);

}  // namespace gdnflow::apps
