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

std::vector<Sequence> read_sequences(const StageCall& call, const TensorView& prefix_lens) {
  const std::int64_t count = call.capacity.max_sequences;
  std::vector<Sequence> sequences(static_cast<std::size_t>(count));
  const TensorView& cu_seqlens = call["cu_seqlens"];
  const bool dense = cu_seqlens.data == nullptr;
  // Behind the last entry it repeats.
  const auto boundary = [&](std::int64_t n) {
    return dense ? n * (call.tokens / count)
                 : std::clamp<std::int64_t>(index_at(cu_seqlens, std::min(n, call.sequences)), 0,
                                            call.tokens);
  };
  std::int64_t border = boundary(0);
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t next = std::max(border, boundary(n + 1));
    Sequence& sequence = sequences[static_cast<std::size_t>(n)];
    sequence.first = border;
    sequence.tokens = next - border;
    if (prefix_lens.data != nullptr && n < call.sequences) {
      sequence.prefix = std::clamp<std::int64_t>(index_at(prefix_lens, n), 0, most_prefix);
    }
    border = next;
  }
  return sequences;
}

}  // namespace gdnflow::stages::host
