#include "common/reference.hpp"

#include "common/tensors.hpp"

#include <algorithm>
#include <limits>

namespace gdnflow::apps {

Reference::Reference(const Problem& problem, const OracleInputs& inputs)
    : tokens_(inputs.cu_seqlens.back()), on_device_(inputs.q.device.type == DeviceType::cuda) {
  if (!on_device_) {
    host_ = oracle_recurrent(problem, inputs);
    return;
  }
  const auto sequences = static_cast<std::int64_t>(inputs.cu_seqlens.size()) - 1;
  const std::int64_t row = static_cast<std::int64_t>(problem.v_heads) * problem.v_dim;
  constexpr auto size = static_cast<std::int64_t>(sizeof(double));
  device_o_ = Memory(inputs.q.device, tokens_ * row * size);
  device_state_ = Memory(inputs.q.device, sequences * row * problem.qk_dim * size);
  oracle_on_device(problem, inputs, static_cast<double*>(device_o_.data()),
                   static_cast<double*>(device_state_.data()));
}

Comparison Reference::o(const TensorView& got) const {
  const TensorView rows = first_rows(got, tokens_);
  if (on_device_) return compare_on_device(rows, static_cast<const double*>(device_o_.data()));
  return compare(rows, host_.o);
}

Comparison Reference::final_state(const TensorView& got) const {
  if (on_device_) return compare_on_device(got, static_cast<const double*>(device_state_.data()));
  return compare(got, host_.final_state);
}

Comparison for_report(Comparison comparison) {
  if (comparison.nonfinite_mismatches > 0) {
    comparison.relative_rms = comparison.max_abs = std::numeric_limits<double>::quiet_NaN();
  }
  return comparison;
}

Bounds bounds_for(const Problem& problem, bool correlated) {
  const auto of_type = [](DType type) {
    if (type == DType::f32) return 1e-5;
    return type == DType::f16 ? 1e-3 : 5e-3;
  };
  const double activation = of_type(problem.activation);
  Bounds bounds{activation, std::max(activation, of_type(problem.state))};
  if (correlated && problem.activation == DType::bf16) bounds.o = 8e-3;
  return bounds;
}

}  // namespace gdnflow::apps
