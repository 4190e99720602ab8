#include "device/element.cuh"
#include "device/inputs.hpp"
#include "device/scoped_device.hpp"

#include <algorithm>

#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/system_error.h>

namespace gdnflow::device {
namespace {

struct Store {
  void* data;
  DType type;

  __device__ void operator()(std::int64_t index, float value) const {
    store_element(data, type, index, value);
  }
};

struct MakeUnit {
  random::InputSpec spec;
  Store store;

  __device__ void operator()(std::int64_t unit) const {
    if (spec.normalized) {
      random::make_row(spec, unit, store);
      return;
    }
    const std::int64_t first = unit * random::unit_of(spec);
    const std::int64_t rest = spec.elements - first;
    random::make_elements(spec, first, rest < random::unit_of(spec) ? rest : random::unit_of(spec),
                          store);
  }
};

struct MakeUniform {
  std::uint64_t seed;
  float low;
  float high;
  Store store;

  __device__ void operator()(std::int64_t index) const {
    store(index, random::uniform_value(seed, low, high, index));
  }
};

// Runs `make` for 0 ... count - 1 on the tensor's device and waits.
template <class Make>
void for_each_index(Device device, std::int64_t count, Make make) {
  const ScopedDevice current(device);
  try {
    thrust::for_each(thrust::device, thrust::counting_iterator<std::int64_t>(0),
                     thrust::counting_iterator<std::int64_t>(count), make);
  } catch (const thrust::system_error& error) {
    throw Error(ErrorCode::cuda, std::string("filling a tensor: ") + error.what());
  }
  check_cuda(cudaStreamSynchronize(nullptr), "filling a tensor");
}

}  // namespace

void fill_input(const random::InputSpec& spec, const TensorView& out) {
  const std::int64_t unit = random::unit_of(spec);
  for_each_index(out.device, (spec.elements + unit - 1) / unit,
                 MakeUnit{spec, {out.data, out.dtype}});
}

void fill_uniform(std::uint64_t seed, float low, float high, const TensorView& out) {
  for_each_index(out.device, out.elements(), MakeUniform{seed, low, high, {out.data, out.dtype}});
}

}  // namespace gdnflow::device
