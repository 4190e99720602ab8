#include "ports.hpp"

namespace gdnflow::stages::fused_prefill {

Variant host();
#if GDNFLOW_WITH_SM90A
Variant register_state();
Variant warp_specialized();
#endif
#if GDNFLOW_WITH_CUDA
Variant fused_128x512();
Variant fused_128();
Variant fused_64();
#endif

Stage stage() {
  return {
      "fused_prefill",
      "state recurrence and output together",
      ports({q(), k(), v(), g_cumsum(), beta(), a_matrix(), o()}, chunk_ports(),
            std::vector{checkpoint_offsets()}, state_ports(), segment_ports()),
      {
#if GDNFLOW_WITH_SM90A
          register_state(),
          warp_specialized(),
#endif
#if GDNFLOW_WITH_CUDA
          fused_128x512(),
          fused_128(),
          fused_64(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::fused_prefill
