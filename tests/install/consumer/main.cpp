#include <gdnflow/gdnflow.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <vector>

// One token through the whole library: with q = k and no state before it, the recurrence gives
// S = beta k v^T and o = scale * |k|^2 * beta * v.

int main() {
  constexpr std::int64_t heads = 2, dim = 4;
  gdnflow::Problem problem;
  problem.qk_heads = problem.v_heads = heads;
  problem.qk_dim = problem.v_dim = dim;
  problem.activation = gdnflow::DType::f32;
  problem.cu_seqlens = false;
  problem.scale = 1.0F;

  std::vector<float> k(heads * dim, 0.5F), v(heads * dim, 3.0F), o(heads * dim);
  std::vector<float> g(heads, -0.25F), beta(heads, 0.5F), state(heads * dim * dim);
  const auto view = [](std::vector<float>& data, std::initializer_list<std::int64_t> extents) {
    return gdnflow::TensorView::dense(data.data(), gdnflow::DType::f32, extents);
  };
  gdnflow::PrefillTensors tensors;
  tensors.q = tensors.k = view(k, {1, heads, dim});
  tensors.v = view(v, {1, heads, dim});
  tensors.o = view(o, {1, heads, dim});
  tensors.g = view(g, {1, heads});
  tensors.beta = view(beta, {1, heads});
  tensors.final_state = view(state, {1, heads, dim, dim});

  const std::int64_t bytes = gdnflow::prefill_workspace_bytes(problem, {1, 1}, gdnflow::Device{});
  constexpr std::align_val_t alignment{256};
  const auto release = [](void* memory) { ::operator delete(memory, alignment); };
  const std::unique_ptr<void, decltype(release)> workspace(
      ::operator new(static_cast<std::size_t>(bytes) + 1, alignment), release);
  gdnflow::prefill(problem, tensors, workspace.get(), bytes);

  for (const float x : o) {
    if (std::abs(x - 1.5F) > 1e-6F) {
      std::printf("expected 1.5, got %g\n", static_cast<double>(x));
      return 1;
    }
  }
  for (const float x : state) {
    if (std::abs(x - 0.75F) > 1e-6F) {
      std::printf("expected a state of 0.75, got %g\n", static_cast<double>(x));
      return 1;
    }
  }
  std::printf("gdnflow %s, %s\n", gdnflow::version(),
              gdnflow::built_with_cuda() ? "with its GPU stages" : "host only");
  return 0;
}
