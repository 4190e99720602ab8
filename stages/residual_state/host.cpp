#include "host/state_walk.hpp"
#include "host/variant.hpp"

// V' = A (beta .* (V - gamma .* (K S))), then the state's step; host/state_walk.hpp is the walk.

namespace gdnflow::stages::residual_state {
namespace {

class StoredResidualForm {
 public:
  explicit StoredResidualForm(const StageCall& call) : residual_(call), outputs_(call) {}

  void operator()(const host::WalkPosition& at, host::Matrix& new_values) {
    residual_(at, new_values);
    outputs_.store(at, new_values);
  }

 private:
  host::ResidualForm residual_;
  host::ChunkStateOutputs outputs_;
};

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"residual_state", HostCall{host::walk_states<StoredResidualForm>}});
}

}  // namespace

Variant host() { return host::host_variant("parallel over sequences and heads", steps); }

}  // namespace gdnflow::stages::residual_state
