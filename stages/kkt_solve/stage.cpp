#include "ports.hpp"

namespace gdnflow::stages::kkt_solve {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant tensor_core();
Variant naive();
#endif

Stage stage() {
  return {
      "kkt_solve",
      "inverse of each chunk's unit lower triangular matrix",
      ports({k(), beta(), g_cumsum(), out("A", TypeRule::working, {"T", "Hv", "C"})},
            chunk_ports()),
      {
#if GDNFLOW_WITH_CUDA
          tensor_core(),
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::kkt_solve
