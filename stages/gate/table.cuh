#pragma once

// Log decay and beta from what a caller hands over, an element at a time in fp32: 8 bytes out, 4 to
// 8 in. For the stage, and for kernels that do without it.

#include <gdnflow/stage.hpp>

#include "device/element.cuh"

#include <cstdint>

namespace gdnflow::stages::gate {

/// A [T, Hv] tensor of any floating type.
struct Elements {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t token_stride = 0;

  Elements() = default;
  explicit Elements(const TensorView& view)
      : data(view.data), dtype(view.dtype), token_stride(view.strides[0]) {}

  __device__ float at(std::int64_t token, int head) const {
    return device::load_element(data, dtype, token * token_stride + head);
  }
};

/// g = -exp(A_log) softplus(a + dt_bias), or log(alpha), or g as it is; beta = sigmoid(b), or beta
/// as it is.
struct Table {
  static constexpr int threads = 256;

  Elements gate;                   // [T, Hv]: a, alpha or g
  Elements beta;                   // [T, Hv]: b or beta
  const float* a_log = nullptr;    // [Hv], for the raw gate
  const float* dt_bias = nullptr;  // [Hv], or null: zero
  float* g_ready = nullptr;        // [T, Hv]
  float* beta_ready = nullptr;     // [T, Hv]
  std::int64_t g_stride = 0;
  std::int64_t beta_stride = 0;
  std::int64_t elements = 0;  // of the rows that there are, at most T Hv
  std::int32_t heads = 0;     // Hv
  GateForm gate_form = GateForm::log_decay;
  BetaForm beta_form = BetaForm::ready;

  Table() = default;
  /// Inputs from the ports that the stage `gate` has.
  Table(const StageCall& call, float* g, std::int64_t g_token_stride, float* beta_to,
        std::int64_t beta_token_stride)
      : gate(call[call.problem.gate == GateForm::raw ? "a" : "g"]),
        beta(call[call.problem.beta == BetaForm::logit ? "b" : "beta"]),
        a_log(call["a_log"].as<const float>()),
        dt_bias(call["dt_bias"].as<const float>()),
        g_ready(g),
        beta_ready(beta_to),
        g_stride(g_token_stride),
        beta_stride(beta_token_stride),
        elements(call.tokens * call.problem.v_heads),
        heads(call.problem.v_heads),
        gate_form(call.problem.gate),
        beta_form(call.problem.beta) {}
};

/// log(1 + exp(x)), without overflow for large x and without cancellation for small.
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x)));
}

__device__ __forceinline__ float log_decay(const Table& p, float x, int head) {
  if (p.gate_form == GateForm::log_decay) return x;
  if (p.gate_form == GateForm::alpha) return logf(x);
  const float bias = p.dt_bias != nullptr ? p.dt_bias[head] : 0.0F;
  return -expf(p.a_log[head]) * softplus(x + bias);
}

__device__ __forceinline__ void find_gates(const Table& p, std::int64_t token, int head) {
  const float beta = p.beta.at(token, head);
  p.g_ready[token * p.g_stride + head] = log_decay(p, p.gate.at(token, head), head);
  p.beta_ready[token * p.beta_stride + head] =
      p.beta_form == BetaForm::logit ? 1.0F / (1.0F + expf(-beta)) : beta;
}

}  // namespace gdnflow::stages::gate
