#include "ports.hpp"

namespace gdnflow::stages::fused_prefill {

Variant host();

Stage stage() {
  return {
      "fused_prefill",
      "state recurrence and output together",
      ports({q(), k(), v(), g_cumsum(), beta(), a_matrix(), o()}, chunk_ports(),
            std::vector{checkpoint_offsets()}, state_ports()),
      {
          host(),
      },
  };
}

}  // namespace gdnflow::stages::fused_prefill
