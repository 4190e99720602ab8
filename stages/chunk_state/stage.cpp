#include "ports.hpp"

namespace gdnflow::stages::chunk_state {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "chunk_state",
      "the state recurrence over chunks, document form",
      ports({k(), in("w", TypeRule::working, {"T", "Hv", "Dk"}),
             in("u", TypeRule::working, {"T", "Hv", "Dv"}), g_cumsum(),
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

}  // namespace gdnflow::stages::chunk_state
