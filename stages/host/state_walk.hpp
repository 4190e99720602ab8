#pragma once

#include <gdnflow/stage.hpp>

#include "host/chunk_math.hpp"
#include "host/chunk_table.hpp"
#include "host/matrix.hpp"
#include "host/parallel.hpp"
#include "host/states.hpp"

#include <cstdint>

namespace gdnflow::stages::host {

/// A chunk of one value head while a walk stands on it.
struct WalkPosition {
  const Chunk& chunk;
  std::int64_t head;
  const Matrix& k;      ///< [l, Dk]
  const Vector& gc;     ///< [l]
  const Matrix& state;  ///< [Dk, Dv] at the chunk's start
};

/// The walk that every state stage takes: for each (sequence, value head) load the initial state,
/// go through the chunks in order, keep checkpoints, store the final state. `Form` is what differs;
/// it is made from the call once a thread and holds that thread's scratch:
///   void operator()(const WalkPosition& at, Matrix& new_values)
/// computes V' [l, Dv] from the state at the chunk's start and writes the stage's own outputs.
template <class Form>
void walk_states(const StageCall& call) {
  const Problem& p = call.problem;
  const ChunkTable table(call);
  const States states(call);
  const TensorView& k_view = call["k"];
  const TensorView& gc_view = call["g_cumsum"];

  struct Worker {
    Form form;
    Matrix k, state, new_values, decayed;
    Vector gc;
  };
  const auto make_worker = [&] { return Worker{Form(call), {}, {}, {}, {}, {}}; };
  const auto walk = [&](Worker& w, std::int64_t item) {
    const std::int64_t sequence = item / p.v_heads;
    const auto head = static_cast<std::int32_t>(item % p.v_heads);
    states.load_initial(sequence, head, w.state);
    const std::int64_t begin = table.first_of(sequence);
    const std::int64_t end = table.first_of(sequence + 1);
    for (std::int64_t c = begin; c < end; ++c) {
      const Chunk chunk = table[c];
      load(rows_of(k_view, p.qk_head_of(head), chunk.first, chunk.tokens), w.k);
      load(column_of(gc_view, head, chunk.first, chunk.tokens), w.gc);
      w.form(WalkPosition{chunk, head, w.k, w.gc, w.state}, w.new_values);
      advance_state(w.k, w.gc, w.new_values, w.decayed, w.state);
      if (states.keeps_checkpoints()) {
        states.store_checkpoint(checkpoint_row(call, table[begin], chunk), head, w.state);
      }
    }
    states.store_final(sequence, head, w.state);
  };
  parallel_for(call.capacity.max_sequences * p.v_heads, make_worker, walk);
}

/// The outputs of the stages that leave the new values and each chunk's state to chunk_output.
class ChunkStateOutputs {
 public:
  explicit ChunkStateOutputs(const StageCall& call)
      : new_values_(call["v_new"]), states_(call["chunk_states"]) {}

  void store(const WalkPosition& at, const Matrix& new_values) const {
    host::store(new_values, rows_of(new_values_, at.head, at.chunk.first, at.chunk.tokens));
    host::store(at.state, state_of(states_, at.chunk.index, at.head, StateLayout::kv));
  }

 private:
  TensorView new_values_;
  TensorView states_;
};

/// V' in the residual form, for the stages that take v, beta and A.
class ResidualForm {
 public:
  explicit ResidualForm(const StageCall& call)
      : v_view_(call["v"]), beta_view_(call["beta"]), a_view_(call["A"]) {}

  void operator()(const WalkPosition& at, Matrix& new_values) {
    const Chunk& chunk = at.chunk;
    load(rows_of(v_view_, at.head, chunk.first, chunk.tokens), v_);
    load(column_of(beta_view_, at.head, chunk.first, chunk.tokens), beta_);
    load(inverse_of(a_view_, at.head, chunk), a_);
    residual_new_values(at.k, v_, beta_, at.gc, a_, at.state, residual_, new_values);
  }

 private:
  TensorView v_view_, beta_view_, a_view_;
  Matrix v_, a_, residual_;
  Vector beta_;
};

}  // namespace gdnflow::stages::host
