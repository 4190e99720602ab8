// The stage by itself, a thread an element.

#include <gdnflow/stage.hpp>

#include "cuda_variant.hpp"
#include "device/dependent_launch.cuh"
#include "gate/inputs.hpp"
#include "gate/table.cuh"

namespace gdnflow::stages::gate {
namespace {

__global__ void __launch_bounds__(Table::threads) gate_kernel(const __grid_constant__ Table p) {
  const std::int64_t index = std::int64_t{blockIdx.x} * Table::threads + threadIdx.x;
  device::allow_successors();
  device::wait_for_predecessors();
  if (index < p.elements) find_gates(p, index / p.heads, static_cast<int>(index % p.heads));
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  return ceil_div(capacity.max_tokens * problem.v_heads, Table::threads);
}

Support supports(const VariantQuery& query) {
  return supports_cuda(query, blocks(query.problem, query.capacity));
}

void steps(const StageCall& call, StepList& out) {
  const TensorView& g = call["g_ready"];
  const TensorView& beta = call["beta_ready"];
  const Table table(call, g.as<float>(), g.strides[0], beta.as<float>(), beta.strides[0]);
  out.push_back(
      programmatic(kernel_step("gate", gate_kernel, grid_of(blocks(call.problem, call.capacity)),
                               {Table::threads}, 0, table)));
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
