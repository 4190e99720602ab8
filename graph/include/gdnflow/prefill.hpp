#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <string>

namespace gdnflow {

/// The tensors of one prefill call; null data means absent. Shapes as in gdnflow/stages.hpp:
/// T tokens, N sequences, P pool rows, K checkpoint rows, [r, c] = [d_k, d_v] for the `kv` layout
/// and [d_v, d_k] for `vk`.
struct PrefillTensors {
  TensorView q{};                     ///< [T, Hqk, Dk] activation
  TensorView k{};                     ///< [T, Hqk, Dk] activation
  TensorView v{};                     ///< [T, Hv, Dv] activation
  TensorView g{};                     ///< [T, Hv] f32: log decay, or alpha; absent with a raw gate
  TensorView beta{};                  ///< [T, Hv] f32; absent with logits
  TensorView a{};                     ///< [T, Hv] activation: raw gate
  TensorView b{};                     ///< [T, Hv] activation: logit of beta
  TensorView a_log{};                 ///< [Hv] f32
  TensorView dt_bias{};               ///< [Hv] f32
  TensorView cu_seqlens{};            ///< [N+1] i32 or i64
  TensorView prefix_lens{};           ///< [N], as cu_seqlens
  TensorView initial_state{};         ///< [N or P, Hv, r, c]
  TensorView final_state{};           ///< [N or P, Hv, r, c]; may be the same
                                      ///< memory: a row written by one sequence is then read
                                      ///< by no other
  TensorView state_indices{};         ///< [N] i32
  TensorView output_state_indices{};  ///< [N] i32
  TensorView has_initial_state{};     ///< [N] u8
  TensorView checkpoints{};           ///< [K or P, Hv, r, c]
  TensorView checkpoint_state_indices{};  ///< [K] i32
  TensorView o{};                         ///< [T, Hv, Dv] activation
};

struct PrefillOptions {
  std::string recipe{};  ///< empty: "auto"
  VariantOverrides overrides{};
  bool behind_callers = false;  ///< as in ExecutorOptions
};

/// What a call with these tensors is planned for: T of q, N of cu_seqlens, or `sequences` where the
/// problem is dense. Errors: invalid_argument where they do not have the rank for it.
GDNFLOW_API Capacity prefill_capacity(const Problem& problem, const PrefillTensors& tensors,
                                      std::int64_t sequences = 1);

/// Bytes of workspace that `prefill` needs for a problem and capacity on a device.
/// Errors: those of make_pipeline.
GDNFLOW_API std::int64_t prefill_workspace_bytes(const Problem& problem, const Capacity& capacity,
                                                 Device device, const PrefillOptions& options = {});

/// The prefill forward pass in one call: runs on the tensors' device, enqueued on `stream` for CUDA
/// (no synchronisation, may be captured), to completion on the host. The capacity is taken from
/// the tensors: T of q, N of cu_seqlens (or of `sequences` where dense). `workspace` holds
/// intermediates: at least prefill_workspace_bytes(), of any alignment, used by one stream at a
/// time. Plans are kept per thread, so a repeated shape costs no planning. Thread-safe.
/// Errors: invalid_argument, one line with what, expected and got, before anything is launched;
/// unsupported where no variant can serve; cuda.
GDNFLOW_API void prefill(const Problem& problem, const PrefillTensors& tensors, void* workspace,
                         std::int64_t workspace_bytes, Stream stream = nullptr,
                         const PrefillOptions& options = {}, std::int64_t sequences = 1);

}  // namespace gdnflow
