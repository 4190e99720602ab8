// x / sqrt(sum of x^2 + 1e-6) for every row of q and k, in fp32, rounded once. D/8 lanes take a
// row, eight elements each; bytes in equal bytes out, so this runs at the speed of memory. Rows
// that no sequence owns are normalised too: nobody reads them.

#include "cuda_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "device/half.cuh"
#include "device/views.cuh"
#include "qk_norm/epsilon.hpp"

namespace gdnflow::stages::qk_norm {
namespace {

template <int D>
struct Config {
  static constexpr int threads = 256;
  static constexpr int lanes = D / 8;  // of a row
  static constexpr int rows = threads / lanes;
  static_assert(lanes <= 32 && 32 % lanes == 0, "a row stays within a warp");
};

template <class T>
struct Params {
  device::Rows<const T> q;  // [T, Hqk, D]
  device::Rows<const T> k;  // [T, Hqk, D]
  device::Rows<T> q_normalized;
  device::Rows<T> k_normalized;
  std::int64_t rows;   // of each that there are, at most T Hqk
  std::int32_t heads;  // Hqk
};

template <class T, int D>
__device__ void normalize(const T* in, T* out, int lane) {
  float x[8];
  device::load_8(x, in + 8 * lane);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
#pragma unroll
  for (int step = 1; step < Config<D>::lanes; step *= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, step);
  }
  const float norm = sqrtf(sum + epsilon);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] /= norm;
  device::store_8(out + 8 * lane, x);
}

template <class T, int D>
__global__ void __launch_bounds__(Config<D>::threads)
    qk_norm_kernel(const __grid_constant__ Params<T> p) {
  using C = Config<D>;
  device::allow_successors();
  device::wait_for_predecessors();
  const std::int64_t first = std::int64_t{blockIdx.x} * C::rows;
  if (first >= 2 * p.rows) return;
  // Every lane takes part in the shuffles; those past the end repeat the last row.
  const std::int64_t mine = first + threadIdx.x / C::lanes;
  const std::int64_t row = min(mine, 2 * p.rows - 1);
  const std::int64_t in_tensor = row % p.rows;
  const std::int64_t token = in_tensor / p.heads;
  const std::int64_t head = in_tensor % p.heads;
  const int lane = static_cast<int>(threadIdx.x) % C::lanes;
  if (row < p.rows) {
    normalize<T, D>(p.q.row(token, head), p.q_normalized.row(token, head), lane);
  } else {
    normalize<T, D>(p.k.row(token, head), p.k_normalized.row(token, head), lane);
  }
}

std::int64_t rows(const Problem& problem, const Capacity& capacity) {
  return capacity.max_tokens * problem.qk_heads;
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  const int rows_a_block = problem.qk_dim == 64 ? Config<64>::rows : Config<128>::rows;
  return ceil_div(2 * rows(problem, capacity), rows_a_block);
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) {
  return accepts_vectors(call, {"q", "k", "q_normalized", "k_normalized"});
}

void steps(const StageCall& call, StepList& out) {
  if (rows(call.problem, call.capacity) == 0) return;
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    Params<T> params{};
    params.q = device::Rows<const T>(call["q"]);
    params.k = device::Rows<const T>(call["k"]);
    params.q_normalized = device::Rows<T>(call["q_normalized"]);
    params.k_normalized = device::Rows<T>(call["k_normalized"]);
    params.rows = call.tokens * call.problem.qk_heads;
    params.heads = call.problem.qk_heads;
    out.push_back(programmatic(kernel_step("qk_norm", qk_norm_kernel<T, D>,
                                           grid_of(blocks(call.problem, call.capacity)),
                                           {Config<D>::threads}, 0, params)));
  });
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "a few lanes a row, in fp32";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::qk_norm
