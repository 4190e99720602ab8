#pragma once

#include "random/elementary.hpp"
#include "random/philox.hpp"

#include <cstdint>

namespace gdnflow::random {

/// Independent sequences under one seed. The values are part of what a seed means: append only.
enum class Sequence : std::uint32_t {
  q,
  k,
  v,
  g,
  beta,
  initial_state,
  key_length,    ///< |k| of a row
  head_rate,     ///< A of a head
  reset,         ///< which gates are -inf
  uniform_fill,  ///< fill_uniform
  raw_length     ///< of a row of q or k in front of its normalisation
};

/// The words of elements 4 * block to 4 * block + 3 of a sequence.
GDNFLOW_HOST_DEVICE inline Words words_of(std::uint64_t seed, Sequence sequence,
                                          std::uint64_t block) {
  return philox({{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                  static_cast<std::uint32_t>(sequence), 0}},
                seed);
}

/// The word of one element.
GDNFLOW_HOST_DEVICE inline std::uint32_t word_of(std::uint64_t seed, Sequence sequence,
                                                 std::int64_t index) {
  return words_of(seed, sequence, static_cast<std::uint64_t>(index) / 4).w[index % 4];
}

/// (word + 1/2) / 2^32: in (0, 1), symmetric about 1/2.
GDNFLOW_HOST_DEVICE inline Rounded uniform_of(std::uint32_t word) {
  return (Rounded(word) + 0.5) * 0x1p-32;
}

struct NormalBlock {
  double value[4];
};

/// Four independent normal numbers by the Box-Muller transform, up to 6.8 in magnitude.
GDNFLOW_HOST_DEVICE inline NormalBlock normals_of(Words words) {
  NormalBlock out;
  for (int i = 0; i < 4; i += 2) {
    const Rounded radius = square_root(Rounded(-2.0) * logarithm(uniform_of(words.w[i])));
    const SineCosine angle = sine_cosine_of_turn(words.w[i + 1]);
    out.value[i] = (radius * angle.cosine).value;
    out.value[i + 1] = (radius * angle.sine).value;
  }
  return out;
}

/// Walks the normal numbers of a sequence from an element on, making each block of four once.
class Normals {
 public:
  GDNFLOW_HOST_DEVICE Normals(std::uint64_t seed, Sequence sequence, std::int64_t first)
      : seed_(seed), sequence_(sequence), index_(static_cast<std::uint64_t>(first)) {
    if (index_ % 4 != 0) block_ = normals_of(words_of(seed_, sequence_, index_ / 4));
  }

  GDNFLOW_HOST_DEVICE Rounded next() {
    if (index_ % 4 == 0) block_ = normals_of(words_of(seed_, sequence_, index_ / 4));
    return block_.value[index_++ % 4];
  }

 private:
  std::uint64_t seed_;
  Sequence sequence_;
  std::uint64_t index_;
  NormalBlock block_{};
};

}  // namespace gdnflow::random
