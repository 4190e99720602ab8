#include "host/matrix.hpp"
#include "host/parallel.hpp"
#include "host/sequences.hpp"
#include "host/states.hpp"
#include "host/variant.hpp"
#include "one_pass/gates.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

// The recurrence as it is defined, token by token in fp32:
//   S <- alpha S,  S <- S + k (beta (v - k^T S)),  o = scale q^T S.
// Slower than the chunked stages, but nothing mixes tokens here: a NaN appears exactly where the
// definition puts it, and g = -inf needs no special care.

namespace gdnflow::stages::one_pass {
namespace {

struct Worker {
  host::Matrix q, k, v, o, state;
  host::Vector g, beta;
  Eigen::RowVectorXf recalled, change;
};

/// One token: row `t` of the worker's tokens.
void step(Worker& w, Eigen::Index t, float scale) {
  const float alpha = std::exp(w.g[t]);
  w.recalled.setZero(w.state.cols());
  for (Eigen::Index i = 0; i < w.state.rows(); ++i) {
    w.state.row(i) *= alpha;
    w.recalled += w.k(t, i) * w.state.row(i);
  }
  w.change = w.beta[t] * (w.v.row(t) - w.recalled);
  w.o.row(t).setZero();
  for (Eigen::Index i = 0; i < w.state.rows(); ++i) {
    w.state.row(i) += w.k(t, i) * w.change;
    w.o.row(t) += w.q(t, i) * w.state.row(i);
  }
  w.o.row(t) *= scale;
}

void run(const StageCall& call) {
  const Problem& p = call.problem;
  const float scale = p.effective_scale();
  const std::int64_t interval = p.checkpoint_interval;
  const host::States states(call);
  const std::vector<host::Sequence> sequences = host::read_sequences(call, call["prefix_lens"]);
  std::vector<std::int64_t> first_checkpoint(sequences.size(), 0);
  for (std::size_t n = 1; n < sequences.size(); ++n) {
    first_checkpoint[n] = first_checkpoint[n - 1] + sequences[n - 1].checkpoints(interval);
  }

  const auto walk = [&](Worker& w, std::int64_t item) {
    const std::int64_t n = item / p.v_heads;
    const auto head = static_cast<std::int32_t>(item % p.v_heads);
    const host::Sequence& sequence = sequences[static_cast<std::size_t>(n)];
    std::int64_t checkpoint = first_checkpoint[static_cast<std::size_t>(n)];
    states.load_initial(n, head, w.state);
    // Tokens are fetched in runs cut where chunks are, so that checkpoints fall between runs.
    std::int64_t count = sequence.first_chunk_tokens();
    for (std::int64_t first = sequence.first; first < sequence.end(); first += count) {
      if (first != sequence.first) count = std::min(chunk_tokens, sequence.end() - first);
      const auto rows = [&](const char* port, std::int64_t of_head) {
        return host::rows_of(call[port], of_head, first, count);
      };
      host::load(rows("q", p.qk_head_of(head)), w.q);
      host::load(rows("k", p.qk_head_of(head)), w.k);
      host::load(rows("v", head), w.v);
      host::load(host::column_of(call["g"], head, first, count), w.g);
      host::load(host::column_of(call["beta"], head, first, count), w.beta);
      w.o.resize(count, p.v_dim);
      for (Eigen::Index t = 0; t < count; ++t) step(w, t, scale);
      host::store(w.o, rows("o", head));
      const std::int64_t position = sequence.prefix + first + count - sequence.first;
      if (interval != 0 && position % interval == 0) {
        states.store_checkpoint(checkpoint++, head, w.state);
      }
    }
    states.store_final(n, head, w.state);
  };
  host::parallel_for(
      call.capacity.max_sequences * p.v_heads, [] { return Worker{}; }, walk);
}

void steps(const StageCall& /*call*/, StepList& out) { out.push_back({"one_pass", HostCall{run}}); }

}  // namespace

Variant host() {
  Variant variant = host::host_variant("token by token in fp32", steps);
  variant.accepts = has_gates;
  return variant;
}

}  // namespace gdnflow::stages::one_pass
