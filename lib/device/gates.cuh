#pragma once

// The decay in log space.

namespace gdnflow::device {

inline constexpr float log2_e = 1.44269504088896340736F;

/// 2^x by the special function unit, within 2 units in the last place; results below the smallest
/// normal number are zero. With log decays multiplied by `log2_e` once, a difference costs no
/// multiplication more.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / sqrt(x) to about 2^-22, of x that is not denormal.
__device__ __forceinline__ float rsqrt_approximate(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// A log decay as it enters a sum: exp(-104) is zero in fp32, so anything below, -inf included,
/// counts as -104 and sums stay finite. A NaN stays, and g > 0 is not touched.
__device__ __forceinline__ float clamp_log_decay(float g) { return g < -104.0F ? -104.0F : g; }

}  // namespace gdnflow::device
