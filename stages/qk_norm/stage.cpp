#include "ports.hpp"

namespace gdnflow::stages::qk_norm {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "qk_norm",
      "L2-normalises q and k",
      {q(), k(), out("q_normalized", TypeRule::working, {"T", "Hqk", "Dk"}),
       out("k_normalized", TypeRule::working, {"T", "Hqk", "Dk"})},
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::qk_norm
