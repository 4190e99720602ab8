#pragma once

#include <gdnflow/executor.hpp>

#include "bound_plan.hpp"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow {

/// Memory of an arena with the way to give it back; null where the caller owns it.
using ArenaMemory = std::unique_ptr<void, void (*)(void*)>;

/// What the executors have in common: tensors, the arena's owner, and the order of a build.
class ExecutorBase : public Executor {
 public:
  const Plan& plan() const noexcept override { return bound_.plan(); }
  void bind(const Bindings& bindings) override;
  void build() override;
  void set_enabled(std::string_view node, bool enabled) override;
  TensorView intermediate(std::string_view edge) const override;

 protected:
  /// Errors: invalid_argument for a plan of another target, an arena that is too small or not
  /// aligned, a choice of nodes without the arena and plan that it takes, or launches behind the
  /// caller's where programmatic ones are switched off.
  ExecutorBase(Plan plan, ExecutorOptions options, DeviceType target, std::string_view kind);

  /// Makes the executable from the work in force. Called once, and again after it has thrown.
  virtual void build_executable() = 0;
  /// Carries a proposal into the executable, wholly or not at all. Called when built.
  virtual void update_executable() {}
  virtual void switch_node(int /*node*/, bool /*enabled*/) {}

  /// As in the options.
  bool behind_callers() const noexcept { return options_.behind_callers; }
  /// Errors: invalid_argument before `build`.
  void require_built() const;
  /// Errors: invalid_argument for a number below 1.
  void require_repeats(int repeats) const;

  BoundPlan bound_;
  bool built_ = false;

 private:
  ExecutorOptions options_;
  ArenaMemory memory_{nullptr, nullptr};
  EdgeTensors resolved_;  ///< kept for its memory
};

/// Memory for intermediates on a plan's device. Errors: unsupported on the host, cuda.
ArenaMemory allocate_arena(const Plan& plan, std::int64_t bytes);

/// The median; reorders the samples.
double median(std::vector<double>& samples);

}  // namespace gdnflow
