#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace gdnflow {

/// What every implementation is measured against, in fp64: inputs as the kernels get them (after
/// rounding to their types), everything else in double. Shares no code with the stages.
struct OracleInputs {
  TensorView q{};              ///< [T, Hqk, Dk] any float
  TensorView k{};              ///< [T, Hqk, Dk]
  TensorView v{};              ///< [T, Hv, Dv]
  TensorView g{};              ///< [T, Hv] f32, natural log of the decay
  TensorView beta{};           ///< [T, Hv] f32
  TensorView initial_state{};  ///< [N, Hv, r, c] by Problem::state_layout, or absent (null data)
  std::vector<std::int64_t> cu_seqlens{};  ///< [N+1], rising
};

/// Row-major fp64 results. States are [N, Hv, r, c] by Problem::state_layout.
struct OracleResult {
  std::vector<double> o;            ///< [T, Hv, Dv]; zero where no sequence owns the row
  std::vector<double> final_state;  ///< [N, Hv, r, c]
};

/// Token by token: S = alpha (I - beta k k^T) S + beta k v^T, o = scale S^T q. Knows nothing of
/// chunks. Uses heads, dims, layout, head map, scale and qk_norm of the problem. Parallel over
/// sequences and heads. Errors: invalid_argument for shapes that do not fit the problem.
GDNFLOW_API OracleResult oracle_recurrent(const Problem& problem, const OracleInputs& inputs);

/// The chunked derivation in fp64, document form: equals the above to rounding. Checks the
/// mathematics that the kernels are built on. Errors: as above.
GDNFLOW_API OracleResult oracle_chunked(const Problem& problem, const OracleInputs& inputs);

/// The token recurrence in fp64 on a CUDA device, for long cases: tensors of `inputs` on the
/// device, results into device memory of the shapes above (`final_state` may be null). Waits.
/// Errors: as above; unsupported without CUDA or for Dk over 256; cuda.
GDNFLOW_API void oracle_on_device(const Problem& problem, const OracleInputs& inputs, double* o,
                                  double* final_state, Stream stream = nullptr);

}  // namespace gdnflow
