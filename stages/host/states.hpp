#pragma once

#include <gdnflow/stage.hpp>

#include "host/chunk_table.hpp"
#include "host/matrix.hpp"

#include <cstdint>

namespace gdnflow::stages::host {

/// The state ports of a call: where a sequence's state comes from, where it goes, and which
/// checkpoints are kept. Rows that are negative or past the pool's end read as zero and are not
/// written. Initial and final states may be the same memory, since every (sequence, head) reads its
/// own slot before it writes it.
class States {
 public:
  explicit States(const StageCall& call);

  /// The state that a sequence starts from, as [Dk, Dv].
  void load_initial(std::int64_t sequence, std::int64_t head, Matrix& state) const;
  void store_final(std::int64_t sequence, std::int64_t head, const Matrix& state) const;
  bool keeps_checkpoints() const noexcept { return checkpoints_.data != nullptr; }
  /// `row` is the compact row, which checkpoint_state_indices may send elsewhere.
  void store_checkpoint(std::int64_t row, std::int64_t head, const Matrix& state) const;

 private:
  std::int64_t slot(const TensorView& indices, std::int64_t i) const noexcept;
  void store(const TensorView& pool, std::int64_t row, std::int64_t head,
             const Matrix& state) const;

  const Problem& problem_;
  TensorView initial_, read_slots_, has_initial_;
  TensorView final_, write_slots_;
  TensorView checkpoints_, checkpoint_slots_;
};

/// The compact checkpoint row of a chunk's end, or -1. `first` is the sequence's first chunk.
std::int64_t checkpoint_row(const StageCall& call, const Chunk& first, const Chunk& chunk);

}  // namespace gdnflow::stages::host
