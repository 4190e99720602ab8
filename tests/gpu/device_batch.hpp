#pragma once

#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "gpu/device_externals.hpp"
#include "support/engine_batch.hpp"
#include "support/gpu.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

/// An engine's batches on a device, and sessions that serve them.
namespace gdnflow::test {

inline constexpr Device gpu{DeviceType::cuda, 0};
/// Of the relative RMS error against the oracle.
inline constexpr double gpu_bound = 5e-3;

inline Problem small_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  return p;
}

inline Problem raw_problem() {
  Problem p = small_problem();
  p.gate = GateForm::raw;
  p.beta = BetaForm::logit;
  p.qk_norm = true;
  return p;
}

/// Slots -1, an empty sequence with a slot, one of a token, and a fresh one whose slot holds what
/// another request left.
inline std::vector<EngineSequence> mixed_batch() {
  return {{.tokens = 70, .slot = 3},
          {.tokens = 0, .slot = 5},
          {.tokens = 1, .slot = -1},
          {.tokens = 65, .slot = 0, .started = false},
          {.tokens = 200, .slot = 4}};
}

/// The recipes that this GPU can run for a problem.
inline std::vector<std::string> runnable(const Problem& problem) {
  std::vector<std::string> ids;
  for (const Recipe& recipe : recipes()) {
    if (is_excluded(recipe.id)) continue;
    if (can_make_pipeline(recipe.id, problem, {512, 8}, device_info(gpu))) {
      ids.emplace_back(recipe.id);
    }
  }
  REQUIRE_FALSE(ids.empty());
  return ids;
}

/// A batch on the device, poisoned outputs and all.
class DeviceBatch {
 public:
  explicit DeviceBatch(EngineBatch batch) : batch_(std::move(batch)), device_(batch_.externals()) {}

  const EngineBatch& host() const noexcept { return batch_; }
  std::int64_t tokens() const noexcept { return batch_.tokens(); }
  std::int64_t count() const noexcept { return batch_.count(); }
  PrefillTensors tensors() const {
    return prefill_tensors([&](const std::string& name, TensorView& view) {
      if (batch_.externals().tensors().contains(name)) view = device_.view(name);
    });
  }
  PrefillTensors exact() const { return exact_rows(tensors(), tokens(), count()); }
  /// Another batch of the same buffers, in the same memory.
  void become(EngineBatch batch) {
    batch_ = std::move(batch);
    device_.overwrite(batch_.externals());
  }
  void poison() { device_.overwrite(batch_.externals()); }
  void check() { batch_.check(device_.download(), gpu_bound); }
  const Externals& download() { return device_.download(); }
  std::vector<unsigned char> bits() { return device_.bits(); }

 private:
  EngineBatch batch_;
  DeviceExternals device_;
};

inline PrefillSession session_of(const Problem& problem, std::vector<Capacity> buckets,
                                 const std::string& recipe = "", bool graphs = true) {
  return {problem, std::move(buckets), gpu, {.prefill = {.recipe = recipe}, .graphs = graphs}};
}

/// Bytes that the current device has free once it is idle.
inline std::int64_t free_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return static_cast<std::int64_t>(free);
}

}  // namespace gdnflow::test
