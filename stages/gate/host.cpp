#include "gate/inputs.hpp"
#include "host/matrix.hpp"
#include "host/parallel.hpp"
#include "host/variant.hpp"

#include <algorithm>
#include <cmath>

// g = -exp(A_log) softplus(a + dt_bias), or log(alpha), or g as it is; beta = sigmoid(b), or beta
// as it is. In fp64: the sums under softplus cancel, and the work is small.

namespace gdnflow::stages::gate {
namespace {

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// An fp32 element per head; 0 where the tensor is not connected.
double of_head(const TensorView& view, std::int64_t head) {
  return view.data == nullptr ? 0.0 : view.as<const float>()[head * view.strides[0]];
}

void run(const StageCall& call) {
  const Problem& p = call.problem;
  const TensorView& g_in = call[p.gate == GateForm::raw ? "a" : "g"];
  const TensorView& beta_in = call[p.beta == BetaForm::logit ? "b" : "beta"];
  const TensorView& a_log = call["a_log"];
  const TensorView& dt_bias = call["dt_bias"];

  const auto log_decay = [&](double x, std::int64_t head) {
    switch (p.gate) {
      case GateForm::log_decay:
        return x;
      case GateForm::alpha:
        return std::log(x);
      case GateForm::raw:
        return -std::exp(of_head(a_log, head)) * softplus(x + of_head(dt_bias, head));
    }
    return x;
  };
  const auto convert = [](const TensorView& in, const TensorView& out, std::int64_t head,
                          std::int64_t first, std::int64_t count, auto&& f) {
    host::Vector column;
    host::load(host::column_of(in, head, first, count), column);
    for (float& x : column) x = static_cast<float>(f(static_cast<double>(x)));
    host::store(column, host::column_of(out, head, first, count));
  };
  host::parallel_for_tokens(call.tokens, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t head = 0; head < p.v_heads; ++head) {
      convert(g_in, call["g_ready"], head, first, count,
              [&](double x) { return log_decay(x, head); });
      convert(beta_in, call["beta_ready"], head, first, count,
              [&](double x) { return p.beta == BetaForm::logit ? sigmoid(x) : x; });
    }
  });
}

void steps(const StageCall& /*call*/, StepList& out) { out.push_back({"gate", HostCall{run}}); }

}  // namespace

Variant host() {
  Variant variant = host::host_variant("element by element in fp64", steps);
  variant.accepts = has_inputs;
  return variant;
}

}  // namespace gdnflow::stages::gate
