#include "ports.hpp"

namespace gdnflow::stages::gate {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "gate",
      "turns raw gates, alpha and logits into log decay and beta",
      ports(gate_ports(), std::vector<Port>{out("g_ready", TypeRule::f32, {"T", "Hv"}),
                                            out("beta_ready", TypeRule::f32, {"T", "Hv"})}),
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::gate
