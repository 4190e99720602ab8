#pragma once

#include <gdnflow/prefill.hpp>

#include "common/tensors.hpp"
#include "replay/scheduler.hpp"
#include "replay/settings.hpp"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace gdnflow::apps::replay {

/// What an engine keeps for prefill: a pool of states for each layer, in whose rows checkpoints
/// are, too; activations that layers share in turn (two sets, so that pointers change from layer to
/// layer); and metadata of the step. All at their largest; a step uses the first rows.
class Engine {
 public:
  Engine(const Problem& problem, const Capacity& largest, std::int64_t layers,
         std::int64_t pool_rows, const Draw& draw, Device device);

  const Problem& problem() const { return problem_; }
  Device device() const { return device_; }
  std::int64_t layers() const { return static_cast<std::int64_t>(pools_.size()); }

  /// Sets of activations.
  std::int64_t sets() const { return std::ssize(activations_); }

  /// Every row holds NaN: what a fresh sequence must not read.
  void poison_pools() const;
  /// Every row holds a state.
  void draw_pools(std::uint64_t seed) const;
  /// Lengths, prefixes, flags, and the rows that are read and written in a step. What an earlier
  /// step left behind them stays there. Waits.
  void set_step(std::span<const Piece> pieces);
  /// As many sequences as there can be, all empty, a slot each. Waits.
  void set_empty_step();

  PrefillTensors tensors(std::int64_t layer) const;
  /// Of a layer's set: q, k, v, g, beta or o.
  const TensorView& activation(std::int64_t layer, std::string_view name) const;
  /// One row of a layer's pool, [1, Hv, r, c].
  TensorView state(std::int64_t layer, std::int32_t row) const;

 private:
  Problem problem_;
  Device device_;
  std::vector<Workload> activations_;
  std::vector<OwnedTensor> pools_;
  OwnedTensor cu_seqlens_;
  OwnedTensor prefix_lens_;
  OwnedTensor state_indices_;
  OwnedTensor output_state_indices_;
  OwnedTensor has_initial_state_;
  OwnedTensor checkpoint_state_indices_;
};

/// Rows of q, k, v, g and beta for a problem, and of o.
Workload make_activations(Problem problem, const Capacity& capacity, const Draw& draw,
                          Device device);

}  // namespace gdnflow::apps::replay
