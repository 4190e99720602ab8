#include "host/states.hpp"

namespace gdnflow::stages::host {

States::States(const StageCall& call)
    : problem_(call.problem),
      initial_(call["initial_state"]),
      read_slots_(call["state_indices"]),
      has_initial_(call["has_initial_state"]),
      final_(call["final_state"]),
      write_slots_(call.has("output_state_indices") ? call["output_state_indices"] : read_slots_),
      checkpoints_(call["checkpoints"]),
      checkpoint_slots_(call["checkpoint_state_indices"]) {}

std::int64_t States::slot(const TensorView& indices, std::int64_t i) const noexcept {
  if (indices.rank == 0) return i;
  if (i < 0 || i >= indices.extents[0]) return -1;
  return indices.as<const std::int32_t>()[i * indices.strides[0]];
}

void States::load_initial(std::int64_t sequence, std::int64_t head, Matrix& state) const {
  const std::int64_t row = slot(read_slots_, sequence);
  const bool flagged =
      has_initial_.data == nullptr ||
      (sequence < has_initial_.extents[0] &&
       has_initial_.as<const std::uint8_t>()[sequence * has_initial_.strides[0]] != 0);
  if (initial_.data == nullptr || !flagged || row < 0 || row >= initial_.extents[0]) {
    state.setZero(problem_.qk_dim, problem_.v_dim);
  } else {
    load(state_of(initial_, row, head, problem_.state_layout), state);
  }
}

void States::store(const TensorView& pool, std::int64_t row, std::int64_t head,
                   const Matrix& state) const {
  if (pool.data == nullptr || row < 0 || row >= pool.extents[0]) return;
  host::store(state, state_of(pool, row, head, problem_.state_layout));
}

void States::store_final(std::int64_t sequence, std::int64_t head, const Matrix& state) const {
  store(final_, slot(write_slots_, sequence), head, state);
}

void States::store_checkpoint(std::int64_t row, std::int64_t head, const Matrix& state) const {
  store(checkpoints_, slot(checkpoint_slots_, row), head, state);
}

std::int64_t checkpoint_row(const StageCall& call, const Chunk& first, const Chunk& chunk) {
  const std::int64_t chunks_apart = call.problem.checkpoint_interval / chunk_tokens;
  if (chunks_apart == 0 || !call.has("checkpoint_offsets")) return -1;
  const std::int64_t borders = chunk.number + 1;
  if (borders % chunks_apart != 0) return -1;
  const TensorView& offsets = call["checkpoint_offsets"];
  const auto offset = [&](std::int64_t n) -> std::int64_t {
    return offsets.as<const std::int32_t>()[n * offsets.strides[0]];
  };
  const std::int64_t row =
      offset(chunk.sequence) + borders / chunks_apart - first.number / chunks_apart - 1;
  return row < offset(chunk.sequence + 1) ? row : -1;
}

}  // namespace gdnflow::stages::host
