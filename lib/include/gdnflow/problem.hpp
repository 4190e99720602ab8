#pragma once

#include <gdnflow/dtype.hpp>
#include <gdnflow/export.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace gdnflow {

/// Tokens of a chunk. A property of the mathematics as implemented, not an option: the ports'
/// extents, the block inverse and the checkpoints' positions are built on it.
inline constexpr std::int64_t chunk_tokens = 64;

/// Order of the last two dimensions of a state: `kv` is [d_k, d_v], `vk` is [d_v, d_k].
enum class StateLayout : std::uint8_t { kv, vk };

/// Which q/k head a value head reads: `grouped` is h / (Hv / Hqk), the convention of FLA, vLLM and
/// FlashInfer; `interleaved` is h % Hqk, the convention of llama.cpp.
enum class HeadMap : std::uint8_t { grouped, interleaved };

/// What the caller hands over for the decay: its natural log, alpha itself, or the raw projection
/// `a` with A_log and dt_bias, of which g = -exp(A_log) * softplus(a + dt_bias).
enum class GateForm : std::uint8_t { log_decay, alpha, raw };

/// What the caller hands over for beta: the value after the sigmoid, or the logit before it.
enum class BetaForm : std::uint8_t { ready, logit };

/// What the bits of a sequence's results may depend on besides the sequence. `fastest`: on the
/// whole call, its capacity and the machine's multiprocessors; the same call gives the same bits.
/// `batch_invariant`: on nothing but `Problem::model_v_heads` and the kind of machine, so that a
/// sequence has the same bits in any batch, bucket and shard. Variants that cannot promise it
/// refuse.
enum class Mode : std::uint8_t { fastest, batch_invariant };

GDNFLOW_API std::string_view to_string(StateLayout layout) noexcept;
GDNFLOW_API std::string_view to_string(HeadMap map) noexcept;
GDNFLOW_API std::string_view to_string(GateForm form) noexcept;
GDNFLOW_API std::string_view to_string(BetaForm form) noexcept;
GDNFLOW_API std::string_view to_string(Mode mode) noexcept;

/// Everything about a prefill that is fixed when kernels are chosen: heads, types, layouts, and
/// which optional tensors take part. Lengths are not here: they live on the device. A value type,
/// hashable and printable, and with `Capacity` the key of the graph cache.
struct Problem {
  std::int32_t qk_heads = 16;  ///< Hqk
  std::int32_t v_heads = 32;   ///< Hv, a multiple of Hqk
  std::int32_t qk_dim = 128;   ///< Dk
  std::int32_t v_dim = 128;    ///< Dv

  DType activation = DType::bf16;  ///< q, k, v, o, and the raw gates
  DType state = DType::f32;        ///< initial and final states and checkpoints
  DType index = DType::i32;        ///< cu_seqlens and prefix_lens: i32 or i64

  StateLayout state_layout = StateLayout::kv;
  HeadMap head_map = HeadMap::grouped;
  GateForm gate = GateForm::log_decay;
  BetaForm beta = BetaForm::ready;
  bool qk_norm = false;  ///< L2-normalise q and k first, eps 1e-6 inside the root
  float scale = 0.0F;    ///< of q k^T; 0 means 1 / sqrt(Dk)

  bool cu_seqlens = true;      ///< false: dense, every sequence has max_tokens / max_sequences
  bool prefix_lens = false;    ///< tokens before each sequence's first: chunks fall at absolute
                               ///< multiples of 64, so the first chunk may be short
  bool initial_state = false;  ///< else every sequence starts from zero
  bool final_state = true;     ///< written at each sequence's end
  bool state_indices = false;  ///< initial_state is a pool, row given per sequence, -1: zero
  bool output_state_indices = false;  ///< final_state is a pool, row given per sequence, -1: skip;
                                      ///< absent with state_indices: the slot read is written
  bool has_initial_state = false;     ///< a flag per sequence: zero means start from zero
  std::int32_t checkpoint_interval = 0;   ///< tokens, a multiple of 64; 0: no checkpoints
  bool checkpoint_state_indices = false;  ///< checkpoints go to pool rows, -1: skip
  bool zero_padding = false;  ///< rows of o that no sequence owns are zeroed, else untouched

  Mode mode = Mode::fastest;
  std::int32_t model_v_heads = 0;  ///< with `batch_invariant`: value heads of the whole model, of
                                   ///< which a shard has v_heads; 0: v_heads

  /// The scale in force.
  GDNFLOW_API float effective_scale() const noexcept;
  /// Whether log decay and beta are handed over as kernels read them.
  bool has_ready_gates() const noexcept {
    return gate == GateForm::log_decay && beta == BetaForm::ready;
  }
  /// The q/k head that value head `h` reads.
  std::int32_t qk_head_of(std::int32_t h) const noexcept {
    return head_map == HeadMap::grouped ? h / (v_heads / qk_heads) : h % qk_heads;
  }

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// The most that one plan, arena and graph can serve. `max_tokens` is the T and `max_sequences`
/// the N of every bound tensor, or the most of them (ExecutorOptions::fewer_rows); what a call
/// holds below that is read from `cu_seqlens`.
struct Capacity {
  std::int64_t max_tokens = 0;
  std::int64_t max_sequences = 1;

  friend bool operator==(const Capacity&, const Capacity&) = default;
};

/// Where the stage `segments` may cut a sequence: at multiples of this many of its chunks.
inline constexpr std::int64_t segment_grain = 4;
/// The most cuts that it makes in all.
inline constexpr std::int64_t most_cuts = 256;
/// How many segments fill the machine where a head is worked on by `blocks_of_head` blocks, each on
/// a part of its value columns; 1: heads alone do, and nothing is cut.
GDNFLOW_API std::int64_t useful_segments(const Problem& problem, std::int32_t multiprocessors,
                                         std::int64_t blocks_of_head = 2) noexcept;

/// The most chunks that any lengths within the capacity can make (the ports' "NC").
GDNFLOW_API std::int64_t max_chunks(const Problem& problem, const Capacity& capacity) noexcept;

/// Refuses a problem that no implementation can serve. Errors: invalid_argument, one line that
/// names the field, what is expected and what was got.
GDNFLOW_API void validate(const Problem& problem);
GDNFLOW_API void validate(const Problem& problem, const Capacity& capacity);

/// "16/32 heads, d 128, bf16, state f32 kv, initial state, qk norm".
GDNFLOW_API std::string to_string(const Problem& problem);
GDNFLOW_API std::string to_string(const Capacity& capacity);

GDNFLOW_API std::size_t hash_value(const Problem& problem) noexcept;
GDNFLOW_API std::size_t hash_value(const Capacity& capacity) noexcept;

}  // namespace gdnflow

template <>
struct std::hash<gdnflow::Problem> {
  std::size_t operator()(const gdnflow::Problem& p) const noexcept { return hash_value(p); }
};
template <>
struct std::hash<gdnflow::Capacity> {
  std::size_t operator()(const gdnflow::Capacity& c) const noexcept { return hash_value(c); }
};
