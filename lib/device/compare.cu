#include "device/compare.hpp"
#include "device/element.cuh"
#include "device/scoped_device.hpp"

#include <string>

#include <thrust/execution_policy.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/system_error.h>
#include <thrust/transform_reduce.h>

namespace gdnflow::device {
namespace {

struct Measure {
  const void* got;
  DType got_type;
  const void* expected;
  DType expected_type;
  const double* expected_double;
  Tolerance tolerance;

  __device__ Difference operator()(std::int64_t i) const {
    const double want = expected_double != nullptr
                            ? expected_double[i]
                            : static_cast<double>(load_element(expected, expected_type, i));
    return difference_of(static_cast<double>(load_element(got, got_type, i)), want,
                         tolerance.absolute, tolerance.relative, i);
  }
};

struct Merge {
  __host__ __device__ Difference operator()(const Difference& a, const Difference& b) const {
    return merge(a, b);
  }
};

}  // namespace

Difference compare(const TensorView& got, const TensorView* expected, const double* expected_double,
                   Tolerance tolerance) {
  const ScopedDevice current(got.device);
  Measure measure{got.data, got.dtype, nullptr, DType::f32, expected_double, tolerance};
  if (expected != nullptr) {
    measure.expected = expected->data;
    measure.expected_type = expected->dtype;
  }
  try {
    return thrust::transform_reduce(thrust::device, thrust::counting_iterator<std::int64_t>(0),
                                    thrust::counting_iterator<std::int64_t>(got.elements()),
                                    measure, Difference{}, Merge{});
  } catch (const thrust::system_error& error) {
    throw Error(ErrorCode::cuda, std::string("comparing tensors: ") + error.what());
  }
}

}  // namespace gdnflow::device
