#include "host/chunk_math.hpp"
#include "host/chunk_table.hpp"
#include "host/heads.hpp"
#include "host/parallel.hpp"
#include "host/variant.hpp"

// O = scale (gamma .* (Q S) + tril(exp(gc_i - gc_j) q_i.k_j) V'). One Q K^T serves all value heads
// that read the same q and k.

namespace gdnflow::stages::chunk_output {
namespace {

struct Worker {
  host::Matrix q, k, scores, p, state, new_values, o;
  host::Vector gc;
};

void run(const StageCall& call) {
  const Problem& p = call.problem;
  const float scale = p.effective_scale();
  const host::ChunkTable table(call);
  const auto attend = [&](Worker& w, std::int64_t item) {
    const host::Chunk chunk = table[item / p.qk_heads];
    const std::int64_t qk_head = item % p.qk_heads;
    const auto rows = [&](const char* port, std::int64_t head) {
      return host::rows_of(call[port], head, chunk.first, chunk.tokens);
    };
    host::load(rows("q", qk_head), w.q);
    host::load(rows("k", qk_head), w.k);
    w.scores.noalias() = w.q * w.k.transpose();
    for (std::int32_t i = 0; i < host::heads_per_group(p); ++i) {
      const std::int32_t head = host::value_head_of(p, qk_head, i);
      host::load(host::column_of(call["g_cumsum"], head, chunk.first, chunk.tokens), w.gc);
      host::load(rows("v_new", head), w.new_values);
      host::load(host::state_of(call["chunk_states"], chunk.index, head, StateLayout::kv), w.state);
      w.p = w.scores;
      host::apply_decay(w.gc, w.p);
      host::output_rows(w.q, w.p, w.gc, w.state, w.new_values, scale, w.o);
      host::store(w.o, rows("o", head));
    }
  };
  host::parallel_for(
      table.chunks() * p.qk_heads, [] { return Worker{}; }, attend);
}

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"chunk_output", HostCall{run}});
}

}  // namespace

Variant host() { return host::host_variant("parallel over chunks and q/k heads", steps); }

}  // namespace gdnflow::stages::chunk_output
