// g = -exp(A_log) softplus(a + dt_bias), or log(alpha), or g as it is; beta = sigmoid(b), or beta
// as it is. A thread an element, in fp32: 8 bytes out, 4 to 8 in.

#include <gdnflow/stage.hpp>

#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "gate/inputs.hpp"

namespace gdnflow::stages::gate {
namespace {

struct Config {
  static constexpr int threads = 256;
};

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

struct Params {
  Elements gate;         // [T, Hv]: a, alpha or g
  Elements beta;         // [T, Hv]: b or beta
  const float* a_log;    // [Hv], for the raw gate
  const float* dt_bias;  // [Hv], or null: zero
  float* g_ready;        // [T, Hv]
  float* beta_ready;     // [T, Hv]
  std::int64_t g_stride;
  std::int64_t beta_stride;
  std::int64_t elements;  // of the rows that there are, at most T Hv
  std::int32_t heads;     // Hv
  GateForm gate_form;
  BetaForm beta_form;
};

/// log(1 + exp(x)), without overflow for large x and without cancellation for small.
__device__ float softplus(float x) { return fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x))); }

__device__ float log_decay(const Params& p, float x, int head) {
  if (p.gate_form == GateForm::log_decay) return x;
  if (p.gate_form == GateForm::alpha) return logf(x);
  const float bias = p.dt_bias != nullptr ? p.dt_bias[head] : 0.0F;
  return -expf(p.a_log[head]) * softplus(x + bias);
}

__global__ void __launch_bounds__(Config::threads) gate_kernel(const __grid_constant__ Params p) {
  const std::int64_t index = std::int64_t{blockIdx.x} * Config::threads + threadIdx.x;
  device::allow_successors();
  device::wait_for_predecessors();
  if (index >= p.elements) return;
  const std::int64_t token = index / p.heads;
  const int head = static_cast<int>(index % p.heads);
  const float beta = p.beta.at(token, head);
  p.g_ready[token * p.g_stride + head] = log_decay(p, p.gate.at(token, head), head);
  p.beta_ready[token * p.beta_stride + head] =
      p.beta_form == BetaForm::logit ? 1.0F / (1.0F + expf(-beta)) : beta;
}

std::int64_t elements(const Problem& problem, const Capacity& capacity) {
  return capacity.max_tokens * problem.v_heads;
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return ceil_div(elements(problem, capacity), Config::threads);
}

Support supports(const VariantQuery& query) {
  return supports_cuda(query, blocks(query.problem, query.capacity));
}

void steps(const StageCall& call, StepList& out) {
  const Problem& problem = call.problem;
  Params params{};
  params.gate = Elements(call[problem.gate == GateForm::raw ? "a" : "g"]);
  params.beta = Elements(call[problem.beta == BetaForm::logit ? "b" : "beta"]);
  params.a_log = call["a_log"].as<const float>();
  params.dt_bias = call["dt_bias"].as<const float>();
  params.g_ready = call["g_ready"].as<float>();
  params.beta_ready = call["beta_ready"].as<float>();
  params.g_stride = call["g_ready"].strides[0];
  params.beta_stride = call["beta_ready"].strides[0];
  params.elements = call.tokens * problem.v_heads;
  params.heads = problem.v_heads;
  params.gate_form = problem.gate;
  params.beta_form = problem.beta;
  out.push_back(programmatic(kernel_step(
      "gate", gate_kernel, grid_of(blocks(problem, call.capacity)), {Config::threads}, 0, params)));
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "a thread an element, in fp32";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.accepts = has_inputs;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::gate
