#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace gdnflow {

/// Distributions of test and benchmark inputs. q and k are drawn from N(0,1), L2-normalised in
/// fp32 and rounded to the activation type, v and the initial state are N(0,1), beta is
/// sigmoid(N(0,1)), and g is as named, unless said otherwise.
enum class Distribution : std::uint8_t {
  random_decay,    ///< g = logsigmoid(N(0,1)) / 16
  mixed,           ///< random_decay with g = 0 on even tokens
  no_decay,        ///< g = 0
  quarter_frozen,  ///< random_decay with g = 0 in every fourth head
  correlated,      ///< random_decay; q and k = normalize(SiLU(N(0,1) + 1))
  model,           ///< g = -A softplus(0.5 N(0,1) + 1), A ~ U(0,16) a head, first 0, last 16
  strong,          ///< g ~ U(-20, -1e-4)
  hard_reset,      ///< random_decay with g = -inf on one token in 97
  huge,            ///< g = -1e3 ... -1e6, log-uniform
  unnormalized,    ///< random_decay; |k| ~ U(0, 2)
};

GDNFLOW_API std::string_view to_string(Distribution distribution) noexcept;
GDNFLOW_API std::optional<Distribution> parse_distribution(std::string_view text) noexcept;
GDNFLOW_API std::span<const Distribution> distributions() noexcept;

/// What a tensor to be filled is. raw_q, raw_k: what `qk_norm` is to normalise, q and k times 2^x
/// with an x of each row's own, uniform between -4 and 4.
enum class InputKind : std::uint8_t { q, k, v, g, beta, initial_state, raw_q, raw_k };

/// What q and k of a problem are drawn as.
constexpr InputKind query_input(const Problem& problem) noexcept {
  return problem.qk_norm ? InputKind::raw_q : InputKind::q;
}
constexpr InputKind key_input(const Problem& problem) noexcept {
  return problem.qk_norm ? InputKind::raw_k : InputKind::k;
}

/// Fills a dense tensor on the host or a CUDA device. A counter-based generator: every element is a
/// function of (seed, kind, its index), so host and device make the same numbers whatever the
/// order. q, k, raw_q, raw_k: [T, Hqk, Dk]; v: [T, Hv, Dv]; g, beta: [T, Hv]; initial_state: [N,
/// Hv, r, c]. Waits on CUDA. Errors: invalid_argument for a wrong rank or type; unsupported without
/// CUDA; cuda.
GDNFLOW_API void fill_input(InputKind kind, Distribution distribution, std::uint64_t seed,
                            const TensorView& out);

/// Fills a dense tensor with uniform numbers in (low, high), then rounded to its type, by the same
/// generator. Errors: invalid_argument unless low < high are finite; else as above.
GDNFLOW_API void fill_uniform(std::uint64_t seed, float low, float high, const TensorView& out);

}  // namespace gdnflow
