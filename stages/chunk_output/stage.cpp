#include "ports.hpp"

namespace gdnflow::stages::chunk_output {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "chunk_output",
      "the output of every chunk from its state and new values",
      ports({q(), k(), in("v_new", TypeRule::working, {"T", "Hv", "Dv"}),
             in("chunk_states", TypeRule::working, {"NC", "Hv", "Dk", "Dv"}), g_cumsum(), o()},
            chunk_ports()),
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::chunk_output
