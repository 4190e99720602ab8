#include "device/mma.cuh"
#include "device/state_io.cuh"
#include "device/tile.cuh"
#include "device/tril_inverse.cuh"
#include "support/gpu.hpp"

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

// The headers that kernels share, each against a plain loop on the host.

using namespace gdnflow;

namespace {

/// Memory of `count` elements, on host and device.
template <class T>
class Array {
 public:
  explicit Array(std::size_t count) : host(count) {
    REQUIRE(cudaMalloc(&device_, count * sizeof(T)) == cudaSuccess);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { (void)cudaFree(device_); }

  T* upload() {
    REQUIRE(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice) ==
            cudaSuccess);
    return device_;
  }
  void download() {
    const cudaError_t status =
        cudaMemcpy(host.data(), device_, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
    REQUIRE_MESSAGE(status == cudaSuccess, cudaGetErrorString(status));
  }

  std::vector<T> host;

 private:
  T* device_ = nullptr;
};

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

double value(__half x) { return static_cast<double>(__half2float(x)); }
double value(__nv_bfloat16 x) { return static_cast<double>(__bfloat162float(x)); }

__global__ void invert_kernel(float* matrix) {
  __shared__ device::TrilInverse::Storage storage;
  constexpr int size = device::TrilInverse::size;
  constexpr int stride = device::TrilInverse::stride;
  for (int i = threadIdx.x; i < size * size; i += blockDim.x) {
    storage.matrix[i / size * stride + i % size] = i % size < i / size ? matrix[i] : 0.0F;
  }
  device::TrilInverse::invert(storage);
  for (int i = threadIdx.x; i < size * size; i += blockDim.x) {
    matrix[i] = storage.matrix[i / size * stride + i % size];
  }
}

/// How A and B lie in memory: rows of m or of k; rows of k or of n.
struct Layout {
  bool a_rows_of_k;
  bool b_rows_of_n;
};

/// c[64 x 64] = a[64 x 64] b[64 x 64], the last `64 - valid` rows of both tiles replaced by zeros.
template <class T>
__global__ void multiply_kernel(const T* a, const T* b, float* c, int valid, Layout layout) {
  __shared__ device::Tile<T, 64, 64> tile_a;
  __shared__ device::Tile<T, 64, 64> tile_b;
  device::load_rows_async<128>(tile_a, a, 64, valid);
  device::load_rows_async<128>(tile_b, b, 64, valid);
  device::wait_for_copies();
  __syncthreads();
  const int row = device::warp() * 16;
  device::Slab<8> slab;
  slab.clear();
  device::multiply_add<T, 64>(
      slab,
      [&](int k) {
        return layout.a_rows_of_k ? device::load_a_from_rows_of_k(tile_a, row, k)
                                  : device::load_a(tile_a, row, k);
      },
      [&](int k, int n) {
        return layout.b_rows_of_n ? device::load_b_from_rows_of_n(tile_b, k, n)
                                  : device::load_b(tile_b, k, n);
      });
  slab.for_each([&](int r, int column, float& x) { c[(row + r) * 64 + column] = x; });
}

/// c = (a b, rounded) b: a product whose left operand comes from an accumulator.
template <class T>
__global__ void chain_kernel(const T* a, const T* b, T* c) {
  __shared__ device::Tile<T, 64, 64> tile_a;
  __shared__ device::Tile<T, 64, 64> tile_b;
  device::load_rows_async<128>(tile_a, a, 64, 64);
  device::load_rows_async<128>(tile_b, b, 64, 64);
  device::wait_for_copies();
  __syncthreads();
  const int row = device::warp() * 16;
  device::Slab<8> first;
  first.clear();
  const auto load_b = [&](int k, int n) { return device::load_b(tile_b, k, n); };
  device::multiply_add<T, 64>(
      first, [&](int k) { return device::load_a(tile_a, row, k); }, load_b);
  device::Slab<8> second;
  second.clear();
  device::multiply_add<T, 64>(
      second, [&](int k) { return device::to_a<T>(first, k); }, load_b);
  __syncthreads();
  device::store_slab(tile_a, row, 0, second);
  __syncthreads();
  device::store_rows<128>(tile_a, c, 64, 64);
}

__global__ void copy_state_kernel(device::StatePool from, device::StatePool to, int rows, int head,
                                  int k_dim, int v_dim) {
  for (int row = 0; row < rows; ++row) {
    for (int i = threadIdx.x; i < k_dim * v_dim; i += blockDim.x) {
      const float x = from.matrix(row, head).load(i / v_dim, i % v_dim);
      to.matrix(rows - 1 - row, head).store(i / v_dim, i % v_dim, x);
    }
  }
}

std::vector<float> normal(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> out(count);
  for (float& x : out) x = distribution(generator);
  return out;
}

template <class T>
void fill(Array<T>& array, unsigned seed) {
  const std::vector<float> numbers = normal(array.host.size(), seed);
  for (std::size_t i = 0; i < numbers.size(); ++i) array.host[i] = rounded<T>(numbers[i]);
}

template <class T>
void check_products() {
  Array<T> a(64 * 64);
  Array<T> b(64 * 64);
  Array<float> c(64 * 64);
  for (const int valid : {64, 41, 1}) {
    for (const bool a_rows_of_k : {false, true}) {
      for (const bool b_rows_of_n : {false, true}) {
        CAPTURE(valid);
        CAPTURE(a_rows_of_k);
        CAPTURE(b_rows_of_n);
        fill(a, 1);
        fill(b, 2);
        // Rows past the end hold NaN in memory and must not be seen.
        for (std::size_t i = static_cast<std::size_t>(valid) * 64; i < a.host.size(); ++i) {
          a.host[i] = b.host[i] = rounded<T>(NAN);
        }
        multiply_kernel<T>
            <<<1, 128>>>(a.upload(), b.upload(), c.upload(), valid, {a_rows_of_k, b_rows_of_n});
        c.download();
        const auto element = [&](const Array<T>& x, int row, int column) {
          return row < valid ? value(x.host[static_cast<std::size_t>(row * 64 + column)]) : 0.0;
        };
        double worst = 0;
        for (int m = 0; m < 64; ++m) {
          for (int n = 0; n < 64; ++n) {
            double sum = 0;
            for (int k = 0; k < 64; ++k) {
              sum += (a_rows_of_k ? element(a, k, m) : element(a, m, k)) *
                     (b_rows_of_n ? element(b, n, k) : element(b, k, n));
            }
            const double error = std::abs(sum - c.host[static_cast<std::size_t>(m * 64 + n)]);
            worst = error <= worst ? worst : error;  // a NaN becomes the worst
            if (std::isnan(error)) worst = INFINITY;
          }
        }
        CHECK(worst < 1e-4);
      }
    }
  }
}

template <class T>
void check_chain(double unit) {
  Array<T> a(64 * 64);
  Array<T> b(64 * 64);
  Array<T> c(64 * 64);
  fill(a, 3);
  fill(b, 4);
  chain_kernel<T><<<1, 128>>>(a.upload(), b.upload(), c.upload());
  c.download();
  const auto multiply = [](const std::vector<double>& x, const std::vector<double>& y) {
    std::vector<double> out(64 * 64, 0.0);
    for (std::size_t m = 0; m < 64; ++m) {
      for (std::size_t k = 0; k < 64; ++k) {
        for (std::size_t n = 0; n < 64; ++n) out[m * 64 + n] += x[m * 64 + k] * y[k * 64 + n];
      }
    }
    return out;
  };
  std::vector<double> x(64 * 64);
  std::vector<double> y(64 * 64);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = value(a.host[i]);
    y[i] = value(b.host[i]);
  }
  const std::vector<double> expected = multiply(multiply(x, y), y);
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(value(c.host[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  CHECK(std::sqrt(difference / norm) < 2 * unit);
}

}  // namespace

TEST_CASE("the device's inverse of a unit lower triangular matrix is the host's in fp64")
{
  GDNFLOW_REQUIRE_GPU();
  constexpr std::size_t size = 64;
  for (const float scale : {0.0F, 0.05F, 0.3F}) {
    CAPTURE(scale);
    Array<float> matrix(size * size);
    matrix.host = normal(size * size, 5);
    for (float& x : matrix.host) x *= scale;
    const std::vector<float> m = matrix.host;
    invert_kernel<<<1, 128>>>(matrix.upload());
    matrix.download();

    std::vector<double> inverse(size * size, 0.0);
    for (std::size_t column = 0; column < size; ++column) {
      for (std::size_t row = column; row < size; ++row) {
        double x = row == column ? 1.0 : 0.0;
        for (std::size_t k = column; k < row; ++k) {
          x -= static_cast<double>(m[row * size + k]) * inverse[k * size + column];
        }
        inverse[row * size + column] = x;
      }
    }
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < inverse.size(); ++i) {
      difference += std::pow(static_cast<double>(matrix.host[i]) - inverse[i], 2);
      norm += inverse[i] * inverse[i];
      if (i % size > i / size) CHECK(matrix.host[i] == 0.0F);
    }
    CHECK(std::sqrt(difference / norm) < 3e-6);
  }
}

TEST_CASE("products of tiles equal a loop for every way the operands lie, rows past the end zero")
{
  GDNFLOW_REQUIRE_GPU();
  check_products<__nv_bfloat16>();
  check_products<__half>();
}

TEST_CASE("an accumulator is the left operand of the next product without moving")
{
  GDNFLOW_REQUIRE_GPU();
  check_chain<__nv_bfloat16>(1.7e-3);
  check_chain<__half>(2.1e-4);
}

TEST_CASE("states survive the way through registers in every layout and type")
{
  GDNFLOW_REQUIRE_GPU();
  constexpr std::int64_t rows = 3;
  constexpr std::int64_t heads = 2;
  constexpr std::int64_t k_dim = 8;
  constexpr std::int64_t v_dim = 6;
  const auto pool = [&](float* data, StateLayout layout) {
    const bool kv = layout == StateLayout::kv;
    return device::StatePool(
        TensorView::dense(data, DType::f32, {rows, heads, kv ? k_dim : v_dim, kv ? v_dim : k_dim}),
        layout);
  };
  Array<float> from(rows * heads * k_dim * v_dim);
  Array<float> to(from.host.size());
  from.host = normal(from.host.size(), 6);
  for (auto& x : to.host) x = 0.0F;
  // From kv to vk, rows reversed: a transposition of each matrix.
  const device::StatePool source = pool(from.upload(), StateLayout::kv);
  const device::StatePool destination = pool(to.upload(), StateLayout::vk);
  for (int head = 0; head < heads; ++head) {
    copy_state_kernel<<<1, 32>>>(source, destination, rows, head, k_dim, v_dim);
  }
  to.download();
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t k = 0; k < k_dim; ++k) {
        for (std::int64_t v = 0; v < v_dim; ++v) {
          const auto index =
              static_cast<std::size_t>(((row * heads + head) * k_dim + k) * v_dim + v);
          const auto moved =
              static_cast<std::size_t>((((rows - 1 - row) * heads + head) * v_dim + v) * k_dim + k);
          CHECK(to.host[moved] == from.host[index]);
        }
      }
    }
  }
}
