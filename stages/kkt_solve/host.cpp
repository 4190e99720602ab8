#include "host/chunk_math.hpp"
#include "host/chunk_table.hpp"
#include "host/heads.hpp"
#include "host/parallel.hpp"
#include "host/variant.hpp"

// M = I + strict_lower(beta_i exp(gc_i - gc_j) k_i.k_j), A = M^-1. One Gram matrix K K^T serves all
// value heads that read the same keys.

namespace gdnflow::stages::kkt_solve {
namespace {

struct Worker {
  host::Matrix k, gram, m, inverse;
  host::Vector gc, beta;
};

void run(const StageCall& call) {
  const Problem& p = call.problem;
  const host::ChunkTable table(call);
  const auto solve = [&](Worker& w, std::int64_t item) {
    const host::Chunk chunk = table[item / p.qk_heads];
    const std::int64_t qk_head = item % p.qk_heads;
    host::load(host::rows_of(call["k"], qk_head, chunk.first, chunk.tokens), w.k);
    w.gram.noalias() = w.k * w.k.transpose();
    for (std::int32_t i = 0; i < host::heads_per_group(p); ++i) {
      const std::int32_t head = host::value_head_of(p, qk_head, i);
      host::load(host::column_of(call["g_cumsum"], head, chunk.first, chunk.tokens), w.gc);
      host::load(host::column_of(call["beta"], head, chunk.first, chunk.tokens), w.beta);
      w.m = w.gram;
      host::apply_decay(w.gc, w.m);
      w.m.array().colwise() *= w.beta.array();
      host::invert_unit_lower(w.m, w.inverse);
      // The columns past the chunk's length are part of the contract: zero.
      w.inverse.conservativeResizeLike(host::Matrix::Zero(chunk.tokens, chunk_tokens));
      host::store(w.inverse, host::rows_of(call["A"], head, chunk.first, chunk.tokens));
    }
  };
  host::parallel_for(
      table.chunks() * p.qk_heads, [] { return Worker{}; }, solve);
}

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"kkt_solve", HostCall{run}});
}

}  // namespace

Variant host() { return host::host_variant("forward substitution in fp32", steps); }

}  // namespace gdnflow::stages::kkt_solve
