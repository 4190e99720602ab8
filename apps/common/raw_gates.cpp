#include "common/raw_gates.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace gdnflow::apps {
namespace {

/// f of every element, in fp64, as fp32.
template <class F>
OwnedTensor mapped(const TensorView& tensor, F&& f) {
  const OwnedTensor host = copy_to_host(tensor);
  OwnedTensor result = copy_to({}, host.view, DType::f32);
  auto* const x = result.view.as<float>();
  std::transform(x, x + result.view.elements(), x,
                 [&](float value) { return static_cast<float>(f(double{value})); });
  return result;
}

/// In place of tensor `from` another, `to`, of the activations' type: `there` of each element. What
/// `back` gives of the rounded ones is ready.
template <class There, class Back>
void replace(Workload& workload, const char* from, const char* to, There&& there, Back&& back) {
  const Device device = workload.device;
  OwnedTensor raw =
      copy_to(device, mapped(workload.view(from), there).view, workload.problem.activation);
  workload.ready[from] = copy_to(device, mapped(raw.view, back).view, DType::f32);
  workload.tensors[to] = std::move(raw);
  workload.tensors.erase(from);
}

}  // namespace

void hand_over_raw_gates(Workload& workload) {
  const Problem& p = workload.problem;
  if (p.gate == GateForm::raw) {
    // A_log and dt_bias are zero: g = -softplus(a).
    replace(
        workload, "g", "a", [](double g) { return std::log(std::expm1(-g)); },
        [](double a) { return -(std::max(a, 0.0) + std::log1p(std::exp(-std::abs(a)))); });
    for (const char* const name : {"a_log", "dt_bias"}) {
      OwnedTensor zero =
          make_tensor(workload.device, DType::f32, std::array{std::int64_t{p.v_heads}});
      fill_bytes(zero.view.data, workload.device, 0, zero.view.bytes());
      workload.tensors[name] = std::move(zero);
    }
  }
  if (p.beta == BetaForm::logit) {
    replace(
        workload, "beta", "b", [](double beta) { return std::log(beta / (1.0 - beta)); },
        [](double b) { return 1.0 / (1.0 + std::exp(-b)); });
  }
}

}  // namespace gdnflow::apps
