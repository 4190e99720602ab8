#include "ports.hpp"

namespace gdnflow::stages::chunk_cumsum {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant split_scan();
Variant naive();
#endif

Stage stage() {
  return {
      "chunk_cumsum",
      "prefix sum of the log decay within each chunk",
      ports({in("g", TypeRule::f32, {"T", "Hv"}), out("g_cumsum", TypeRule::f32, {"T", "Hv"})},
            chunk_ports()),
      {
#if GDNFLOW_WITH_CUDA
          split_scan(),
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::chunk_cumsum
