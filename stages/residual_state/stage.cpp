#include "ports.hpp"

namespace gdnflow::stages::residual_state {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "residual_state",
      "the state recurrence over chunks, residual form",
      ports({k(), v(), beta(), g_cumsum(), a_matrix(),
             out("v_new", TypeRule::working, {"T", "Hv", "Dv"}),
             out("chunk_states", TypeRule::working, {"NC", "Hv", "Dk", "Dv"})},
            chunk_ports(), std::vector{checkpoint_offsets()}, state_ports()),
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::residual_state
