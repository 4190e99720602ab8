#include <gdnflow/compare.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>

#include "support/device_tensor.hpp"
#include "support/expect_error.hpp"
#include "support/golden.hpp"
#include "support/gpu.hpp"
#include "support/tensor.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::DeviceTensor;
using gdnflow::test::expect_error;
using gdnflow::test::HostTensor;
using gdnflow::test::Inputs;

namespace {

// Doubles in device memory, set to NaN so that an element left unwritten shows.
class DeviceDoubles {
 public:
  explicit DeviceDoubles(std::size_t count)
      : DeviceDoubles(std::vector<double>(count, std::numeric_limits<double>::quiet_NaN())) {}
  explicit DeviceDoubles(const std::vector<double>& values) : count_(values.size()) {
    REQUIRE(cudaMalloc(&data_, (count_ + 1) * sizeof(double)) == cudaSuccess);
    REQUIRE(cudaMemcpy(data_, values.data(), count_ * sizeof(double), cudaMemcpyHostToDevice) ==
            cudaSuccess);
  }
  DeviceDoubles(const DeviceDoubles&) = delete;
  DeviceDoubles& operator=(const DeviceDoubles&) = delete;
  ~DeviceDoubles() { (void)cudaFree(data_); }

  double* data() const { return static_cast<double*>(data_); }
  std::vector<double> download() const {
    std::vector<double> values(count_);
    REQUIRE(cudaMemcpy(values.data(), data_, count_ * sizeof(double), cudaMemcpyDeviceToHost) ==
            cudaSuccess);
    return values;
  }

 private:
  std::size_t count_;
  void* data_ = nullptr;
};

double relative_rms(const std::vector<double>& got, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1);
}

void check_same_bits(const HostTensor& host, const DeviceTensor& device) {
  const HostTensor back(host.view().dtype, {host.view().extents.begin(),
                                            host.view().extents.begin() + host.view().rank});
  device.download(back);
  CHECK(std::memcmp(back.view().data, host.view().data,
                    static_cast<std::size_t>(host.view().bytes())) == 0);
}

void check_oracle(const Problem& p, const OracleInputs& in) {
  CAPTURE(to_string(p));
  const OracleResult expected = oracle_recurrent(p, in);
  const DeviceTensor q(in.q), k(in.k), v(in.v), g(in.g), beta(in.beta);
  OracleInputs on_device{q.view(), k.view(), v.view(), g.view(), beta.view(), {}, in.cu_seqlens};
  const HostTensor none(DType::f32, {0});
  const DeviceTensor state(in.initial_state.data == nullptr ? none.view() : in.initial_state);
  if (in.initial_state.data != nullptr) on_device.initial_state = state.view();
  const DeviceDoubles o(expected.o.size()), final_state(expected.final_state.size());
  oracle_on_device(p, on_device, o.data(), final_state.data());
  CHECK(relative_rms(o.download(), expected.o) < 1e-12);
  CHECK(relative_rms(final_state.download(), expected.final_state) < 1e-12);
  const DeviceDoubles again(expected.o.size());
  oracle_on_device(p, on_device, again.data(), nullptr);
  CHECK(again.download() == o.download());
}

}  // namespace

TEST_CASE("a device makes the same inputs as the host, bit for bit")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Distribution d : distributions()) {
    CAPTURE(to_string(d));
    const auto check = [&](InputKind kind, DType type, std::vector<std::int64_t> extents) {
      CAPTURE(to_string(type));
      const HostTensor host(type, extents);
      const DeviceTensor device(host.view());
      fill_input(kind, d, 77, host);
      fill_input(kind, d, 77, device.view());
      check_same_bits(host, device);
    };
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const std::int64_t dim : {1, 7, 64, 128}) {
        check(InputKind::q, type, {33, 3, dim});
        check(InputKind::k, type, {33, 3, dim});
        check(InputKind::v, type, {33, 3, dim});
        check(InputKind::raw_q, type, {33, 3, dim});
        check(InputKind::raw_k, type, {33, 3, dim});
      }
      check(InputKind::initial_state, type, {2, 3, 16, 17});
    }
    check(InputKind::g, DType::f32, {20011, 5});
    check(InputKind::beta, DType::f32, {20011, 5});
  }
  const HostTensor host(DType::f32, {1001, 3});
  const DeviceTensor device(host.view());
  fill_uniform(3, -1.0F, 0.5F, host);
  fill_uniform(3, -1.0F, 0.5F, device.view());
  check_same_bits(host, device);
}

TEST_CASE("a comparison on a device equals the host's")
{
  GDNFLOW_REQUIRE_GPU();
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const bool poisoned : {false, true}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      CAPTURE(to_string(type));
      CAPTURE(poisoned);
      const HostTensor expected(DType::f32, {1237, 3, 17});
      const HostTensor got(type, {1237, 3, 17});
      fill_input(InputKind::v, Distribution::random_decay, 1, expected);
      fill_input(InputKind::v, Distribution::random_decay, 1, got);
      expected.as<float>()[40000] += 0.5F;
      expected.as<float>()[50000] += 0.25F;
      if (poisoned) {
        expected.as<float>()[30000] = inf;
        expected.as<float>()[20000] = std::nanf("");
      }
      const Comparison host = compare(got, expected);
      const DeviceTensor got_device(got.view()), expected_device(expected.view());
      std::vector<double> wide(expected.as<float>(),
                               expected.as<float>() + expected.view().elements());
      const DeviceDoubles wide_device(wide);
      for (const Comparison& device : {compare_on_device(got_device.view(), expected_device.view()),
                                       compare_on_device(got_device.view(), wide_device.data())}) {
        CHECK(device.relative_rms == doctest::Approx(host.relative_rms).epsilon(1e-12));
        CHECK(device.max_abs == host.max_abs);
        CHECK(device.elements == host.elements);
        CHECK(device.over_tolerance == host.over_tolerance);
        CHECK(device.nonfinite_mismatches == host.nonfinite_mismatches);
        CHECK(device.worst.index == host.worst.index);
      }
    }
  }
}

TEST_CASE("the device's oracle equals the host's")
{
  GDNFLOW_REQUIRE_GPU();
  std::uint64_t seed = 0;
  for (const std::int32_t dim : {1, 24, 64, 128, 200, 256}) {
    for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
      Problem p;
      p.qk_heads = 2;
      p.v_heads = 6;
      p.qk_dim = dim;
      p.v_dim = dim == 24 ? 40 : dim;
      p.state_layout = layout;
      p.head_map = seed % 2 == 0 ? HeadMap::grouped : HeadMap::interleaved;
      p.qk_norm = seed % 3 == 0;
      p.initial_state = seed % 2 == 0;
      p.activation = seed % 3 == 1 ? DType::f16 : DType::bf16;
      const Distribution d = distributions()[seed % 9];  // all but the un-normalised
      check_oracle(p, Inputs::draw(p, {0, 37, 130, 1, 0}, d, ++seed).views());
    }
  }
}

TEST_CASE("the device's oracle reads strided inputs and zeroes rows that no sequence owns")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = [] {
    Problem q;
    q.qk_heads = 1;
    q.v_heads = 2;
    q.qk_dim = q.v_dim = 32;
    return q;
  }();
  const Inputs in = Inputs::draw(p, {50}, Distribution::mixed, 4);
  OracleInputs views = in.views();
  // Every second token of tensors of 50.
  for (TensorView* view : {&views.q, &views.k, &views.v, &views.g, &views.beta}) {
    view->extents[0] = 25;
    view->strides[0] *= 2;
  }
  views.cu_seqlens = {3, 10, 22};
  check_oracle(p, views);
}

TEST_CASE("the device's oracle agrees with another implementation")
{
  GDNFLOW_REQUIRE_GPU();
  for (const std::string_view name : test::golden_names) {
    CAPTURE(name);
    const auto golden = test::Golden::open(name);
    check_oracle(golden.problem, golden.inputs);
  }
}

TEST_CASE("what a device cannot take is refused before anything runs")
{
  GDNFLOW_REQUIRE_GPU();
  Problem p;
  p.qk_heads = p.v_heads = 1;
  p.qk_dim = 257;
  p.v_dim = 8;
  const Inputs in = Inputs::draw(p, {3}, Distribution::mixed, 4);
  expect_error(ErrorCode::invalid_argument, {"q", "cuda"},
               [&] { oracle_on_device(p, in.views(), nullptr, nullptr); });
  const DeviceTensor q(in.q.view()), k(in.k.view()), v(in.v.view()), g(in.g.view()),
      beta(in.beta.view());
  const OracleInputs on_device{q.view(),    k.view(), v.view(),     g.view(),
                               beta.view(), {},       in.cu_seqlens};
  expect_error(ErrorCode::invalid_argument, {"o has no data"},
               [&] { oracle_on_device(p, on_device, nullptr, nullptr); });
  const DeviceDoubles o(24);
  expect_error(ErrorCode::unsupported, {"256", "257"},
               [&] { oracle_on_device(p, on_device, o.data(), nullptr); });
  TensorView sparse = v.view();
  sparse.strides[0] = 16;
  expect_error(ErrorCode::invalid_argument, {"dense"},
               [&] { compare_on_device(sparse, v.view()); });
  expect_error(ErrorCode::invalid_argument, {"extents"},
               [&] { compare_on_device(v.view(), q.view()); });
}
