#include "ports.hpp"

namespace gdnflow::stages::zero_padding {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
#endif

Stage stage() {
  return {
      "zero_padding",
      "zeroes the rows of o that no sequence owns",
      {optional(in("cu_seqlens", TypeRule::index, {"N+1"})),
       port("o", Direction::inout, TypeRule::activation, {"T", "Hv", "Dv"})},
      {
#if GDNFLOW_WITH_CUDA
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::zero_padding
