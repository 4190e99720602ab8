#include <gdnflow/error.hpp>
#include <gdnflow/problem.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include <fmt/format.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(std::string_view field, std::string_view expected,
                         const std::string& got) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: expected {}, got {}", field, expected, got));
}

void combine(std::size_t& seed, std::size_t value) noexcept {
  seed ^= value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2);
}

// The one list of the fields of a problem that hashing walks; equality is defaulted.
auto fields(const Problem& p) noexcept {
  return std::tuple(p.qk_heads, p.v_heads, p.qk_dim, p.v_dim, p.activation, p.state, p.index,
                    p.state_layout, p.head_map, p.gate, p.beta, p.qk_norm, p.scale, p.cu_seqlens,
                    p.prefix_lens, p.initial_state, p.final_state, p.state_indices,
                    p.output_state_indices, p.has_initial_state, p.checkpoint_interval,
                    p.checkpoint_state_indices, p.zero_padding, p.mode, p.model_v_heads);
}

}  // namespace

std::string_view to_string(StateLayout layout) noexcept {
  return layout == StateLayout::kv ? "kv" : "vk";
}

std::string_view to_string(HeadMap map) noexcept {
  return map == HeadMap::grouped ? "grouped" : "interleaved";
}

std::string_view to_string(GateForm form) noexcept {
  switch (form) {
    case GateForm::log_decay:
      return "log_decay";
    case GateForm::alpha:
      return "alpha";
    case GateForm::raw:
      return "raw";
  }
  return "?";
}

std::string_view to_string(BetaForm form) noexcept {
  return form == BetaForm::ready ? "ready" : "logit";
}

std::string_view to_string(Mode mode) noexcept {
  return mode == Mode::fastest ? "fastest" : "batch_invariant";
}

float Problem::effective_scale() const noexcept {
  return scale != 0.0F ? scale : 1.0F / std::sqrt(static_cast<float>(qk_dim));
}

std::int64_t useful_segments(const Problem& problem, std::int32_t multiprocessors,
                             std::int64_t blocks_of_head) noexcept {
  return std::clamp<std::int64_t>(multiprocessors / (problem.v_heads * blocks_of_head), 1,
                                  most_cuts);
}

std::int64_t max_chunks(const Problem& problem, const Capacity& capacity) noexcept {
  const std::int64_t tokens = capacity.max_tokens;
  const std::int64_t sequences = capacity.max_sequences;
  // A chunk holds a token at least. A sequence of n tokens makes at most ceil(n / 64) chunks when
  // it starts on a chunk's border, one more where a prefix shifts it.
  const std::int64_t slack = problem.prefix_lens ? 2 * (chunk_tokens - 1) : chunk_tokens - 1;
  return std::min(tokens, (tokens + slack * sequences) / chunk_tokens);
}

void validate(const Problem& p) {
  if (p.qk_heads < 1) refuse("qk_heads", "at least 1", fmt::to_string(p.qk_heads));
  if (p.v_heads < 1 || p.v_heads % p.qk_heads != 0) {
    refuse("v_heads", fmt::format("a multiple of qk_heads ({})", p.qk_heads),
           fmt::to_string(p.v_heads));
  }
  constexpr std::int32_t most_dim = 4096;
  if (p.qk_dim < 1 || p.qk_dim > most_dim) refuse("qk_dim", "1 to 4096", fmt::to_string(p.qk_dim));
  if (p.v_dim < 1 || p.v_dim > most_dim) refuse("v_dim", "1 to 4096", fmt::to_string(p.v_dim));
  if (!is_float(p.activation)) {
    refuse("activation", "f32, bf16 or f16", std::string(to_string(p.activation)));
  }
  if (!is_float(p.state)) refuse("state", "f32, bf16 or f16", std::string(to_string(p.state)));
  if (p.index != DType::i32 && p.index != DType::i64) {
    refuse("index", "i32 or i64", std::string(to_string(p.index)));
  }
  if (!std::isfinite(p.scale) || p.scale < 0.0F) {
    refuse("scale", "a finite number of at least 0 (0: 1/sqrt(qk_dim))", fmt::to_string(p.scale));
  }
  if (p.checkpoint_interval < 0 || p.checkpoint_interval % chunk_tokens != 0) {
    refuse("checkpoint_interval", "0 or a multiple of 64", fmt::to_string(p.checkpoint_interval));
  }
  if (!p.initial_state) {
    if (p.state_indices) refuse("state_indices", "initial_state to be set with it", "it unset");
    if (p.has_initial_state) {
      refuse("has_initial_state", "initial_state to be set with it", "it unset");
    }
  }
  if (p.output_state_indices && !p.final_state) {
    refuse("output_state_indices", "final_state to be set with it", "it unset");
  }
  if (p.model_v_heads != 0 && p.mode != Mode::batch_invariant) {
    refuse("model_v_heads", "mode batch_invariant with it", std::string(to_string(p.mode)));
  }
  if (p.model_v_heads != 0 && p.model_v_heads < p.v_heads) {
    refuse("model_v_heads", fmt::format("0 or at least v_heads ({})", p.v_heads),
           fmt::to_string(p.model_v_heads));
  }
  if (p.checkpoint_state_indices && p.checkpoint_interval == 0) {
    refuse("checkpoint_state_indices", "a checkpoint_interval with it", "0");
  }
}

void validate(const Problem& problem, const Capacity& c) {
  validate(problem);
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() - chunk_tokens;
  if (c.max_tokens < 0 || c.max_tokens > most) {
    refuse("max_tokens", fmt::format("0 to {}", most), fmt::to_string(c.max_tokens));
  }
  if (c.max_sequences < 1 || c.max_sequences > most) {
    refuse("max_sequences", fmt::format("1 to {}", most), fmt::to_string(c.max_sequences));
  }
  if (!problem.cu_seqlens && c.max_tokens % c.max_sequences != 0) {
    refuse("max_tokens", "a multiple of max_sequences where there is no cu_seqlens",
           fmt::format("{} tokens for {} sequences", c.max_tokens, c.max_sequences));
  }
}

std::string to_string(const Problem& p) {
  std::string text = fmt::format("{}/{} heads, ", p.qk_heads, p.v_heads);
  text += p.qk_dim == p.v_dim ? fmt::format("d {}", p.qk_dim)
                              : fmt::format("d_k {} d_v {}", p.qk_dim, p.v_dim);
  text += fmt::format(", {}, state {} {}", to_string(p.activation), to_string(p.state),
                      to_string(p.state_layout));
  const Problem usual;
  const auto add = [&](bool present, const std::string& what) {
    if (present) text += ", " + what;
  };
  add(p.scale != 0.0F, fmt::format("scale {}", p.scale));
  add(p.head_map != usual.head_map, fmt::format("{} heads", to_string(p.head_map)));
  add(p.index != usual.index, fmt::format("{} lengths", to_string(p.index)));
  add(!p.cu_seqlens, "dense");
  add(p.prefix_lens, "prefix lengths");
  add(p.gate != usual.gate, fmt::format("{} gate", to_string(p.gate)));
  add(p.beta != usual.beta, fmt::format("{} beta", to_string(p.beta)));
  add(p.qk_norm, "qk norm");
  add(p.initial_state, "initial state");
  add(p.state_indices, "state indices");
  add(p.output_state_indices, "output state indices");
  add(p.has_initial_state, "initial-state flags");
  add(!p.final_state, "no final state");
  add(p.checkpoint_interval != 0, fmt::format("checkpoints every {}", p.checkpoint_interval));
  add(p.checkpoint_state_indices, "checkpoint indices");
  add(p.zero_padding, "zeroed padding");
  add(p.mode == Mode::batch_invariant, "batch invariant");
  add(p.model_v_heads != 0, fmt::format("of {} value heads", p.model_v_heads));
  return text;
}

std::string to_string(const Capacity& c) {
  return fmt::format("{} token{}, {} sequence{}", c.max_tokens, c.max_tokens == 1 ? "" : "s",
                     c.max_sequences, c.max_sequences == 1 ? "" : "s");
}

std::size_t hash_value(const Problem& problem) noexcept {
  std::size_t seed = 0;
  std::apply(
      [&](const auto&... field) {
        (combine(seed, std::hash<std::remove_cvref_t<decltype(field)>>{}(field)), ...);
      },
      fields(problem));
  return seed;
}

std::size_t hash_value(const Capacity& capacity) noexcept {
  std::size_t seed = std::hash<std::int64_t>{}(capacity.max_tokens);
  combine(seed, std::hash<std::int64_t>{}(capacity.max_sequences));
  return seed;
}

}  // namespace gdnflow
