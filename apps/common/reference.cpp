#include "common/reference.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>
#include <vector>

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

RunningReference::RunningReference(const Problem& problem, std::int64_t most_tokens, Device device)
    : problem_(problem),
      device_(device),
      o_row_(static_cast<std::int64_t>(problem.v_heads) * problem.v_dim),
      carried_(make_tensor(device, DType::f32, state_extents(problem, 1))) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(double));
  o_ = Memory(device, most_tokens * o_row_ * size);
  state_ = Memory(device, carried_.view.elements() * size);
  fill_bytes(state_.data(), device, 0, state_.bytes());
  fill_bytes(carried_.view.data, device, 0, carried_.view.bytes());
}

void RunningReference::advance(OracleInputs rows) {
  const std::int64_t count = rows.q.extents[0];
  rows.initial_state = carried_.view;
  rows.cu_seqlens = {0, count};
  auto* const o = static_cast<double*>(o_.data()) + tokens_ * o_row_;
  auto* const state = static_cast<double*>(state_.data());
  std::vector<double> behind;
  if (device_.type == DeviceType::cuda) {
    oracle_on_device(problem_, rows, o, state);
    behind.resize(static_cast<std::size_t>(carried_.view.elements()));
    download(behind.data(), state, device_, state_.bytes());
  } else {
    OracleResult result = oracle_recurrent(problem_, rows);
    std::copy(result.o.begin(), result.o.end(), o);
    std::copy(result.final_state.begin(), result.final_state.end(), state);
    behind = std::move(result.final_state);
  }
  const std::vector<float> rounded(behind.begin(), behind.end());
  upload(carried_.view.data, device_, rounded.data(), carried_.view.bytes());
  tokens_ += count;
}

Comparison RunningReference::o(std::int64_t first, const TensorView& got) const {
  return compare_with(got, static_cast<const double*>(o_.data()) + first * o_row_);
}

Comparison RunningReference::state(const TensorView& got) const {
  return compare_with(got, static_cast<const double*>(state_.data()));
}

Comparison RunningReference::compare_with(const TensorView& got, const double* expected) const {
  if (device_.type == DeviceType::cuda) return compare_on_device(got, expected);
  return compare(got, std::span(expected, static_cast<std::size_t>(got.elements())));
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
