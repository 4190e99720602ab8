#include "replay/engine.hpp"

#include <gdnflow/inputs.hpp>

#include <algorithm>
#include <array>
#include <numeric>

namespace gdnflow::apps::replay {
namespace {

/// What layers take turns with.
constexpr std::int64_t most_sets = 2;

/// The most that a step can pass, each sequence one that it needs less than an interval for; at
/// least 1.
std::int64_t most_checkpoints(const Problem& problem, const Capacity& largest) {
  if (problem.checkpoint_interval == 0) return 1;
  return largest.max_tokens / problem.checkpoint_interval + largest.max_sequences;
}

OwnedTensor make_vector(Device device, DType type, std::int64_t rows) {
  const std::array<std::int64_t, 1> extents{rows};
  return make_tensor(device, type, extents);
}

template <class T>
void write(const OwnedTensor& tensor, const std::vector<T>& values) {
  upload(tensor.view.data, tensor.view.device, values.data(),
         static_cast<std::int64_t>(values.size() * sizeof(T)));
}

}  // namespace

Engine::Engine(const Problem& problem, const Capacity& largest, std::int64_t layers,
               std::int64_t pool_rows, const Draw& draw, Device device)
    : problem_(problem),
      device_(device),
      cu_seqlens_(make_vector(device, DType::i32, largest.max_sequences + 1)),
      prefix_lens_(make_vector(device, DType::i32, largest.max_sequences)),
      state_indices_(make_vector(device, DType::i32, largest.max_sequences)),
      output_state_indices_(make_vector(device, DType::i32, largest.max_sequences)),
      has_initial_state_(make_vector(device, DType::u8, largest.max_sequences)),
      checkpoint_state_indices_(
          make_vector(device, DType::i32, most_checkpoints(problem, largest))) {
  for (std::int64_t i = 0; i < std::min(layers, most_sets); ++i) {
    activations_.push_back(make_activations(problem, largest, draw.next(i), device));
  }
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    pools_.push_back(make_tensor(device, problem.state, state_extents(problem, pool_rows)));
  }
}

void Engine::poison_pools() const {
  for (const OwnedTensor& pool : pools_) {
    fill_bytes(pool.view.data, device_, 0xff, pool.view.bytes());
  }
}

void Engine::draw_pools(std::uint64_t seed) const {
  for (const OwnedTensor& pool : pools_) {
    fill_input(InputKind::initial_state, Distribution::random_decay, seed++, pool.view);
  }
}

void Engine::set_step(std::span<const Piece> pieces) {
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> prefixes;
  std::vector<std::int32_t> read;
  std::vector<std::int32_t> written;
  std::vector<std::uint8_t> started;
  std::vector<std::int32_t> checkpoints;
  for (const Piece& piece : pieces) {
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(piece.tokens));
    prefixes.push_back(static_cast<std::int32_t>(piece.before));
    read.push_back(piece.source.value_or(piece.slot));
    written.push_back(piece.row_written());
    started.push_back(piece.first && !piece.source ? 0 : 1);
    checkpoints.insert(checkpoints.end(), piece.checkpoints.begin(), piece.checkpoints.end());
  }
  write(cu_seqlens_, offsets);
  write(prefix_lens_, prefixes);
  write(state_indices_, read);
  write(output_state_indices_, written);
  write(has_initial_state_, started);
  write(checkpoint_state_indices_, checkpoints);
}

void Engine::set_empty_step() {
  const auto sequences = static_cast<std::size_t>(state_indices_.view.extents[0]);
  std::vector<std::int32_t> slots(sequences);
  std::iota(slots.begin(), slots.end(), 0);
  write(cu_seqlens_, std::vector<std::int32_t>(sequences + 1));
  write(prefix_lens_, std::vector<std::int32_t>(sequences));
  write(state_indices_, slots);
  write(output_state_indices_, slots);
  write(has_initial_state_, std::vector<std::uint8_t>(sequences));
}

PrefillTensors Engine::tensors(std::int64_t layer) const {
  PrefillTensors t;
  t.q = activation(layer, "q");
  t.k = activation(layer, "k");
  t.v = activation(layer, "v");
  t.g = activation(layer, "g");
  t.beta = activation(layer, "beta");
  t.o = activation(layer, "o");
  t.cu_seqlens = cu_seqlens_.view;
  t.prefix_lens = prefix_lens_.view;
  t.state_indices = state_indices_.view;
  t.has_initial_state = has_initial_state_.view;
  t.initial_state = t.final_state = pools_[static_cast<std::size_t>(layer)].view;
  if (problem_.output_state_indices) t.output_state_indices = output_state_indices_.view;
  if (problem_.checkpoint_interval > 0) {
    t.checkpoints = t.final_state;
    t.checkpoint_state_indices = checkpoint_state_indices_.view;
  }
  return t;
}

const TensorView& Engine::activation(std::int64_t layer, std::string_view name) const {
  const auto set = static_cast<std::size_t>(layer) % activations_.size();
  return activations_[set].view(name);
}

TensorView Engine::state(std::int64_t layer, std::int32_t row) const {
  return rows_of(pools_[static_cast<std::size_t>(layer)].view, row, 1);
}

Workload make_activations(Problem problem, const Capacity& capacity, const Draw& draw,
                          Device device) {
  problem.initial_state = problem.final_state = problem.has_initial_state = false;
  problem.state_indices = problem.output_state_indices = problem.prefix_lens = false;
  problem.checkpoint_interval = 0;
  problem.checkpoint_state_indices = false;
  const std::vector<std::int64_t> none(static_cast<std::size_t>(capacity.max_sequences));
  return make_workload(problem, capacity, none, draw.distribution, draw.seed, device);
}

}  // namespace gdnflow::apps::replay
