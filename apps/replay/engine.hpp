#pragma once

#include <gdnflow/prefill.hpp>

#include "common/tensors.hpp"
#include "replay/requests.hpp"
#include "replay/scheduler.hpp"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace gdnflow::apps::replay {

/// What an engine keeps for prefill: a pool of states for each layer, activations that layers share
/// in turn (two sets, so that pointers change from layer to layer), and metadata of the step. All
/// at their largest; a step uses the first rows.
class Engine {
 public:
  Engine(const Problem& problem, const Capacity& largest, std::int64_t layers, std::int64_t slots,
         std::uint64_t seed, Device device);

  const Problem& problem() const { return problem_; }
  Device device() const { return device_; }
  std::int64_t layers() const { return static_cast<std::int64_t>(pools_.size()); }

  /// Every slot holds NaN: what a fresh sequence must not read.
  void poison_pools() const;
  /// Every slot holds a state.
  void draw_pools(std::uint64_t seed) const;
  /// Lengths, slots, flags and prefixes of a step; states of cached prefixes into their slots.
  /// Waits.
  void set_step(std::span<const Piece> pieces, std::span<const Request> requests);
  /// As many sequences as there can be, all empty, a slot each. Waits.
  void set_empty_step();
  /// The state behind a request's cached prefix, as a [1, Hv, r, c] tensor; zero without one.
  void draw_prefix_state(const Request& request, std::int64_t layer, const TensorView& state) const;

  PrefillTensors tensors(std::int64_t layer) const;
  /// Of a layer's set: q, k, v, g, beta or o.
  const TensorView& activation(std::int64_t layer, std::string_view name) const;
  /// One slot of a layer's pool, [1, Hv, r, c].
  TensorView state(std::int64_t layer, std::int32_t slot) const;

 private:
  Problem problem_;
  Device device_;
  std::vector<Workload> activations_;
  std::vector<OwnedTensor> pools_;
  OwnedTensor cu_seqlens_;
  OwnedTensor prefix_lens_;
  OwnedTensor state_indices_;
  OwnedTensor has_initial_state_;
};

}  // namespace gdnflow::apps::replay
