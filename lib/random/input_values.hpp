#pragma once

#include <gdnflow/inputs.hpp>

#include "random/draw.hpp"

#include <cmath>
#include <cstdint>

namespace gdnflow::random {

/// A fill_input call as plain numbers; what host and device both work from.
struct InputSpec {
  InputKind kind = InputKind::q;
  Distribution distribution = Distribution::random_decay;
  std::uint64_t seed = 0;
  std::int64_t elements = 0;
  std::int64_t heads = 1;   ///< of g
  std::int64_t row = 1;     ///< elements of the last dimension
  bool normalized = false;  ///< rows belong together: q and k
};

GDNFLOW_HOST_DEVICE inline bool is_query(InputKind kind) {
  return kind == InputKind::q || kind == InputKind::raw_q;
}
GDNFLOW_HOST_DEVICE inline bool is_key(InputKind kind) {
  return kind == InputKind::k || kind == InputKind::raw_k;
}

/// Elements that must be made by one thread. Rows of q and k have a norm in common; of the rest any
/// range will do.
GDNFLOW_HOST_DEVICE inline std::int64_t unit_of(const InputSpec& spec) {
  return spec.normalized ? spec.row : 4;
}

/// A number before its row is normalised.
GDNFLOW_HOST_DEVICE inline Rounded raw_key(const InputSpec& spec, Rounded normal) {
  return spec.distribution == Distribution::correlated ? silu(normal + 1.0) : normal;
}

/// One row of q or k. `store(index, float)` takes each element.
template <class Store>
GDNFLOW_HOST_DEVICE inline void make_row(const InputSpec& spec, std::int64_t row, Store store) {
  const bool query = is_query(spec.kind);
  const bool raw = spec.kind == InputKind::raw_q || spec.kind == InputKind::raw_k;
  const Sequence sequence = query ? Sequence::q : Sequence::k;
  const std::int64_t first = row * spec.row;
  // Drawn twice, once for the norm: a row has no bounded length to be kept in.
  Rounded squares = 0.0;
  Normals for_norm(spec.seed, sequence, first);
  for (std::int64_t i = 0; i < spec.row; ++i) {
    const Rounded x = raw_key(spec, for_norm.next());
    squares = squares + x * x;
  }
  Rounded factor = Rounded(1.0) / square_root(squares);
  if (spec.distribution == Distribution::unnormalized && !query) {
    factor = factor * 2.0 * uniform_of(word_of(spec.seed, Sequence::key_length, row));
  }
  if (raw) {
    // An element of its own for each row of q and of k.
    const std::int64_t length = 2 * row + (query ? 0 : 1);
    const Rounded power =
        Rounded(8.0) * uniform_of(word_of(spec.seed, Sequence::raw_length, length)) - 4.0;
    factor = factor * exponential(Rounded(0x1.62e42fefa39efp-1) * power);
  }
  Normals normals(spec.seed, sequence, first);
  for (std::int64_t i = 0; i < spec.row; ++i) {
    store(first + i, static_cast<float>((raw_key(spec, normals.next()) * factor).value));
  }
}

/// A of the `model` gates: 0 for the first head, 16 for the last, uniform between for the others.
GDNFLOW_HOST_DEVICE inline Rounded head_rate(const InputSpec& spec, std::int64_t head) {
  if (head == 0) return 0.0;
  if (head == spec.heads - 1) return 16.0;
  return Rounded(16.0) * uniform_of(word_of(spec.seed, Sequence::head_rate, head));
}

/// The log decay of one token and head.
GDNFLOW_HOST_DEVICE inline Rounded gate(const InputSpec& spec, std::int64_t index, Rounded normal) {
  const std::int64_t token = index / spec.heads;
  const std::int64_t head = index % spec.heads;
  const auto uniform = [&] { return uniform_of(word_of(spec.seed, Sequence::g, index)); };
  bool frozen = false;
  switch (spec.distribution) {
    case Distribution::no_decay:
      frozen = true;
      break;
    case Distribution::mixed:
      frozen = token % 2 == 0;
      break;
    case Distribution::quarter_frozen:
      frozen = head % 4 == 0;
      break;
    case Distribution::model:
      frozen = head == 0;  // and not -0 * softplus
      if (!frozen) return -(head_rate(spec, head) * softplus(Rounded(0.5) * normal + 1.0));
      break;
    case Distribution::strong:
      return Rounded(-20.0) + Rounded(20.0 - 1e-4) * uniform();
    case Distribution::hard_reset:
      if (word_of(spec.seed, Sequence::reset, index) % 97 == 0) return -HUGE_VAL;
      break;
    case Distribution::huge:
      return -exponential(Rounded(0x1.26bb1bbb55516p+1) *
                          (Rounded(3.0) + Rounded(3.0) * uniform()));
    default:
      break;
  }
  return frozen ? Rounded(0.0) : log_sigmoid(normal) / 16.0;
}

/// Elements [first, first + count) of anything but q and k.
template <class Store>
GDNFLOW_HOST_DEVICE inline void make_elements(const InputSpec& spec, std::int64_t first,
                                              std::int64_t count, Store store) {
  const Sequence sequence = spec.kind == InputKind::v      ? Sequence::v
                            : spec.kind == InputKind::g    ? Sequence::g
                            : spec.kind == InputKind::beta ? Sequence::beta
                                                           : Sequence::initial_state;
  Normals normals(spec.seed, sequence, first);
  for (std::int64_t i = first; i < first + count; ++i) {
    Rounded x = normals.next();
    if (spec.kind == InputKind::g) {
      x = gate(spec, i, x);
    } else if (spec.kind == InputKind::beta) {
      x = sigmoid(x);
    }
    store(i, static_cast<float>(x.value));
  }
}

/// Element `index` of a fill_uniform.
GDNFLOW_HOST_DEVICE inline float uniform_value(std::uint64_t seed, float low, float high,
                                               std::int64_t index) {
  const Rounded span = Rounded(high) - Rounded(low);
  const Rounded u = uniform_of(word_of(seed, Sequence::uniform_fill, index));
  return static_cast<float>((Rounded(low) + span * u).value);
}

}  // namespace gdnflow::random
