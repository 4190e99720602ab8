#include "replay/bucket_cost.hpp"

#include <gdnflow/session.hpp>

#include "replay/engine.hpp"

#include <array>

namespace gdnflow::apps::replay {

std::vector<BucketCost> bucket_costs(const Problem& problem, std::int64_t sequences,
                                     const PrefillOptions& prefill, const Draw& draw, Device device,
                                     Stream stream) {
  constexpr std::array<std::int64_t, 2> buckets{192, 2048};
  constexpr double seconds = 0.5;
  // Buffers of the largest, so that each bucket is bound to as many rows as it has.
  Engine engine(problem, {buckets.back(), sequences}, 1, 1, draw, device);
  engine.draw_pools(draw.seed);
  const std::array<Piece, 1> pieces{{{0, 0, bucket_cost_tokens, 0, true, true}}};
  engine.set_step(pieces);
  const PrefillTensors tensors = engine.tensors(0);
  std::vector<BucketCost> costs;
  for (const std::int64_t tokens : buckets) {
    PrefillSession session(problem, {{tokens, sequences}}, device, {prefill, true});
    const Timing time = measure([&] { session.run(tensors, bucket_cost_tokens, 1, stream); },
                                device, stream, seconds);
    costs.push_back({tokens, time});
  }
  return costs;
}

}  // namespace gdnflow::apps::replay
