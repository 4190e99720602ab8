#include "ports.hpp"
#include "segments/plan.hpp"

namespace gdnflow::stages::segments {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant backward_walk();
#endif

std::int64_t useful_segments(const Problem& problem, const DeviceInfo& device) {
  return gdnflow::useful_segments(problem, device.multiprocessors);
}

std::int64_t slot_count(const Problem& problem, const Capacity& capacity,
                        const DeviceInfo& device) {
  return capacity.max_sequences + useful_segments(problem, device);
}

Stage stage() {
  return {
      "segments",
      "cuts sequences where their past has faded",
      ports({k(), g_cumsum(), beta()}, chunk_ports(),
            std::vector{out("segment_slots", TypeRule::i32, {"NS", 4}),
                        out("segment_starts", TypeRule::i32, {"NS", "Hv"}),
                        out("segment_bounds", TypeRule::f32, {"NS", "Hv"})}),
      {
#if GDNFLOW_WITH_CUDA
          backward_walk(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::segments
