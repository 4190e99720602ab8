#include "host/chunk_math.hpp"
#include "host/chunk_table.hpp"
#include "host/parallel.hpp"
#include "host/variant.hpp"

// U = A (beta .* V), W = A (beta .* gamma .* K).

namespace gdnflow::stages::wu {
namespace {

struct Worker {
  host::Matrix a, k, v, w, u;
  host::Vector beta, gc;
};

void run(const StageCall& call) {
  const Problem& p = call.problem;
  const host::ChunkTable table(call);
  const auto multiply = [&](Worker& w, std::int64_t item) {
    const host::Chunk chunk = table[item / p.v_heads];
    const auto head = static_cast<std::int32_t>(item % p.v_heads);
    const auto rows = [&](const char* port, std::int64_t of_head) {
      return host::rows_of(call[port], of_head, chunk.first, chunk.tokens);
    };
    host::load(host::inverse_of(call["A"], head, chunk), w.a);
    host::load(rows("k", p.qk_head_of(head)), w.k);
    host::load(rows("v", head), w.v);
    host::load(host::column_of(call["beta"], head, chunk.first, chunk.tokens), w.beta);
    host::load(host::column_of(call["g_cumsum"], head, chunk.first, chunk.tokens), w.gc);
    w.v.array().colwise() *= w.beta.array();
    w.u.noalias() = w.a * w.v;
    w.k.array().colwise() *= w.beta.array() * host::gamma_of(w.gc).array();
    w.w.noalias() = w.a * w.k;
    host::store(w.u, rows("u", head));
    host::store(w.w, rows("w", head));
  };
  host::parallel_for(
      table.chunks() * p.v_heads, [] { return Worker{}; }, multiply);
}

void steps(const StageCall& /*call*/, StepList& out) { out.push_back({"wu", HostCall{run}}); }

}  // namespace

Variant host() { return host::host_variant("two matrix products a chunk and head", steps); }

}  // namespace gdnflow::stages::wu
