#include "host/chunk_table.hpp"
#include "host/matrix.hpp"
#include "host/variant.hpp"
#include "segments/plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

// The plan of segments in fp64, slot by slot. Tensors that the stage writes are intermediates,
// dense.

namespace gdnflow::stages::segments {
namespace {

class Planner {
 public:
  explicit Planner(const StageCall& call)
      : call_(call), table_(call), sequences_(call.capacity.max_sequences) {}

  void run() {
    auto* const slots = call_["segment_slots"].as<Slot>();
    const std::int64_t capacity = slot_count(call_.problem, call_.capacity, call_.device);
    std::fill_n(slots, capacity, Slot{-1, 0, 0, 0});
    const Cut cut = cut_sequences();
    std::int64_t number = 0;
    for (std::int64_t n = 0; n < sequences_; ++n) {
      const auto first = static_cast<std::int32_t>(table_.first_of(n));
      const std::int32_t chunks = chunks_of(n);
      const std::int32_t count = cut.segments(chunks);
      for (std::int32_t i = 0; i < count; ++i, ++number) {
        slots[number] = {static_cast<std::int32_t>(n), first + Cut::border(chunks, count, i),
                         first + Cut::border(chunks, count, i + 1), i};
        find_starts(number, slots[number], first);
      }
    }
    for (; number < capacity; ++number) find_starts(number, slots[number], 0);
  }

 private:
  std::int32_t chunks_of(std::int64_t n) const {
    return static_cast<std::int32_t>(table_.first_of(n + 1) - table_.first_of(n));
  }

  Cut cut_sequences() const {
    const auto useful = static_cast<std::int32_t>(useful_segments(call_.problem, call_.device));
    const auto total = static_cast<std::int32_t>(table_.chunks());
    if (useful <= 1 || total == 0) return Cut::none();
    const Cut fine = Cut::into(total, useful);
    Cut::Pieces pieces{0, total, 0};
    std::int32_t running = 0;
    for (std::int64_t n = 0; n < sequences_; ++n) {
      const std::int32_t chunks = chunks_of(n);
      if (chunks == 0) continue;
      const std::int32_t count = fine.segments(chunks);
      ++running;
      pieces.count += count;
      pieces.shortest = std::min(pieces.shortest, chunks / count);
      pieces.longest = std::max(pieces.longest, chunks);
    }
    return Cut::choose(total, running, useful, pieces);
  }

  double log2_bound_of_chunk(std::int64_t index, std::int32_t head) {
    const host::Chunk chunk = table_[index];
    host::load(host::rows_of(call_["k"], call_.problem.qk_head_of(head), chunk.first, chunk.tokens),
               k_);
    host::load(host::column_of(call_["beta"], head, chunk.first, chunk.tokens), beta_);
    host::load(host::column_of(call_["g_cumsum"], head, chunk.first, chunk.tokens), gc_);
    double growth = 0.0;
    for (std::int64_t i = 0; i < chunk.tokens; ++i) {
      const double square = call_.problem.qk_norm ? 1.01 : k_.row(i).squaredNorm();
      growth += std::log2(std::max(1.0, std::abs(1.0 - beta_[i] * square)));
    }
    return growth + gc_[chunk.tokens - 1] * std::numbers::log2e;
  }

  void find_starts(std::int64_t number, const Slot& slot, std::int32_t first) {
    const std::int32_t heads = call_.problem.v_heads;
    auto* const starts = call_["segment_starts"].as<std::int32_t>() + number * heads;
    auto* const bounds = call_["segment_bounds"].as<float>() + number * heads;
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    for (std::int32_t head = 0; head < heads; ++head) {
      starts[head] = slot.begin;
      bounds[head] = nothing;
      if (slot.sequence < 0 || slot.number == 0) continue;
      starts[head] = -1;
      double sum = 0.0;
      const std::int32_t least = std::max(first, slot.begin - most_lead);
      for (std::int32_t chunk = slot.begin - 1; chunk >= least && starts[head] < 0; --chunk) {
        sum += log2_bound_of_chunk(chunk, head);
        if ((chunk - first) % segment_grain == 0 && sum <= log2_resolution + log2_margin) {
          starts[head] = chunk;
          if (chunk > first) bounds[head] = static_cast<float>(sum);
        }
      }
    }
  }

  const StageCall& call_;
  host::ChunkTable table_;
  std::int64_t sequences_;
  host::Matrix k_;
  host::Vector beta_, gc_;
};

void run(const StageCall& call) { Planner(call).run(); }

void steps(const StageCall& /*call*/, StepList& out) { out.push_back({"segments", HostCall{run}}); }

}  // namespace

Variant host() {
  Variant variant = host::host_variant("bounds in fp64", steps);
  variant.supports = supports_mode;
  return variant;
}

}  // namespace gdnflow::stages::segments
