#include "host/state_walk.hpp"
#include "host/variant.hpp"

// V' = U - W S, then the state's step; host/state_walk.hpp is the walk.

namespace gdnflow::stages::chunk_state {
namespace {

class DocumentForm {
 public:
  explicit DocumentForm(const StageCall& call)
      : w_view_(call["w"]), u_view_(call["u"]), outputs_(call) {}

  void operator()(const host::WalkPosition& at, host::Matrix& new_values) {
    host::load(host::rows_of(w_view_, at.head, at.chunk.first, at.chunk.tokens), w_);
    host::load(host::rows_of(u_view_, at.head, at.chunk.first, at.chunk.tokens), new_values);
    new_values.noalias() -= w_ * at.state;
    outputs_.store(at, new_values);
  }

 private:
  TensorView w_view_, u_view_;
  host::ChunkStateOutputs outputs_;
  host::Matrix w_;
};

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"chunk_state", HostCall{host::walk_states<DocumentForm>}});
}

}  // namespace

Variant host() { return host::host_variant("parallel over sequences and heads", steps); }

}  // namespace gdnflow::stages::chunk_state
