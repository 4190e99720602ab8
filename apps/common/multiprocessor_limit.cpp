#include "common/multiprocessor_limit.hpp"

#include <gdnflow/error.hpp>

#include "common/arguments.hpp"
#include "common/device.hpp"

#include <string_view>
#include <utility>

#include <fmt/format.h>

#if GDNFLOW_WITH_CUDA
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#endif

namespace gdnflow::apps {
namespace {

#if GDNFLOW_WITH_CUDA

[[noreturn]] void fail(std::string_view call, std::string_view reason) {
  throw Error(ErrorCode::cuda, fmt::format("limiting the multiprocessors: {}: {}", call, reason));
}

/// The driver's functions, looked up through the runtime so that the program links no libcuda and
/// starts on a machine without one.
class Driver {
 public:
  Driver() {
    find(get_error_string, "cuGetErrorString", 6000);
    find(device_get, "cuDeviceGet", 2000);
    find(get_current, "cuCtxGetCurrent", 4000);
    find(set_current, "cuCtxSetCurrent", 4000);
    find(get_device_resource, "cuDeviceGetDevResource", 12040);
    find(split_by_count, "cuDevSmResourceSplitByCount", 12040);
    find(generate_description, "cuDevResourceGenerateDesc", 12040);
    find(create_green, "cuGreenCtxCreate", 12040);
    find(destroy_green, "cuGreenCtxDestroy", 12040);
    find(context_from_green, "cuCtxFromGreenCtx", 12040);
    find(get_green_resource, "cuGreenCtxGetDevResource", 12040);
  }

  void check(CUresult status, std::string_view call) const {
    if (status != CUDA_SUCCESS) fail(call, text(status));
  }

  std::string text(CUresult status) const {
    const char* words = nullptr;
    if (get_error_string(status, &words) != CUDA_SUCCESS || words == nullptr) {
      return fmt::format("error {}", static_cast<int>(status));
    }
    return words;
  }

  PFN_cuGetErrorString_v6000 get_error_string = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuCtxGetCurrent_v4000 get_current = nullptr;
  PFN_cuCtxSetCurrent_v4000 set_current = nullptr;
  PFN_cuDeviceGetDevResource_v12040 get_device_resource = nullptr;
  PFN_cuDevSmResourceSplitByCount_v12040 split_by_count = nullptr;
  PFN_cuDevResourceGenerateDesc_v12040 generate_description = nullptr;
  PFN_cuGreenCtxCreate_v12040 create_green = nullptr;
  PFN_cuGreenCtxDestroy_v12040 destroy_green = nullptr;
  PFN_cuCtxFromGreenCtx_v12040 context_from_green = nullptr;
  PFN_cuGreenCtxGetDevResource_v12040 get_green_resource = nullptr;

 private:
  template <class Function>
  static void find(Function& function, const char* name, unsigned version) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
    if (status != cudaSuccess) fail(name, cudaGetErrorString(status));
    if (found != cudaDriverEntryPointSuccess) {
      fail(name, "expected a driver that has green contexts (550 or newer)");
    }
    function = reinterpret_cast<Function>(entry);
  }
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

/// The smallest part of the device with at least `asked` multiprocessors. Whole groups that are
/// scheduled together, in which any cluster shape can run, come before loose multiprocessors where
/// they are no more.
CUdevResource part_of(const CUdevResource& all, unsigned asked) {
  CUdevResource best{};
  CUresult refusal = CUDA_SUCCESS;
  for (const unsigned flags : {0U, unsigned{CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING}}) {
    CUdevResource part{};
    unsigned groups = 1;
    const CUresult status = driver().split_by_count(&part, &groups, &all, nullptr, flags, asked);
    if (status != CUDA_SUCCESS) {
      refusal = status;
    } else if (groups == 1 && part.sm.smCount >= asked &&
               (best.sm.smCount == 0 || part.sm.smCount < best.sm.smCount)) {
      best = part;
    }
  }
  if (best.sm.smCount == 0) {
    fail("cuDevSmResourceSplitByCount", refusal == CUDA_SUCCESS
                                            ? "found no part with that many multiprocessors"
                                            : driver().text(refusal));
  }
  return best;
}

#endif

}  // namespace

#if GDNFLOW_WITH_CUDA

MultiprocessorLimit::MultiprocessorLimit(Device device, std::int64_t asked) : asked_(asked) {
  // The primary context first: the runtime then has set itself up in it, and the green context
  // shares it.
  const cudaError_t status = cudaSetDevice(device.index);
  if (status != cudaSuccess) fail("cudaSetDevice", cudaGetErrorString(status));
  const Driver& d = driver();
  CUdevice ordinal = 0;
  d.check(d.device_get(&ordinal, device.index), "cuDeviceGet");
  d.check(d.get_current(&previous_), "cuCtxGetCurrent");
  CUdevResource all{};
  d.check(d.get_device_resource(ordinal, &all, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
  all_ = all.sm.smCount;
  if (asked > all_) {
    throw UsageError(fmt::format("--sms: expected at most the {} multiprocessors of {}, got {}",
                                 all_, to_string(device), asked));
  }
  CUdevResource part = part_of(all, static_cast<unsigned>(asked));
  CUdevResourceDesc description = nullptr;
  d.check(d.generate_description(&description, &part, 1), "cuDevResourceGenerateDesc");
  d.check(d.create_green(&green_, description, ordinal, CU_GREEN_CTX_DEFAULT_STREAM),
          "cuGreenCtxCreate");
  try {
    CUdevResource provisioned{};
    d.check(d.get_green_resource(green_, &provisioned, CU_DEV_RESOURCE_TYPE_SM),
            "cuGreenCtxGetDevResource");
    got_ = provisioned.sm.smCount;
    CUcontext context = nullptr;
    d.check(d.context_from_green(&context, green_), "cuCtxFromGreenCtx");
    d.check(d.set_current(context), "cuCtxSetCurrent");
  } catch (...) {
    (void)d.destroy_green(green_);
    throw;
  }
}

MultiprocessorLimit::~MultiprocessorLimit() {
  (void)driver().set_current(previous_);
  (void)driver().destroy_green(green_);
}

#else

MultiprocessorLimit::MultiprocessorLimit(Device device, std::int64_t asked) : asked_(asked) {
  throw Error(ErrorCode::unsupported,
              fmt::format("limiting {} to {} multiprocessors: this build has no GPU stages",
                          to_string(device), asked));
}

MultiprocessorLimit::~MultiprocessorLimit() = default;

#endif

std::string MultiprocessorLimit::text() const {
  return fmt::format("limited to {} of {} multiprocessors{}", got_, all_,
                     got_ == asked_ ? "" : fmt::format(" (asked for {})", asked_));
}

void add_limit_option(po::options_description& options) {
  options.add_options()("sms", po::value<std::int64_t>()->value_name("N"),
                        "use N of the GPU's multiprocessors only, or as many more as the hardware "
                        "hands out together");
}

std::unique_ptr<MultiprocessorLimit> limited_device(const po::variables_map& arguments,
                                                    Device device) {
  if (!has(arguments, "sms")) {
    use_device(device);
    return nullptr;
  }
  const std::int64_t asked = count(arguments, "sms", 1);
  if (device.type == DeviceType::host) {
    throw UsageError(fmt::format("--sms: expected a GPU to limit, got the host and {}", asked));
  }
  return std::make_unique<MultiprocessorLimit>(device, asked);
}

}  // namespace gdnflow::apps
