#pragma once

#include <gdnflow/problem.hpp>

namespace gdnflow::test {

/// Of tests that run sessions on the host: small, in fp32, heads shared and dims apart.
inline Problem small_session_problem() {
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  p.qk_dim = 16;
  p.v_dim = 8;
  p.activation = DType::f32;
  return p;
}
/// Relative RMS error that such a run stays within.
inline constexpr double session_bound = 1e-5;

}  // namespace gdnflow::test
