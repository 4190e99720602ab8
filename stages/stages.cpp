#include <gdnflow/stages.hpp>

// The list of stages, in the order of the forward pass. An explicit list: static registration
// would be dropped by the linker from a static library and would hide the order.

namespace gdnflow {

#define GDNFLOW_STAGES(apply)                                                                 \
  apply(chunk_index) apply(qk_norm) apply(gate) apply(chunk_cumsum) apply(segments)           \
      apply(kkt_solve) apply(wu) apply(chunk_state) apply(residual_state) apply(chunk_output) \
          apply(fused_prefill) apply(one_pass) apply(zero_padding)

#define GDNFLOW_DECLARE(name) \
  namespace stages::name {    \
  Stage stage();              \
  }
GDNFLOW_STAGES(GDNFLOW_DECLARE)
#undef GDNFLOW_DECLARE

const Registry& builtin_stages() {
#define GDNFLOW_LIST(name) stages::name::stage(),
  static const Registry registry({GDNFLOW_STAGES(GDNFLOW_LIST)});
#undef GDNFLOW_LIST
  return registry;
}

}  // namespace gdnflow
