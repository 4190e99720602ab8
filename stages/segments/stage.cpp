#include "ports.hpp"
#include "segments/plan.hpp"

#include <algorithm>

namespace gdnflow::stages::segments {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant backward_walk();
#endif

std::int64_t useful_segments(const Problem& problem, const DeviceInfo& device) {
  return gdnflow::useful_segments(problem, device.multiprocessors);
}

Support supports_mode(const VariantQuery& query) {
  if (query.problem.mode == Mode::fastest) return Support::yes();
  return Support::no("mode: expected fastest, got batch_invariant: cuts depend on the whole call");
}

std::int64_t segments_alone(const Problem& problem) {
  if (problem.mode != Mode::batch_invariant) return 0;
  Problem model = problem;
  if (problem.model_v_heads != 0) model.v_heads = problem.model_v_heads;
  constexpr std::int32_t width = 128;  // about that of the machines there are
  return gdnflow::useful_segments(model, width);
}

std::int64_t slot_count(const Problem& problem, const Capacity& capacity,
                        const DeviceInfo& device) {
  const std::int64_t alone = segments_alone(problem);
  if (alone == 0) return capacity.max_sequences + useful_segments(problem, device);
  const std::int64_t cuts =
      std::min((alone - 1) * capacity.max_sequences, max_chunks(problem, capacity) / segment_grain);
  return capacity.max_sequences + cuts;
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
