#pragma once

#include "host_device.hpp"

namespace gdnflow {

/// A double whose operations are each rounded once, to nearest even. nvcc and some hosts' compilers
/// contract a * b + c into one operation where they please, and their exp and log differ in the
/// last bit: numbers that must be equal on host and device are made of this type alone. The host's
/// half of the promise is -ffp-contract=off on the files that use it.
struct Rounded {
  double value;

  GDNFLOW_HOST_DEVICE constexpr Rounded(double v) : value(v) {}  // NOLINT
};

GDNFLOW_HOST_DEVICE inline Rounded operator+(Rounded a, Rounded b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a.value, b.value);
#else
  return a.value + b.value;
#endif
}

GDNFLOW_HOST_DEVICE inline Rounded operator-(Rounded a, Rounded b) {
#if defined(__CUDA_ARCH__)
  return __dsub_rn(a.value, b.value);
#else
  return a.value - b.value;
#endif
}

GDNFLOW_HOST_DEVICE inline Rounded operator-(Rounded a) { return -a.value; }

GDNFLOW_HOST_DEVICE inline Rounded operator*(Rounded a, Rounded b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a.value, b.value);
#else
  return a.value * b.value;
#endif
}

GDNFLOW_HOST_DEVICE inline Rounded operator/(Rounded a, Rounded b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a.value, b.value);
#else
  return a.value / b.value;
#endif
}

}  // namespace gdnflow
