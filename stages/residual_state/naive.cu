// The recurrence over chunks in the residual form: W and U are never formed.
//
//   R  = beta .* (V - gamma .* (K S))     64 x 32, contracted over d_k       gamma_i = exp(gc_i)
//   V' = A R                              64 x 32, contracted over tokens
//   S <- exp(gc_l) S + K^T (exp(gc_l - gc) .* V')
//
// The walk, its tile picture and its costs are in state_walk.cuh; this file makes V'. R is rounded
// to the activations' type, in place of V, before it meets A.

#include "device/half.cuh"
#include "state_walk.cuh"

namespace gdnflow::stages::residual_state {
namespace {

using device::Slab;

template <class T, int D>
struct Form {
  using Config = StateWalkConfig<D>;

  struct Params : StateWalkParams<T> {
    device::Rows<const T> v;            // [T, Hv, D]
    device::Scalars<const float> beta;  // [T, Hv]
    device::Rows<const T> a;            // [T, Hv, 64]

    Params() = default;
    explicit Params(const StageCall& call)
        : StateWalkParams<T>(call), v(call["v"]), beta(call["beta"]), a(call["A"]) {}
  };

  struct Storage : StateWalkStorage<T, D> {
    device::Tile<T, Config::tokens, Config::columns> residual;  // V, then R
    device::Tile<T, Config::tokens, Config::tokens> a;
    float beta[Config::tokens];  // zero past the chunk's end
  };
  static_assert(sizeof(Storage) <= 64 * 1024, "fits any device from sm_80 on");

  __device__ static void load(Storage& shared, const Params& p, const device::Chunk& chunk,
                              const StateWalkPlace& place) {
    device::load_rows_async<Config::threads>(shared.residual,
                                             p.v.row(chunk.first_token, place.head) + place.column,
                                             p.v.token_stride, chunk.tokens);
    device::load_rows_async<Config::threads>(shared.a, p.a.row(chunk.first_token, place.head),
                                             p.a.token_stride, chunk.tokens);
    const int token = static_cast<int>(threadIdx.x);
    if (token < Config::tokens) {
      shared.beta[token] = token < chunk.tokens
                               ? p.beta.at(std::int64_t{chunk.first_token} + token, place.head)
                               : 0.0F;
    }
  }

  __device__ static Slab<Config::width> values(Storage& shared, const Params&, const device::Chunk&,
                                               const StateWalkPlace&) {
    const int row = device::warp() * 16;
    Slab<Config::width> slab;
    slab.clear();
    device::multiply_add<T, D>(
        slab, [&](int k) { return device::load_a(shared.k, row, k); },
        [&](int k, int n) { return device::load_b(shared.state, k, n); });
    // Each thread turns the elements of V that it alone reads into R.
    slab.for_each_pair([&](int r, int c, float x0, float x1) {
      const int i = row + r;
      auto* pair = reinterpret_cast<std::uint32_t*>(shared.residual.at(i, c));
      const float2 v = device::unpack<T>(*pair);
      const float beta = shared.beta[i];
      const float gamma = shared.decays.from_start[i];
      *pair = device::pack<T>(beta * (v.x - gamma * x0), beta * (v.y - gamma * x1));
    });
    __syncthreads();
    slab.clear();
    device::multiply_add<T, Config::tokens>(
        slab, [&](int k) { return device::load_a(shared.a, row, k); },
        [&](int k, int n) { return device::load_b(shared.residual, k, n); });
    return slab;
  }
};

// Three blocks a multiprocessor, as it comes out anyway: said, so that nothing spills for it.
template <class T, int D>
__global__ void __launch_bounds__(StateWalkConfig<D>::threads, 3)
    residual_state_kernel(const __grid_constant__ typename Form<T, D>::Params p) {
  walk_states<T, D, Form<T, D>>(p, device::dynamic_shared<typename Form<T, D>::Storage>());
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, state_walk_blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) {
  return accepts_vectors(call, {"k", "v", "A", "v_new", "chunk_states"});
}

void steps(const StageCall& call, StepList& out) {
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    using F = Form<T, D>;
    out.push_back(kernel_step<typename F::Params>(
        "residual_state", residual_state_kernel<T, D>,
        grid_of(state_walk_blocks(call.problem, call.capacity)), {StateWalkConfig<D>::threads},
        sizeof(typename F::Storage), typename F::Params(call)));
  });
}

}  // namespace

Variant naive() {
  Variant variant;
  variant.id = "naive";
  variant.description = "a block walks the chunks of 32 columns of a head; state in registers";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.working_type = activation_type;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::residual_state
