#include "common/trace.hpp"

#if GDNFLOW_WITH_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace gdnflow::apps {

#if GDNFLOW_WITH_NVTX

namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("gdnflow");
  return handle;
}

}  // namespace

TraceRange::TraceRange(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  nvtxDomainRangePushEx(domain(), &attributes);
}

TraceRange::~TraceRange() { nvtxDomainRangePop(domain()); }

#else

TraceRange::TraceRange(const std::string& /*name*/) {}

TraceRange::~TraceRange() = default;

#endif

}  // namespace gdnflow::apps
