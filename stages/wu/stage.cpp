#include "ports.hpp"

namespace gdnflow::stages::wu {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "wu",
      "W and U of the document form",
      ports(
          {k(), v(), beta(), g_cumsum(), a_matrix(), out("w", TypeRule::working, {"T", "Hv", "Dk"}),
           out("u", TypeRule::working, {"T", "Hv", "Dv"})},
          chunk_ports()),
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::wu
