// The recurrence as it is defined, token by token in fp32; the oracle on the GPU, and the fastest
// for a handful of tokens, where reading and writing a state is what costs.
//
//   S <- alpha S + k (beta (v - alpha k^T S)),   o = scale q^T S       alpha = exp(g)
//
// Columns of S are independent of each other. Some lanes share neighbouring columns, each with its
// part of their rows in registers, dealt out four at a time:
//
//   rows of d_k   0-3 | 4-7 | 8-11 | 12-15 | 16-19 | ...      so that they read neighbouring
//   lane           0  |  1  |   2  |   3   |   0   | ...      16 bytes of k and q
//
// One pass over S a token: with S = fade s,
//
//   o = q^T S + (q^T k) (beta (v - k^T S)) of the decayed S,  s += k (beta (v - k^T S)) / fade
//
// so that a token costs three multiply-adds an element, and alpha none, unless it leads far from
// one within the few tokens that are in shared memory at a time.
// Two shapes: with many heads and sequences a block takes a head, four columns a thread, which
// reads k and q the fewest times; with few, eight lanes have one column, and a token takes as
// little time as sums over them do.
//
// Nothing mixes tokens, so a NaN appears exactly where the definition puts it, and g = -inf needs
// no special care.

#include <gdnflow/stage.hpp>

#include "chunk_index/sequence_scan.hpp"
#include "cuda_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "device/half.cuh"
#include "device/prefix.cuh"
#include "device/state_io.cuh"
#include "device/views.cuh"
#include "one_pass/gates.hpp"
#include "one_pass/plan.hpp"
#include "one_pass/ready_gates.cuh"
#include "one_pass/recurrent.hpp"
#include "one_pass/scratch_reader.hpp"
#include "qk_norm/epsilon.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace gdnflow::stages::one_pass {
namespace {

/// `Lanes` of a warp share `Columns` neighbouring columns.
template <int D, int Lanes, int Columns>
struct Shape {
  static constexpr int dim = D;
  static constexpr int lanes = Lanes;
  static constexpr int columns = Columns;
  static constexpr int threads = 128;
  static constexpr int groups = D / (4 * Lanes);  // of four rows, a lane
  static constexpr int block_columns = threads / Lanes * Columns;
  static constexpr int tiles = D / block_columns;
  static constexpr int tokens = 16;  // in shared memory at a time
  // Blocks a multiprocessor, at least.
  static constexpr int resident = 3;
  static_assert(D % (4 * Lanes) == 0 && D % block_columns == 0 && block_columns % 8 == 0);
  static_assert(Columns == 1 || Columns == 2 || Columns == 4);
};
template <int D>
using Wide = Shape<D, 4, D / 32>;
template <int D>
using Narrow = Shape<D, 8, 1>;

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
  std::int32_t most_tokens;
  std::int32_t ahead;  // blocks, of which the state is fetched to L2
  float scale;
  bool wide_index;
  bool norm;     // whether q and k are to be normalised
  bool vectors;  // whether four neighbours of a state may be read at once
};

template <class S>
struct SharedStorage {
  alignas(16) float q[S::tokens][S::dim];
  alignas(16) float k[S::tokens][S::dim];
  // Then o: a column's element is read and written by the lanes of that column only.
  alignas(16) float v[S::tokens][S::block_columns];
  float alpha[S::tokens];
  float beta[S::tokens];
  bool calm;  // alpha's products stay near one
};

struct Place {
  int sequence;
  int head;
  int column;  // first of d_v
};

/// This thread's number, asked for anew so that nothing made from it is kept over the loop.
__device__ __forceinline__ int thread_number() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

/// Rows of a tensor as fp32, eight elements a thread at a time; all that are on their way before
/// the first is waited for.
template <class S, class T, int Columns>
__device__ __forceinline__ void load_rows(float (&destination)[S::tokens][Columns], const T* source,
                                          std::int64_t row_stride, int rows) {
  constexpr int vectors = Columns / 8;
  constexpr int turns = (S::tokens * vectors + S::threads - 1) / S::threads;
  const int thread = thread_number();
  uint4 packed[turns];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int i = turn * S::threads + thread;
    const int row = i / vectors;
    if (row >= rows) continue;
    packed[turn] = *reinterpret_cast<const uint4*>(source + row * row_stride + i % vectors * 8);
  }
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int i = turn * S::threads + thread;
    const int row = i / vectors;
    if (row >= rows) continue;
    float4* const to = reinterpret_cast<float4*>(&destination[row][i % vectors * 8]);
    const float2 x[4] = {device::unpack<T>(packed[turn].x), device::unpack<T>(packed[turn].y),
                         device::unpack<T>(packed[turn].z), device::unpack<T>(packed[turn].w)};
    to[0] = {x[0].x, x[0].y, x[1].x, x[1].y};
    to[1] = {x[2].x, x[2].y, x[3].x, x[3].y};
  }
}

template <class S, class T>
__device__ __forceinline__ void load_tokens(SharedStorage<S>& shared, const Params<T>& p,
                                            const Place& place, std::int32_t first, int count) {
  const int qk_head = p.heads.qk_of(place.head);
  const int token = thread_number();
  if (token < 32) {
    float g = 0.0F;
    if (token < count) {
      g = p.g.at(first + token, place.head);
      shared.alpha[token] = expf(g);
      shared.beta[token] = p.beta.at(first + token, place.head);
    }
    float sum = fabsf(g);
#pragma unroll
    for (int step = 1; step < S::tokens; step *= 2) sum += __shfl_xor_sync(~0U, sum, step);
    if (token == 0) shared.calm = sum < 27.0F;  // 2^-39 to 2^39; not with a NaN
  }
  load_rows<S>(shared.k, p.k.row(first, qk_head), p.k.token_stride, count);
  load_rows<S>(shared.q, p.q.row(first, qk_head), p.q.token_stride, count);
  load_rows<S>(shared.v, p.v.row(first, place.head) + place.column, p.v.token_stride, count);
}

/// Divides rows of q and k by their norms, eight threads a row.
template <class S>
__device__ __forceinline__ void normalize(SharedStorage<S>& shared, int count) {
  const int thread = thread_number();
#pragma unroll 1
  for (int row = thread / 8; row < 2 * S::tokens; row += S::threads / 8) {
    // All take part in the sums.
    const int token = row % S::tokens;
    float* const x = (row < S::tokens ? shared.q : shared.k)[token] + thread % 8;
    float sum = 0.0F;
#pragma unroll 4
    for (int i = 0; i < S::dim; i += 8) sum += token < count ? x[i] * x[i] : 0.0F;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0U, sum, step);
    const float factor = rsqrtf(sum + qk_norm::epsilon);
#pragma unroll 4
    for (int i = 0; i < S::dim; i += 8) {
      if (token < count) x[i] *= factor;
    }
  }
}

template <class S, class T>
__device__ __forceinline__ void store_tokens(const SharedStorage<S>& shared, const Params<T>& p,
                                             const Place& place, std::int32_t first, int count) {
  constexpr int vectors = S::block_columns / 8;
  for (int i = thread_number(); i < count * vectors; i += S::threads) {
    const int row = i / vectors;
    const int column = i % vectors * 8;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = shared.v[row][column + j];
    device::store_8(p.o.row(first + row, place.head) + place.column + column, x);
  }
}

/// `Count` neighbours of type E as one access, or as `Count` where they may not be aligned.
template <class E, int Count>
struct alignas(sizeof(E) * Count) Neighbours {
  E x[Count];
};
template <int Count, bool Vectors, class E>
__device__ __forceinline__ void load_neighbours(float (&x)[Count], const E* from) {
  if constexpr (Vectors) {
    const auto all = *reinterpret_cast<const Neighbours<E, Count>*>(from);
#pragma unroll
    for (int i = 0; i < Count; ++i) x[i] = static_cast<float>(all.x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) x[i] = static_cast<float>(from[i]);
  }
}
template <int Count, bool Vectors, class E>
__device__ __forceinline__ void store_neighbours(E* to, const float (&x)[Count]) {
  if constexpr (Vectors) {
    Neighbours<E, Count> all;
#pragma unroll
    for (int i = 0; i < Count; ++i) all.x[i] = static_cast<E>(x[i]);
    *reinterpret_cast<Neighbours<E, Count>*>(to) = all;
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = static_cast<E>(x[i]);
  }
}

/// A thread's part of a head's state: S = fade s.
template <class S>
struct StatePart {
  float s[S::columns][S::groups][4];
  float fade = 1.0F;

  __device__ static int part() { return static_cast<int>(threadIdx.x) % S::lanes; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) / S::lanes * S::columns; }
  __device__ static int row(int group) { return (group * S::lanes + part()) * 4; }

  /// f.operator()<Count, Vectors>(x, at) for every `Count` neighbours of a matrix that this thread
  /// has.
  template <class E, class F>
  __device__ __forceinline__ void for_each_run(E* data, const device::StatePool& pool, bool vectors,
                                               const Place& place, F&& f) {
    const std::int64_t step = pool.row_stride;
    const std::int64_t first = place.column + column();
    // One address at a time: those of the whole loop would be made ahead of it and kept.
    const auto visit = [&]<bool Vectors>() {
      if (pool.vk) {
#pragma unroll
        for (int c = 0; c < S::columns; ++c) {
          E* at = data + (first + c) * step + row(0);
          asm volatile("" : "+l"(at));
#pragma unroll
          for (int i = 0; i < S::groups; ++i) {
            f.template operator()<4, Vectors>(s[c][i], at + i * 4 * S::lanes);
          }
        }
      } else {
        E* at = data + row(0) * step + first;
#pragma unroll
        for (int i = 0; i < S::groups; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float x[S::columns];
#pragma unroll
            for (int c = 0; c < S::columns; ++c) x[c] = s[c][i][j];
            f.template operator()<S::columns, Vectors>(x, at);
#pragma unroll
            for (int c = 0; c < S::columns; ++c) s[c][i][j] = x[c];
            at += j < 3 ? step : (4 * S::lanes - 3) * step;
            asm volatile("" : "+l"(at));
          }
        }
      }
    };
    vectors ? visit.template operator()<true>() : visit.template operator()<false>();
  }

  /// f.operator()(data) for the element type of a pool, `data` its matrix of a row and head.
  template <class F>
  __device__ __forceinline__ static void with_matrix(const device::StatePool& pool,
                                                     std::int64_t pool_row, int head, F&& f) {
    const std::int64_t matrix = pool_row * pool.pool_stride + head * pool.head_stride;
    device::with_state_type(pool.dtype, [&]<class E>() { f(static_cast<E*>(pool.data) + matrix); });
  }

  __device__ __forceinline__ void load(const device::StatePool& pool, bool vectors,
                                       std::int64_t from, const Place& place) {
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
#pragma unroll
      for (int i = 0; i < S::groups; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[c][i][j] = 0.0F;
      }
    }
    if (from < 0) return;
    with_matrix(pool, from, place.head, [&](auto* data) {
      for_each_run(data, pool, vectors, place,
                   [&]<int Count, bool Vectors>(float(&x)[Count], const auto* at) {
                     load_neighbours<Count, Vectors>(x, at);
                   });
    });
  }

  __device__ __forceinline__ void store(const device::StatePool& pool, bool vectors,
                                        std::int64_t to, const Place& place) {
    settle();  // whoever stores it or not, so that bits do not depend on it
    if (to < 0) return;
    with_matrix(pool, to, place.head, [&](auto* data) {
      for_each_run(data, pool, vectors, place,
                   [&]<int Count, bool Vectors>(float(&x)[Count], auto* at) {
                     store_neighbours<Count, Vectors>(at, x);
                   });
    });
  }

  /// fade becomes one.
  __device__ __forceinline__ void settle() {
    if (fade == 1.0F) return;
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
#pragma unroll
      for (int i = 0; i < S::groups; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[c][i][j] *= fade;
      }
    }
    fade = 1.0F;
  }

  /// One token, of whose v and o `v` has this thread's columns. Calm: fade stays near one with it.
  template <bool Calm>
  __device__ __forceinline__ void step(const float* q, const float* k, float* v, float alpha,
                                       float beta, float scale) {
    fade *= alpha;
    if (!Calm) settle();  // alpha may be too much for the factor and yet not for the state
    float recalled[S::columns] = {};
    float seen[S::columns] = {};
    float product = 0.0F;
#pragma unroll
    for (int i = 0; i < S::groups; ++i) {
      float key[4], query[4];
      load_neighbours<4, true>(key, k + row(i));
      load_neighbours<4, true>(query, q + row(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        product += query[j] * key[j];
#pragma unroll
        for (int c = 0; c < S::columns; ++c) {
          recalled[c] += key[j] * s[c][i][j];
          seen[c] += query[j] * s[c][i][j];
        }
      }
    }
#pragma unroll
    for (int step = 1; step < S::lanes; step *= 2) {
      product += __shfl_xor_sync(~0U, product, step);
#pragma unroll
      for (int c = 0; c < S::columns; ++c) {
        recalled[c] += __shfl_xor_sync(~0U, recalled[c], step);
        seen[c] += __shfl_xor_sync(~0U, seen[c], step);
      }
    }
    const float unfade = __fdividef(1.0F, fade);
    float values[S::columns];
    load_neighbours<S::columns, true>(values, v);
    __syncwarp();  // the columns' other lanes have read them
    float added[S::columns];
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const float change = beta * (values[c] - fade * recalled[c]);
      values[c] = scale * (fade * seen[c] + product * change);
      added[c] = change * unfade;
    }
    // Keys are read again: there are no registers to keep them in.
#pragma unroll
    for (int i = 0; i < S::groups; ++i) {
      float key[4];
      load_neighbours<4, true>(key, k + row(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < S::columns; ++c) s[c][i][j] += key[j] * added[c];
      }
    }
    if (part() == 0) store_neighbours<S::columns, true>(v, values);
  }
};

/// The row for the state at `position`, tokens from the prefix's start, where that is a checkpoint.
template <class T>
__device__ __forceinline__ std::int64_t checkpoint_row(const Params<T>& p, int sequence,
                                                       std::int64_t prefix, std::int64_t position) {
  const std::int64_t interval = p.states.checkpoint_interval;
  if (interval == 0 || position % interval != 0) return -1;
  return p.states.checkpoint_row(p.checkpoint_offsets[sequence] + position / interval -
                                 prefix / interval - 1);
}

/// Brings the state that a later block begins with to L2. By one thread.
template <class T, class S>
__device__ __forceinline__ void prefetch(const Params<T>& p, unsigned matrix) {
  if (matrix >= gridDim.x) return;
  const auto sequence = static_cast<int>(matrix / p.heads.v);
  const std::int32_t tokens = p.starts[sequence + 1] - p.starts[sequence];
  if (tokens == 0 || tokens > p.most_tokens) return;
  device::prefetch_state(p.states.initial, p.states.initial_row(sequence),
                         static_cast<int>(matrix % p.heads.v), S::dim, S::dim * S::dim);
}

template <class T, class S>
__global__ void __launch_bounds__(S::threads, S::resident)
    recurrent_kernel(const __grid_constant__ Params<T> p) {
  __shared__ SharedStorage<S> shared;
  device::allow_successors();
  device::wait_for_predecessors();
  const unsigned matrix = blockIdx.x / S::tiles;
  const Place place{static_cast<int>(matrix / p.heads.v), static_cast<int>(matrix % p.heads.v),
                    static_cast<int>(blockIdx.x % S::tiles) * S::block_columns};
  const std::int32_t begin = p.starts[place.sequence];
  const std::int32_t end = p.starts[place.sequence + 1];
  if constexpr (S::tiles == 1) {
    if (threadIdx.x == S::threads - 1) prefetch<T, S>(p, blockIdx.x + p.ahead);
  }
  if (end - begin > p.most_tokens || (begin == end && p.states.final_row(place.sequence) < 0)) {
    return;
  }

  StatePart<S> state;
  state.load(p.states.initial, p.vectors, p.states.initial_row(place.sequence), place);
  // An empty sequence may have no prefix to read, and none counts.
  const std::int64_t prefix =
      begin == end ? 0 : device::safe_prefix(p.prefix_lens, p.wide_index, place.sequence);
  // A pass ends at a multiple of 16 tokens from the prefix's start, so that checkpoints, at
  // multiples of 64, fall between passes. The last one has no tokens, and leaves the final state.
  for (std::int32_t first = begin;;) {
    const std::int64_t position = prefix + first - begin;
    const std::int32_t count =
        min(S::tokens - static_cast<std::int32_t>(position % S::tokens), end - first);
    if (count > 0) {
      load_tokens(shared, p, place, first, count);
      __syncthreads();
      if (p.norm) {
        normalize(shared, count);
        __syncthreads();
      }
      const auto walk = [&]<bool Calm>() {
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
          state.template step<Calm>(shared.q[t], shared.k[t], &shared.v[t][StatePart<S>::column()],
                                    shared.alpha[t], shared.beta[t], p.scale);
        }
      };
      shared.calm ? walk.template operator()<true>() : walk.template operator()<false>();
      __syncthreads();
      store_tokens(shared, p, place, first, count);
      __syncthreads();
    }
    state.store(count > 0 ? p.states.checkpoints : p.states.final, p.vectors,
                count > 0 ? checkpoint_row(p, place.sequence, prefix, position + count)
                          : p.states.final_row(place.sequence),
                place);
    if (count == 0) return;
    first += count;
  }
}

/// Whether heads are few enough that a token's time is what counts: measured, up to half of the
/// multiprocessors. Not where a sequence is to have the same bits in any batch.
bool is_narrow(const VariantQuery& query) {
  return query.problem.mode != Mode::batch_invariant &&
         2 * query.capacity.max_sequences * query.problem.v_heads <=
             std::int64_t{query.device.multiprocessors};
}

bool suits_vectors(const TensorView& pool) {
  if (pool.data == nullptr) return true;
  const auto bytes = static_cast<std::int64_t>(size_of(pool.dtype));
  return reinterpret_cast<std::uintptr_t>(pool.data) % (4 * bytes) == 0 &&
         std::all_of(pool.strides.begin(), pool.strides.begin() + pool.rank - 1,
                     [](std::int64_t stride) { return stride % 4 == 0; });
}

Support supports(const VariantQuery& query) {
  if (Support support = supports_fused_norm(query); !support) return support;
  if (Support support = supports_fused_gate(query); !support) return support;
  return supports_tiles(query, recurrence_blocks(query));
}

std::vector<ScratchSpec> scratch(const VariantQuery& query) {
  const std::int64_t bytes = sequence_starts_bytes(query.capacity.max_sequences);
  std::vector<ScratchSpec> pieces{{"starts", bytes}, {"checkpoint_offsets", bytes}};
  for (ScratchSpec& piece : gate_pieces(query)) pieces.push_back(std::move(piece));
  return pieces;
}

Support accepts(const StageCall& call) {
  if (Support support = has_gates(call); !support) return support;
  return accepts_vectors(call, {"q", "k", "v", "o"});
}

void steps(const StageCall& call, StepList& out) {
  SequenceScan scan = sequence_scan(call);
  scan.prefix_lens = call["prefix_lens"].data;
  ScratchReader scratch(call);
  scan.starts = scratch.next<std::int32_t>();
  scan.checkpoint_offsets = scratch.next<std::int32_t>();
  const ReadyGates gates = ready_gates(call, scratch);
  out.push_back(plan_step(scan, {}, gates));
  add_recurrence(call, scan, gates, std::numeric_limits<std::int32_t>::max(), out);
}

}  // namespace

OptionSpec fused_norm_option() {
  return {"qk_norm",
          "1: q and k, as they are given, are normalised inside; pipelines do so where they can",
          0,
          {0, 1}};
}

Support supports_fused_norm(const VariantQuery& query) {
  if (option_or(query.options, "qk_norm", 0) == 0 || query.problem.qk_norm) return Support::yes();
  return Support::no("qk_norm: expected 0 for a problem without qk_norm, got 1");
}

std::int64_t recurrence_blocks(const VariantQuery& query) {
  const int tiles = !is_narrow(query)           ? 1
                    : query.problem.v_dim == 64 ? Narrow<64>::tiles
                                                : Narrow<128>::tiles;
  return query.capacity.max_sequences * query.problem.v_heads * tiles;
}

void add_recurrence(const StageCall& call, const SequenceScan& scan, const ReadyGates& gates,
                    std::int32_t most_tokens, StepList& out) {
  static_assert(Wide<64>::tiles == 1 && Wide<128>::tiles == 1);
  const VariantQuery query{call.problem, call.capacity, call.device, call.options};
  with_type_and_dim(call.problem, [&]<class T, int D>() {
    Params<T> params{};
    params.q = device::Rows<const T>(call["q"]);
    params.k = device::Rows<const T>(call["k"]);
    params.v = device::Rows<const T>(call["v"]);
    params.o = device::Rows<T>(call["o"]);
    params.g = gates.g;
    params.beta = gates.beta;
    params.starts = scan.starts;
    params.checkpoint_offsets = scan.checkpoint_offsets;
    params.prefix_lens = scan.prefix_lens;
    params.states = device::StatePorts(call);
    params.heads = device::Heads(call.problem);
    params.most_tokens = most_tokens;
    // Half of the blocks that are there at once.
    params.ahead = Wide<D>::resident * query.device.multiprocessors / 2;
    params.scale = call.problem.effective_scale();
    params.wide_index = scan.wide_index;
    params.norm = option_or(call.options, "qk_norm", 0) != 0;
    params.vectors = suits_vectors(call["initial_state"]) && suits_vectors(call["final_state"]) &&
                     suits_vectors(call["checkpoints"]);
    const auto add = [&]<class S>() {
      out.push_back(
          programmatic(kernel_step("recurrent", recurrent_kernel<T, S>,
                                   grid_of(recurrence_blocks(query)), {S::threads}, 0, params)));
    };
    is_narrow(query) ? add.template operator()<Narrow<D>>() : add.template operator()<Wide<D>>();
  });
}

Variant recurrent() {
  Variant variant;
  variant.id = "recurrent";
  variant.description = "token by token in fp32, a head's state in registers";
  variant.target = DeviceType::cuda;
  variant.options = {fused_norm_option(), fused_gate_option()};
  variant.supports = supports;
  variant.scratch = scratch;
  variant.accepts = accepts;
  variant.steps = steps;
  return variant;
}

}  // namespace gdnflow::stages::one_pass
