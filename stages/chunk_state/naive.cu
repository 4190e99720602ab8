// The recurrence over chunks in the document form: W and U were made beforehand.
//
//   V' = U - W S                          64 x 32, contracted over d_k
//   S <- exp(gc_l) S + K^T (exp(gc_l - gc) .* V')
//
// The walk, its tile picture and its costs are in state_walk.cuh; this file makes V'.

#include "device/half.cuh"
#include "state_walk.cuh"

namespace gdnflow::stages::chunk_state {
namespace {

using device::Slab;

template <class T, int D>
struct Form {
  using Config = StateWalkConfig<D>;

  struct Params : StateWalkParams<T> {
    device::Rows<const T> w;  // [T, Hv, D]
    device::Rows<const T> u;  // [T, Hv, D]

    Params() = default;
    explicit Params(const StageCall& call) : StateWalkParams<T>(call), w(call["w"]), u(call["u"]) {}
  };

  struct Storage : StateWalkStorage<T, D> {
    device::Tile<T, Config::tokens, D> w;
    device::Tile<T, Config::tokens, Config::columns> u;
  };
  static_assert(sizeof(Storage) <= 64 * 1024, "fits any device from sm_80 on");

  __device__ static void load(Storage& shared, const Params& p, const device::Chunk& chunk,
                              const StateWalkPlace& place) {
    device::load_rows_async<Config::threads>(shared.w, p.w.row(chunk.first_token, place.head),
                                             p.w.token_stride, chunk.tokens);
    device::load_rows_async<Config::threads>(shared.u,
                                             p.u.row(chunk.first_token, place.head) + place.column,
                                             p.u.token_stride, chunk.tokens);
  }

  __device__ static Slab<Config::width> values(Storage& shared, const Params&, const device::Chunk&,
                                               const StateWalkPlace&) {
    const int row = device::warp() * 16;
    Slab<Config::width> slab;
    slab.clear();
    device::multiply_add<T, D>(
        slab, [&](int k) { return device::load_a(shared.w, row, k); },
        [&](int k, int n) { return device::load_b(shared.state, k, n); });
    slab.for_each_pair([&](int r, int c, float& x0, float& x1) {
      const float2 u =
          device::unpack<T>(*reinterpret_cast<const std::uint32_t*>(shared.u.at(row + r, c)));
      x0 = u.x - x0;
      x1 = u.y - x1;
    });
    return slab;
  }
};

template <class T, int D>
__global__ void __launch_bounds__(StateWalkConfig<D>::threads)
    chunk_state_kernel(const __grid_constant__ typename Form<T, D>::Params p) {
  walk_states<T, D, Form<T, D>>(p, device::dynamic_shared<typename Form<T, D>::Storage>());
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, state_walk_blocks(query.problem, query.capacity));
}

Support accepts(const StageCall& call) {
  return accepts_vectors(call, {"k", "w", "u", "v_new", "chunk_states"});
}

void steps(const StageCall& call, StepList& out) {
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    using F = Form<T, D>;
    out.push_back(kernel_step<typename F::Params>(
        "chunk_state", chunk_state_kernel<T, D>,
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

}  // namespace gdnflow::stages::chunk_state
