#include "replay/engine.hpp"

#include <gdnflow/inputs.hpp>

#include <algorithm>
#include <array>
#include <numeric>

namespace gdnflow::apps::replay {
namespace {

/// What layers take turns with.
constexpr std::int64_t most_sets = 2;

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
               std::int64_t slots, std::uint64_t seed, Device device)
    : problem_(problem),
      device_(device),
      cu_seqlens_(make_vector(device, DType::i32, largest.max_sequences + 1)),
      prefix_lens_(make_vector(device, DType::i32, largest.max_sequences)),
      state_indices_(make_vector(device, DType::i32, largest.max_sequences)),
      has_initial_state_(make_vector(device, DType::u8, largest.max_sequences)) {
  Problem activations = problem;
  activations.initial_state = activations.final_state = false;
  activations.state_indices = activations.has_initial_state = activations.prefix_lens = false;
  const std::vector<std::int64_t> none(static_cast<std::size_t>(largest.max_sequences));
  for (std::int64_t i = 0; i < std::min(layers, most_sets); ++i) {
    activations_.push_back(make_workload(activations, largest, none, Distribution::random_decay,
                                         seed + static_cast<std::uint64_t>(i), device));
  }
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    pools_.push_back(make_tensor(device, problem.state, state_extents(problem, slots)));
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

void Engine::set_step(std::span<const Piece> pieces, std::span<const Request> requests) {
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> prefixes;
  std::vector<std::int32_t> slots;
  std::vector<std::uint8_t> started;
  for (const Piece& piece : pieces) {
    const Request& request = requests[piece.request];
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(piece.tokens));
    prefixes.push_back(static_cast<std::int32_t>(piece.before));
    slots.push_back(piece.slot);
    started.push_back(piece.first && request.cached == 0 ? 0 : 1);
    if (!piece.first || request.cached == 0) continue;
    for (std::int64_t layer = 0; layer < layers(); ++layer) {
      draw_prefix_state(request, layer, state(layer, piece.slot));
    }
  }
  write(cu_seqlens_, offsets);
  write(prefix_lens_, prefixes);
  write(state_indices_, slots);
  write(has_initial_state_, started);
}

void Engine::set_empty_step() {
  const auto sequences = static_cast<std::size_t>(state_indices_.view.extents[0]);
  std::vector<std::int32_t> slots(sequences);
  std::iota(slots.begin(), slots.end(), 0);
  write(cu_seqlens_, std::vector<std::int32_t>(sequences + 1));
  write(prefix_lens_, std::vector<std::int32_t>(sequences));
  write(state_indices_, slots);
  write(has_initial_state_, std::vector<std::uint8_t>(sequences));
}

void Engine::draw_prefix_state(const Request& request, std::int64_t layer,
                               const TensorView& state) const {
  if (request.cached == 0) {
    fill_bytes(state.data, device_, 0, state.bytes());
    return;
  }
  constexpr std::uint64_t apart = 1000003;
  fill_input(InputKind::initial_state, Distribution::random_decay,
             request.seed + apart * static_cast<std::uint64_t>(layer), state);
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
  return t;
}

const TensorView& Engine::activation(std::int64_t layer, std::string_view name) const {
  const auto set = static_cast<std::size_t>(layer) % activations_.size();
  return activations_[set].view(name);
}

TensorView Engine::state(std::int64_t layer, std::int32_t slot) const {
  return rows_of(pools_[static_cast<std::size_t>(layer)].view, slot, 1);
}

}  // namespace gdnflow::apps::replay
