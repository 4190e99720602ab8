#include <gdnflow/version.hpp>

namespace gdnflow {

const char* version() noexcept { return GDNFLOW_VERSION; }

}  // namespace gdnflow
