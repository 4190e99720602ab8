#include "ports.hpp"

namespace gdnflow::stages::one_pass {

Variant host();
#if GDNFLOW_WITH_SM90A
Variant one_pass();
#endif
#if GDNFLOW_WITH_CUDA
Variant recurrent();
#endif

Stage stage() {
  return {
      "one_pass",
      "the whole forward pass from the gates",
      ports({q(), k(), v()}, gate_ports(),
            std::vector<Port>{optional(in("cu_seqlens", TypeRule::index, {"N+1"})),
                              optional(in("prefix_lens", TypeRule::index, {"N"})), o()},
            state_ports()),
      {
#if GDNFLOW_WITH_SM90A
          one_pass(),
#endif
#if GDNFLOW_WITH_CUDA
          recurrent(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::one_pass
