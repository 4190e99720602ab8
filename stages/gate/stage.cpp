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
      {optional(in("g", TypeRule::f32, {"T", "Hv"})),
       optional(in("a", TypeRule::activation, {"T", "Hv"})),
       optional(in("a_log", TypeRule::f32, {"Hv"})), optional(in("dt_bias", TypeRule::f32, {"Hv"})),
       optional(in("beta", TypeRule::f32, {"T", "Hv"})),
       optional(in("b", TypeRule::activation, {"T", "Hv"})),
       out("g_ready", TypeRule::f32, {"T", "Hv"}), out("beta_ready", TypeRule::f32, {"T", "Hv"})},
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::gate
