// The recurrence as it is defined, token by token in fp32; the oracle on the GPU, and right for a
// handful of tokens.
//
//   S <- alpha S + k (beta (v - alpha k^T S)),   o = scale q^T S       alpha = exp(g)
//
// Columns of S are independent of each other. A block takes a sequence, a value head and 32
// columns; four lanes share a column, each with D/4 of its rows in registers, dealt out four at a
// time:
//
//   rows of d_k   0-3 | 4-7 | 8-11 | 12-15 | 16-19 | ...      so that the lanes of a column read
//   lane           0  |  1  |   2  |   3   |   0   | ...      neighbouring 16 bytes of k and q
//
// 3 D multiply-adds a token and column on the chain that everything waits for: some 250 clocks a
// token at D = 128. q, k, v and the gates pass through shared memory 32 tokens at a time.
//
// Nothing mixes tokens, so a NaN appears exactly where the definition puts it, and g = -inf needs
// no special care.

#include "chunk_index/sequence_scan.hpp"
#include "cuda_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "device/half.cuh"
#include "device/prefix.cuh"
#include "device/state_io.cuh"
#include "device/views.cuh"

namespace gdnflow::stages::one_pass {
namespace {

template <int D>
struct Config {
  static constexpr int threads = 128;
  static constexpr int lanes = 4;  // of a column
  static constexpr int columns = threads / lanes;
  static constexpr int tiles = D / columns;
  static constexpr int tokens = 32;               // in shared memory at a time
  static constexpr int groups = D / (4 * lanes);  // of four rows, a lane
  static_assert(D % (4 * lanes) == 0 && D % columns == 0 && columns % 8 == 0);
};

template <class T>
struct Params {
  device::Rows<const T> q;                 // [T, Hqk, D]
  device::Rows<const T> k;                 // [T, Hqk, D]
  device::Rows<const T> v;                 // [T, Hv, D]
  device::Rows<T> o;                       // [T, Hv, D]
  device::Scalars<const float> g;          // [T, Hv]
  device::Scalars<const float> beta;       // [T, Hv]
  const std::int32_t* starts;              // [N+1]
  const std::int32_t* checkpoint_offsets;  // [N+1]
  const void* prefix_lens;                 // [N], or null
  device::StatePorts states;
  device::Heads heads;
  float scale;
  bool wide_index;
};

template <int D>
struct SharedStorage {
  using C = Config<D>;
  alignas(16) float q[C::tokens][D];
  alignas(16) float k[C::tokens][D];
  alignas(16) float v[C::tokens][C::columns];  // then o: a column's element is read and written by
                                               // the lanes of that column only
  float alpha[C::tokens];
  float beta[C::tokens];
};
static_assert(sizeof(SharedStorage<128>) <= 48 * 1024, "no opt-in is needed");

struct Place {
  int sequence;
  int head;
  int column;  // first of d_v
};

/// Rows of a tensor as fp32, eight elements a thread at a time.
template <class T, int Columns>
__device__ void load_rows(float (*destination)[Columns], const T* source, std::int64_t row_stride,
                          int rows) {
  constexpr int vectors = Columns / 8;
  for (int i = static_cast<int>(threadIdx.x); i < rows * vectors; i += 128) {
    const int row = i / vectors;
    const int column = i % vectors * 8;
    float x[8];
    device::load_8(x, source + row * row_stride + column);
#pragma unroll
    for (int j = 0; j < 8; ++j) destination[row][column + j] = x[j];
  }
}

template <class T, int D>
__device__ void load_tokens(SharedStorage<D>& shared, const Params<T>& p, const Place& place,
                            std::int64_t first, int count) {
  const int qk_head = p.heads.qk_of(place.head);
  load_rows(shared.q, p.q.row(first, qk_head), p.q.token_stride, count);
  load_rows(shared.k, p.k.row(first, qk_head), p.k.token_stride, count);
  load_rows(shared.v, p.v.row(first, place.head) + place.column, p.v.token_stride, count);
  const int token = static_cast<int>(threadIdx.x);
  if (token < count) {
    shared.alpha[token] = expf(p.g.at(first + token, place.head));
    shared.beta[token] = p.beta.at(first + token, place.head);
  }
}

template <class T, int D>
__device__ void store_tokens(const SharedStorage<D>& shared, const Params<T>& p, const Place& place,
                             std::int64_t first, int count) {
  constexpr int vectors = Config<D>::columns / 8;
  for (int i = static_cast<int>(threadIdx.x); i < count * vectors; i += Config<D>::threads) {
    const int row = i / vectors;
    const int column = i % vectors * 8;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = shared.v[row][column + j];
    device::store_8(p.o.row(first + row, place.head) + place.column + column, x);
  }
}

/// A lane's share of a column of S.
template <int D>
struct ColumnOfState {
  using C = Config<D>;
  float s[C::groups][4];

  __device__ static int part() { return static_cast<int>(threadIdx.x) % C::lanes; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) / C::lanes; }
  __device__ static int row(int group) { return (group * C::lanes + part()) * 4; }

  __device__ static float sum_over_lanes(float x) {
#pragma unroll
    for (int step = 1; step < C::lanes; step *= 2) x += __shfl_xor_sync(0xffffffffU, x, step);
    return x;
  }

  template <class F>
  __device__ void for_each(F&& f) {
#pragma unroll
    for (int i = 0; i < C::groups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) f(row(i) + j, s[i][j]);
    }
  }

  __device__ void load(const device::StatePool& pool, std::int64_t from, const Place& place) {
    if (from < 0) {
      for_each([](int, float& x) { x = 0.0F; });
      return;
    }
    const device::StateMatrix matrix = pool.matrix(from, place.head);
    for_each([&](int k, float& x) { x = matrix.load(k, place.column + column()); });
  }

  __device__ void store(const device::StatePool& pool, std::int64_t to, const Place& place) {
    if (to < 0) return;
    const device::StateMatrix matrix = pool.matrix(to, place.head);
    for_each([&](int k, float& x) { matrix.store(k, place.column + column(), x); });
  }

  /// One token; returns q^T S.
  __device__ float step(const float* q, const float* k, float v, float alpha, float beta) {
    float recalled = 0.0F;
    float key[C::groups][4];
#pragma unroll
    for (int i = 0; i < C::groups; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(k + row(i));
      key[i][0] = four.x;
      key[i][1] = four.y;
      key[i][2] = four.z;
      key[i][3] = four.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) recalled += key[i][j] * s[i][j];
    }
    const float change = beta * (v - alpha * sum_over_lanes(recalled));
    float out = 0.0F;
#pragma unroll
    for (int i = 0; i < C::groups; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(q + row(i));
      const float query[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = alpha * s[i][j] + key[i][j] * change;
        out += query[j] * s[i][j];
      }
    }
    return sum_over_lanes(out);
  }
};

/// Stores the state as a checkpoint where `position`, tokens from the prefix's start, is one.
template <class T, int D>
__device__ void store_checkpoint(ColumnOfState<D>& state, const Params<T>& p, const Place& place,
                                 std::int64_t prefix, std::int64_t position) {
  const std::int64_t interval = p.states.checkpoint_interval;
  if (interval == 0 || position % interval != 0) return;
  const std::int64_t compact =
      p.checkpoint_offsets[place.sequence] + position / interval - prefix / interval - 1;
  state.store(p.states.checkpoints, p.states.checkpoint_row(compact), place);
}

template <class T, int D>
__global__ void __launch_bounds__(Config<D>::threads)
    recurrent_kernel(const __grid_constant__ Params<T> p) {
  using C = Config<D>;
  using State = ColumnOfState<D>;
  __shared__ SharedStorage<D> shared;
  device::wait_for_predecessors();
  device::allow_successors();
  const unsigned matrix = blockIdx.x / C::tiles;
  const Place place{static_cast<int>(matrix / p.heads.v), static_cast<int>(matrix % p.heads.v),
                    static_cast<int>(blockIdx.x % C::tiles) * C::columns};
  const std::int64_t begin = p.starts[place.sequence];
  const std::int64_t end = p.starts[place.sequence + 1];
  // An empty sequence may have no prefix to read, and none counts.
  const std::int64_t prefix =
      begin == end ? 0 : device::safe_prefix(p.prefix_lens, p.wide_index, place.sequence);

  State state;
  state.load(p.states.initial, p.states.initial_row(place.sequence), place);
  // A pass ends at a multiple of 32 tokens from the prefix's start, so that checkpoints, at
  // multiples of 64, fall between passes.
  for (std::int64_t first = begin; first < end;) {
    const std::int64_t position = prefix + first - begin;
    const int count = static_cast<int>(min(C::tokens - position % C::tokens, end - first));
    load_tokens(shared, p, place, first, count);
    __syncthreads();
    for (int t = 0; t < count; ++t) {
      float& v = shared.v[t][State::column()];
      const float o = state.step(shared.q[t], shared.k[t], v, shared.alpha[t], shared.beta[t]);
      __syncwarp();  // the column's other lanes have read it
      if (State::part() == 0) v = p.scale * o;
    }
    __syncthreads();
    store_tokens(shared, p, place, first, count);
    store_checkpoint(state, p, place, prefix, position + count);
    __syncthreads();
    first += count;
  }
  state.store(p.states.final, p.states.final_row(place.sequence), place);
}

std::int64_t blocks(const Problem& problem, const Capacity& capacity) {
  const int tiles = problem.v_dim == 64 ? Config<64>::tiles : Config<128>::tiles;
  return capacity.max_sequences * problem.v_heads * tiles;
}

Support supports(const VariantQuery& query) {
  return supports_tiles(query, blocks(query.problem, query.capacity));
}

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  const std::int64_t bytes = sequence_starts_bytes(query.capacity.max_sequences);
  return {{"starts", bytes}, {"checkpoint_offsets", bytes}};
}

Support accepts(const StageCall& call) { return accepts_vectors(call, {"q", "k", "v", "o"}); }

void steps(const StageCall& call, StepList& out) {
  SequenceScan scan = sequence_scan(call);
  scan.prefix_lens = call["prefix_lens"].data;
  scan.starts = call.scratch[0].as<std::int32_t>();
  scan.checkpoint_offsets = call.scratch[1].as<std::int32_t>();
  out.push_back(sequence_scan_step(scan));
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    Params<T> params{};
    params.q = device::Rows<const T>(call["q"]);
    params.k = device::Rows<const T>(call["k"]);
    params.v = device::Rows<const T>(call["v"]);
    params.o = device::Rows<T>(call["o"]);
    params.g = device::Scalars<const float>(call["g"]);
    params.beta = device::Scalars<const float>(call["beta"]);
    params.starts = scan.starts;
    params.checkpoint_offsets = scan.checkpoint_offsets;
    params.prefix_lens = scan.prefix_lens;
    params.states = device::StatePorts(call);
    params.heads = device::Heads(call.problem);
    params.scale = call.problem.effective_scale();
    params.wide_index = scan.wide_index;
    out.push_back(programmatic(kernel_step("recurrent", recurrent_kernel<T, D>,
                                           grid_of(blocks(call.problem, call.capacity)),
                                           {Config<D>::threads}, 0, params)));
  });
}

}  // namespace

Variant recurrent() {
  Variant variant;
  variant.id = "recurrent";
  variant.description = "token by token in fp32, 32 columns of a head a block";
  variant.target = DeviceType::cuda;
  variant.supports = supports;
  variant.scratch = scratch;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::one_pass
