#pragma once

#include <gdnflow/device.hpp>

#include "common/program.hpp"

#include <cstdint>
#include <memory>
#include <string>

struct CUctx_st;
struct CUgreenCtx_st;

namespace gdnflow::apps {

/// Keeps the CUDA work of this thread on a part of a GPU's multiprocessors, by a green context that
/// is current from construction to destruction: device_info() then says how many there are, and
/// streams, graphs and kernels made in between run on them alone. Memory is the whole card's, and
/// so are L2 and the memory's bandwidth. Make it before any other work of the process on the GPU,
/// and let nothing made under it outlive it.
class MultiprocessorLimit {
 public:
  /// Takes `asked` multiprocessors where the hardware's granularity allows it, else the least
  /// number above. Errors: UsageError where the device has fewer, gdnflow::Error (cuda) where the
  /// driver refuses, (unsupported) in a build without CUDA.
  MultiprocessorLimit(Device device, std::int64_t asked);
  ~MultiprocessorLimit();
  MultiprocessorLimit(const MultiprocessorLimit&) = delete;
  MultiprocessorLimit& operator=(const MultiprocessorLimit&) = delete;

  /// "limited to 16 of 132 multiprocessors (asked for 14)".
  std::string text() const;

 private:
  std::int64_t asked_ = 0;
  std::int64_t got_ = 0;
  std::int64_t all_ = 0;
  CUctx_st* previous_ = nullptr;
  CUgreenCtx_st* green_ = nullptr;
};

/// --sms N.
void add_limit_option(po::options_description& options);
/// Chooses the device (use_device) and makes the limit that --sms asks for; null without it.
/// Errors: UsageError on the host, and those of MultiprocessorLimit.
std::unique_ptr<MultiprocessorLimit> limited_device(const po::variables_map& arguments,
                                                    Device device);

}  // namespace gdnflow::apps
