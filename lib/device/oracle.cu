// The token recurrence in fp64, a column of the state at a time:
//
//   s <- alpha s;  c = beta (v - k . s);  s <- s + c k;  o = scale q . s
//
// Columns of S never meet, so a warp owns one: its lanes hold rows lane, lane + 32, ... in
// registers. A block is 16 columns of one (sequence, value head); it stages the next tokens' q and
// k as doubles in shared memory, where their norms are taken too. The chain of one token is two
// shuffle reductions of which the second (for o) is off the next token's path.

#include "device/element.cuh"
#include "device/oracle.hpp"
#include "device/scoped_device.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace gdnflow::device {
namespace {

constexpr int columns_per_block = 16;
constexpr int threads = 32 * columns_per_block;
constexpr int tile_tokens = 8;

// A tensor of any floating type and at least two dimensions, the outer two by stride.
struct Input {
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t outer_stride = 0;  // elements
  std::int64_t head_stride = 0;

  Input() = default;
  explicit Input(const TensorView& view)
      : data(view.data),
        type(view.dtype),
        outer_stride(view.strides[0]),
        head_stride(view.strides[1]) {}

  __device__ double at(std::int64_t outer, std::int64_t head, std::int64_t offset) const {
    return load_element(data, type, outer * outer_stride + head * head_stride + offset);
  }
};

struct Params {
  Input q, k, v, g, beta, initial_state;
  std::int64_t initial_row_stride;  // elements
  const std::int64_t* cu_seqlens;   // [N+1]
  double* o;                        // [T, Hv, Dv]
  double* final_state;              // [N, Hv, r, c] or null
  std::int64_t items;               // N * Hv * slices
  std::int32_t slices;              // blocks that share a head's columns
  std::int32_t qk_heads, v_heads, qk_dim, v_dim;
  bool interleaved_heads, vk, qk_norm;
  double scale;
};

__device__ double sum_of_warp(double x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffU, x, distance);
  }
  return x;
}

// The row of q or k at a token, normalised if asked, by one warp.
template <int RowsPerLane>
__device__ void stage_row(const Input& input, std::int64_t token, int head, int dim, bool norm,
                          double* out) {
  const int lane = threadIdx.x % 32;
  double x[RowsPerLane];
  double squares = 0;
  for (int i = 0; i < RowsPerLane; ++i) {
    const int row = lane + 32 * i;
    x[i] = row < dim ? input.at(token, head, row) : 0;
    squares += x[i] * x[i];
  }
  const double root = norm ? sqrt(sum_of_warp(squares) + 1e-6) : 1;
  for (int i = 0; i < RowsPerLane; ++i) out[lane + 32 * i] = norm ? x[i] / root : x[i];
}

// Where element (row of d_k, column of d_v) lies in a state of either layout.
__device__ std::int64_t state_offset(bool vk, int row, int column, std::int64_t stride) {
  return vk ? column * stride + row : row * stride + column;
}

template <int RowsPerLane>
__device__ void run_item(const Params& p, std::int64_t item) {
  constexpr int padded = 32 * RowsPerLane;
  __shared__ double q[tile_tokens][padded];
  __shared__ double k[tile_tokens][padded];
  __shared__ double v[tile_tokens][columns_per_block];
  __shared__ double alpha[tile_tokens];
  __shared__ double beta[tile_tokens];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int first_column = static_cast<int>(item % p.slices) * columns_per_block;
  const int head = static_cast<int>(item / p.slices % p.v_heads);
  const std::int64_t sequence = item / p.slices / p.v_heads;
  const int qk_head = p.interleaved_heads ? head % p.qk_heads : head / (p.v_heads / p.qk_heads);
  const int column = first_column + warp;
  const bool active = column < p.v_dim;  // of a warp as a whole

  double s[RowsPerLane] = {};
  if (active && p.initial_state.data != nullptr) {
    for (int i = 0; i < RowsPerLane; ++i) {
      const int row = lane + 32 * i;
      if (row < p.qk_dim) {
        s[i] = p.initial_state.at(sequence, head,
                                  state_offset(p.vk, row, column, p.initial_row_stride));
      }
    }
  }

  const std::int64_t end = p.cu_seqlens[sequence + 1];
  for (std::int64_t tile = p.cu_seqlens[sequence]; tile < end; tile += tile_tokens) {
    const int count = static_cast<int>(end - tile < tile_tokens ? end - tile : tile_tokens);
    __syncthreads();  // the tile before has been read
    for (int job = warp; job < 2 * count; job += columns_per_block) {
      const int t = job / 2;
      if (job % 2 == 0) {
        stage_row<RowsPerLane>(p.q, tile + t, qk_head, p.qk_dim, p.qk_norm, q[t]);
      } else {
        stage_row<RowsPerLane>(p.k, tile + t, qk_head, p.qk_dim, p.qk_norm, k[t]);
      }
    }
    for (int i = threadIdx.x; i < count * columns_per_block; i += threads) {
      const int t = i / columns_per_block;
      const int c = i % columns_per_block;
      if (first_column + c < p.v_dim) {
        v[t][c] = p.v.at(tile + t, head, first_column + c);
      }
    }
    if (threadIdx.x < count) {
      alpha[threadIdx.x] = exp(p.g.at(tile + threadIdx.x, head, 0));
      beta[threadIdx.x] = p.beta.at(tile + threadIdx.x, head, 0);
    }
    __syncthreads();
    if (!active) continue;
    for (int t = 0; t < count; ++t) {
      double product = 0;
      for (int i = 0; i < RowsPerLane; ++i) {
        s[i] *= alpha[t];
        product += k[t][lane + 32 * i] * s[i];
      }
      const double change = beta[t] * (v[t][warp] - sum_of_warp(product));
      double output = 0;
      for (int i = 0; i < RowsPerLane; ++i) {
        s[i] += k[t][lane + 32 * i] * change;
        output += q[t][lane + 32 * i] * s[i];
      }
      output = sum_of_warp(output);
      if (lane == 0) {
        p.o[((tile + t) * p.v_heads + head) * p.v_dim + column] = p.scale * output;
      }
    }
  }

  if (active && p.final_state != nullptr) {
    double* out = p.final_state +
                  (sequence * p.v_heads + head) * (static_cast<std::int64_t>(p.qk_dim) * p.v_dim);
    for (int i = 0; i < RowsPerLane; ++i) {
      const int row = lane + 32 * i;
      if (row < p.qk_dim) out[state_offset(p.vk, row, column, p.vk ? p.qk_dim : p.v_dim)] = s[i];
    }
  }
}

template <int RowsPerLane>
__global__ void __launch_bounds__(threads, 1) oracle_kernel(const __grid_constant__ Params p) {
  for (std::int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
    run_item<RowsPerLane>(p, item);
  }
}

// Device memory that lives until work enqueued before its end is done with it.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, Stream stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&data_, bytes, stream), "cudaMallocAsync");
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  ~StreamMemory() { (void)cudaFreeAsync(data_, stream_); }

  void* data() const noexcept { return data_; }

 private:
  void* data_ = nullptr;
  Stream stream_;
};

}  // namespace

void oracle(const Problem& problem, const OracleInputs& inputs, const OracleShape& shape, double* o,
            double* final_state, Stream stream) {
  const ScopedDevice current(inputs.q.device);
  const std::int64_t o_elements = shape.tokens * problem.v_heads * problem.v_dim;
  if (o_elements > 0) {
    check_cuda(cudaMemsetAsync(o, 0, static_cast<std::size_t>(o_elements) * sizeof(double), stream),
               "cudaMemsetAsync");
  }
  if (shape.sequences > 0) {
    const std::size_t bytes = inputs.cu_seqlens.size() * sizeof(std::int64_t);
    const StreamMemory offsets(bytes, stream);
    check_cuda(cudaMemcpyAsync(offsets.data(), inputs.cu_seqlens.data(), bytes,
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    Params p{};
    p.q = Input(inputs.q);
    p.k = Input(inputs.k);
    p.v = Input(inputs.v);
    p.g = Input(inputs.g);
    p.beta = Input(inputs.beta);
    p.initial_state = Input(inputs.initial_state);
    p.initial_row_stride = inputs.initial_state.strides[2];
    p.cu_seqlens = static_cast<const std::int64_t*>(offsets.data());
    p.o = o;
    p.final_state = final_state;
    p.slices = (problem.v_dim + columns_per_block - 1) / columns_per_block;
    p.items = shape.sequences * problem.v_heads * p.slices;
    p.qk_heads = problem.qk_heads;
    p.v_heads = problem.v_heads;
    p.qk_dim = problem.qk_dim;
    p.v_dim = problem.v_dim;
    p.interleaved_heads = problem.head_map == HeadMap::interleaved;
    p.vk = problem.state_layout == StateLayout::vk;
    p.qk_norm = problem.qk_norm;
    p.scale = shape.scale;
    const auto grid = static_cast<unsigned>(
        std::min<std::int64_t>(p.items, std::numeric_limits<std::int32_t>::max()));
    if (problem.qk_dim <= 64) {
      oracle_kernel<2><<<grid, threads, 0, stream>>>(p);
    } else if (problem.qk_dim <= 128) {
      oracle_kernel<4><<<grid, threads, 0, stream>>>(p);
    } else {
      oracle_kernel<8><<<grid, threads, 0, stream>>>(p);
    }
    check_cuda(cudaGetLastError(), "launch of the oracle");
  }
  check_cuda(cudaStreamSynchronize(stream), "the oracle");
}

}  // namespace gdnflow::device
