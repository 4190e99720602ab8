#include <gdnflow/device.hpp>
#include <gdnflow/error.hpp>

#include <fmt/format.h>

#if GDNFLOW_WITH_CUDA
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
#include <unistd.h>

namespace gdnflow {
namespace {

DeviceInfo host_info() {
  DeviceInfo info;
  info.name = "host";
#ifdef _OPENMP
  info.multiprocessors = omp_get_max_threads();
#else
  info.multiprocessors = 1;
#endif
  info.memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) *
                      static_cast<std::int64_t>(sysconf(_SC_PAGE_SIZE));
  return info;
}

#if GDNFLOW_WITH_CUDA
void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::cuda, fmt::format("{}: {}", what, cudaGetErrorString(status)));
  }
}

/// A function of the driver, or null where it has none of that name.
template <class Function>
Function driver_function(const char* name, unsigned version) noexcept {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(entry);
}

/// The multiprocessors of this thread's current context, or 0 where that is not a context of the
/// device or does not say. A green context has fewer than the device.
std::int32_t context_multiprocessors(int device) noexcept {
  static const auto get_current =
      driver_function<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
  static const auto get_resource =
      driver_function<PFN_cuCtxGetDevResource_v12040>("cuCtxGetDevResource", 12040);
  if (get_current == nullptr || get_resource == nullptr) return 0;
  CUcontext context = nullptr;
  if (get_current(&context) != CUDA_SUCCESS || context == nullptr) return 0;
  int current = 0;
  if (cudaGetDevice(&current) != cudaSuccess || current != device) return 0;
  CUdevResource resource{};
  if (get_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) return 0;
  return static_cast<std::int32_t>(resource.sm.smCount);
}

DeviceInfo cuda_info(Device device) {
  const int count = cuda_device_count();
  if (device.index < 0 || device.index >= count) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("CUDA device: expected an ordinal below {}, got {}", count, device.index));
  }
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, device.index), "cudaGetDeviceProperties");
  DeviceInfo info;
  info.device = device;
  info.name = p.name;
  info.capability = 10 * p.major + p.minor;
  const std::int32_t of_context = context_multiprocessors(device.index);
  info.multiprocessors = of_context > 0 ? of_context : p.multiProcessorCount;
  info.shared_bytes_per_block = static_cast<std::int64_t>(p.sharedMemPerBlockOptin);
  info.l2_bytes = p.l2CacheSize;
  info.memory_bytes = static_cast<std::int64_t>(p.totalGlobalMem);
  check(cudaDriverGetVersion(&info.driver_version), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&info.runtime_version), "cudaRuntimeGetVersion");
  return info;
}
#endif

}  // namespace

bool built_with_cuda() noexcept { return GDNFLOW_WITH_CUDA != 0; }

int cuda_device_count() noexcept {
#if GDNFLOW_WITH_CUDA
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    // No driver or no device is an answer here; the sticky error must not reach a later check.
    (void)cudaGetLastError();
    return 0;
  }
  return count;
#else
  return 0;
#endif
}

DeviceInfo device_info(Device device) {
  if (device.type == DeviceType::host) return host_info();
#if GDNFLOW_WITH_CUDA
  return cuda_info(device);
#else
  throw Error(ErrorCode::unsupported,
              fmt::format("device {}: this build of gdnflow has no CUDA", to_string(device)));
#endif
}

std::string to_string(const DeviceInfo& info) {
  if (info.device.type == DeviceType::host) {
    return fmt::format("host, {} thread{}", info.multiprocessors,
                       info.multiprocessors == 1 ? "" : "s");
  }
  return fmt::format("{}, sm_{}, {} multiprocessors, {} KiB shared memory a block", info.name,
                     info.capability, info.multiprocessors, info.shared_bytes_per_block / 1024);
}

}  // namespace gdnflow
