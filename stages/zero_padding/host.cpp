#include "host/matrix.hpp"
#include "host/parallel.hpp"
#include "host/sequences.hpp"
#include "host/variant.hpp"

// Sequences are contiguous, so what no sequence owns stands before the first and behind the last.

namespace gdnflow::stages::zero_padding {
namespace {

void zero_rows(const TensorView& o, std::int64_t begin, std::int64_t end) {
  host::parallel_for_tokens(end - begin, [&](std::int64_t first, std::int64_t count) {
    const host::Matrix zeros = host::Matrix::Zero(count, o.extents[2]);
    for (std::int64_t head = 0; head < o.extents[1]; ++head) {
      host::store(zeros, host::rows_of(o, head, begin + first, count));
    }
  });
}

void run(const StageCall& call) {
  const auto sequences = host::read_sequences(call, TensorView{});
  zero_rows(call["o"], 0, sequences.front().first);
  zero_rows(call["o"], sequences.back().end(), call.tokens);
}

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"zero_padding", HostCall{run}});
}

}  // namespace

Variant host() {
  return host::host_variant("rows before the first and behind the last sequence", steps);
}

}  // namespace gdnflow::stages::zero_padding
