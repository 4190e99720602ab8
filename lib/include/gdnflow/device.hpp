#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <string>

struct CUstream_st;

namespace gdnflow {

/// A CUDA stream; the same type as `cudaStream_t`, named without CUDA's headers so that a host-only
/// program includes the same headers. Null is the default stream.
using Stream = CUstream_st*;

/// What a variant needs to know of the machine to accept or refuse a problem.
struct DeviceInfo {
  Device device{};
  std::string name;
  std::int32_t capability = 0;       ///< 10 * major + minor; 0 on the host
  std::int32_t multiprocessors = 0;  ///< a green context's where one is current; host: threads
  std::int64_t shared_bytes_per_block = 0;  ///< the opt-in limit
  std::int64_t l2_bytes = 0;
  std::int64_t memory_bytes = 0;
  std::int32_t driver_version = 0;   ///< as cudaDriverGetVersion gives it
  std::int32_t runtime_version = 0;  ///< as cudaRuntimeGetVersion gives it

  friend bool operator==(const DeviceInfo&, const DeviceInfo&) = default;
};

/// Whether the library was built with its CUDA stages.
GDNFLOW_API bool built_with_cuda() noexcept;

/// The number of usable CUDA devices; 0 where there is no driver, no device, or no CUDA build.
GDNFLOW_API int cuda_device_count() noexcept;

/// Reads the properties of a device. Errors: unsupported for a CUDA device of a build without
/// CUDA, invalid_argument for an ordinal that does not exist.
GDNFLOW_API DeviceInfo device_info(Device device);

/// One line: "NVIDIA H200, sm_90, 132 multiprocessors, 227 KiB shared memory a block".
GDNFLOW_API std::string to_string(const DeviceInfo& info);

}  // namespace gdnflow
