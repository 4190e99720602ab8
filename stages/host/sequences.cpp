#include "host/sequences.hpp"

#include "host/convert.hpp"

#include <algorithm>
#include <type_traits>

namespace gdnflow::stages::host {
namespace {

constexpr std::int64_t most_prefix = std::int64_t{1} << 36;

std::int64_t index_at(const TensorView& view, std::int64_t i) {
  return gdnflow::host::dispatch_index(view.dtype, [&]<class T>(std::type_identity<T>) {
    return static_cast<std::int64_t>(view.as<const T>()[i * view.strides[0]]);
  });
}

}  // namespace

std::int64_t Sequence::first_chunk_tokens() const noexcept {
  return std::min(tokens, chunk_tokens - prefix % chunk_tokens);
}

std::int64_t Sequence::checkpoints(std::int64_t interval) const noexcept {
  return interval == 0 ? 0 : (prefix + tokens) / interval - prefix / interval;
}

std::vector<Sequence> read_sequences(const Capacity& capacity, const TensorView& cu_seqlens,
                                     const TensorView& prefix_lens) {
  const std::int64_t count = capacity.max_sequences;
  std::vector<Sequence> sequences(static_cast<std::size_t>(count));
  const bool dense = cu_seqlens.data == nullptr;
  const std::int64_t share = capacity.max_tokens / count;
  std::int64_t border =
      dense ? 0 : std::clamp<std::int64_t>(index_at(cu_seqlens, 0), 0, capacity.max_tokens);
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t next =
        dense ? border + share
              : std::max(border, std::min(index_at(cu_seqlens, n + 1), capacity.max_tokens));
    Sequence& sequence = sequences[static_cast<std::size_t>(n)];
    sequence.first = border;
    sequence.tokens = next - border;
    if (prefix_lens.data != nullptr) {
      sequence.prefix = std::clamp<std::int64_t>(index_at(prefix_lens, n), 0, most_prefix);
    }
    border = next;
  }
  return sequences;
}

}  // namespace gdnflow::stages::host
