#include "host/state_walk.hpp"
#include "host/variant.hpp"

// The residual form and the output on one walk: neither the new values nor the chunks' states are
// stored.

namespace gdnflow::stages::fused_prefill {
namespace {

class OutputForm {
 public:
  explicit OutputForm(const StageCall& call)
      : problem_(call.problem), residual_(call), q_view_(call["q"]), o_view_(call["o"]) {}

  void operator()(const host::WalkPosition& at, host::Matrix& new_values) {
    residual_(at, new_values);
    const std::int32_t qk_head = problem_.qk_head_of(static_cast<std::int32_t>(at.head));
    host::load(host::rows_of(q_view_, qk_head, at.chunk.first, at.chunk.tokens), q_);
    scores_.noalias() = q_ * at.k.transpose();
    host::apply_decay(at.gc, scores_);
    host::output_rows(q_, scores_, at.gc, at.state, new_values, problem_.effective_scale(), o_);
    host::store(o_, host::rows_of(o_view_, at.head, at.chunk.first, at.chunk.tokens));
  }

 private:
  const Problem& problem_;
  host::ResidualForm residual_;
  TensorView q_view_, o_view_;
  host::Matrix q_, scores_, o_;
};

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"fused_prefill", HostCall{host::walk_states<OutputForm>}});
}

}  // namespace

Variant host() { return host::host_variant("parallel over sequences and heads", steps); }

}  // namespace gdnflow::stages::fused_prefill
