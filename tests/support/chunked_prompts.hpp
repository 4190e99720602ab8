#pragma once

#include <gdnflow/compare.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/prefill.hpp>

#include "support/engine_batch.hpp"
#include "support/tensor.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace gdnflow::test {

/// Prompts that are served in pieces: each step takes the next one of every prompt that has one
/// left, from the state that the piece before has left in the prompt's slot. One set of buffers
/// serves every step, in place: rows and metadata behind a step's are what the last one left.
/// States are a pool whose slots stand apart; checkpoints are compact, at absolute positions.
class ChunkedPrompts {
 public:
  static constexpr std::int64_t interval = 64;
  static constexpr std::int64_t checkpoint_rows = 8;

  /// `pieces[i]` are the lengths of prompt i's pieces, all of a step's within `rows`; `slot_gap`
  /// are elements between slots.
  ChunkedPrompts(Problem problem, std::int64_t rows, std::vector<std::vector<std::int64_t>> pieces,
                 std::int64_t slot_gap = 64)
      : problem_(with_options(problem)),
        pieces_(std::move(pieces)),
        slot_gap_(slot_gap),
        whole_(Inputs::draw(plain(problem), lengths_of(pieces_), Distribution::random_decay, 1)) {
    const Problem& p = problem_;
    const auto poisoned = [&](const char* name, DType type, std::vector<std::int64_t> extents) {
      HostTensor tensor(type, std::move(extents));
      std::memset(tensor.view().data, 0xff, static_cast<std::size_t>(tensor.view().bytes()));
      tensors_[name] = std::move(tensor);
    };
    for (const char* name : {"q", "k"}) {
      poisoned(name, p.activation, {rows, p.qk_heads, p.qk_dim});
    }
    for (const char* name : {"v", "o"}) poisoned(name, p.activation, {rows, p.v_heads, p.v_dim});
    for (const char* name : {"g", "beta"}) poisoned(name, DType::f32, {rows, p.v_heads});
    poisoned("cu_seqlens", p.index, {prompts() + 1});
    poisoned("prefix_lens", p.index, {prompts()});
    poisoned("state_indices", DType::i32, {prompts()});
    poisoned("has_initial_state", DType::u8, {prompts()});
    poisoned("pool", p.state, {slots() * slot_stride()});
    poisoned("checkpoints", p.state,
             {checkpoint_rows, p.v_heads, row_extents()[0], row_extents()[1]});
  }

  const Problem& problem() const noexcept { return problem_; }
  std::int64_t prompts() const noexcept { return std::ssize(pieces_); }
  std::int64_t rows() const noexcept { return tensors_.at("q").view().extents[0]; }
  Capacity capacity() const noexcept { return {rows(), prompts()}; }
  /// Memory by name; "pool" is that of both states.
  std::map<std::string, HostTensor>& tensors() noexcept { return tensors_; }

  /// The tensors of a call, given the memory of each as a view on any device.
  template <class Find>
  PrefillTensors call(Find&& find) const {
    return prefill_tensors([&](const std::string& name, TensorView& view) {
      const bool is_state = name == "initial_state" || name == "final_state";
      if (!is_state && !tensors_.contains(name)) return;
      view = find(is_state ? "pool" : name);
      if (!is_state) return;
      const TensorView memory = view;
      view = TensorView::dense(memory.data, memory.dtype,
                               {slots(), problem_.v_heads, row_extents()[0], row_extents()[1]},
                               memory.device);
      view.strides[0] = slot_stride();
    });
  }

  std::int64_t steps() const {
    std::int64_t most = 0;
    for (const auto& of_prompt : pieces_) most = std::max(most, std::ssize(of_prompt));
    return most;
  }
  /// Tokens and sequences of the step in hand.
  std::int64_t tokens() const noexcept { return step_tokens_; }
  std::int64_t count() const noexcept { return std::ssize(in_step_); }

  /// Puts a step's tensors into the buffers. `padded`: metadata behind the step's sequences say
  /// that there are none, as an engine's do whose graph has a fixed number of them.
  void begin(std::int64_t step, bool padded) {
    in_step_.clear();
    step_tokens_ = 0;
    for (const char* name : {"o", "checkpoints"}) poison(tensors_.at(name));
    set_index("cu_seqlens", 0, 0);
    for (std::int64_t i = 0; i < prompts(); ++i) {
      const auto& of_prompt = pieces_[static_cast<std::size_t>(i)];
      if (step >= std::ssize(of_prompt)) continue;
      std::int64_t prefix = 0;
      for (std::int64_t j = 0; j < step; ++j) prefix += of_prompt[static_cast<std::size_t>(j)];
      const Piece piece{i, prefix, of_prompt[static_cast<std::size_t>(step)], step_tokens_};
      copy_rows(piece);
      const std::int64_t at = count();
      step_tokens_ += piece.tokens;
      set_index("cu_seqlens", at + 1, step_tokens_);
      set_index("prefix_lens", at, prefix);
      tensors_["state_indices"].as<std::int32_t>()[at] = slot_of(i);
      tensors_["has_initial_state"].as<std::uint8_t>()[at] = step > 0 ? 1 : 0;
      in_step_.push_back(piece);
    }
    if (!padded) return;
    for (std::int64_t at = count(); at < prompts(); ++at) {
      set_index("cu_seqlens", at + 1, step_tokens_);
      tensors_["state_indices"].as<std::int32_t>()[at] = -1;
    }
  }

  /// Compares what the step has left in the buffers with the oracle on the whole prompts.
  void check(double bound) {
    const Problem& p = problem_;
    std::int64_t checkpoint = 0;
    for (const Piece& piece : in_step_) {
      CAPTURE(piece.prompt);
      CAPTURE(piece.prefix);
      const std::int64_t end = piece.prefix + piece.tokens;
      const std::int64_t row = std::int64_t{p.v_heads} * p.v_dim;
      TensorView o = tensors_.at("o").view();
      o.extents[0] = piece.tokens;
      o.data = static_cast<char*>(o.data) +
               piece.first_row * row * static_cast<std::int64_t>(size_of(o.dtype));
      const std::vector<double>& expected = outputs();
      const auto first = static_cast<std::size_t>(
          (whole_.cu_seqlens[static_cast<std::size_t>(piece.prompt)] + piece.prefix) * row);
      const Comparison output = compare(
          o, std::span(expected).subspan(first, static_cast<std::size_t>(piece.tokens * row)));
      CHECK_MESSAGE(output.within(bound), "o: ", to_string(output));
      const Comparison state = compare(state_in("pool", slot_of(piece.prompt) * slot_stride()),
                                       state_at(piece.prompt, end));
      CHECK_MESSAGE(state.within(bound), "final state: ", to_string(state));
      for (std::int64_t at = piece.prefix / interval * interval + interval; at <= end;
           at += interval) {
        CAPTURE(at);
        const Comparison kept = compare(state_in("checkpoints", checkpoint++ * state_elements()),
                                        state_at(piece.prompt, at));
        CHECK_MESSAGE(kept.within(bound), "checkpoint: ", to_string(kept));
      }
    }
    const auto element = static_cast<std::int64_t>(size_of(p.state));
    CHECK_MESSAGE(is_poison("checkpoints", checkpoint * state_elements() * element,
                            checkpoint_rows * state_elements() * element),
                  "a checkpoint behind the step's last was written");
    for (std::int64_t slot = 0; slot < slots(); ++slot) {
      const bool owned = slot % 2 == 1;
      CHECK_MESSAGE(
          is_poison("pool", (slot * slot_stride() + (owned ? state_elements() : 0)) * element,
                    (slot + 1) * slot_stride() * element),
          "slot ", slot, ", or the gap behind it, was written");
    }
  }

 private:
  struct Piece {
    std::int64_t prompt, prefix, tokens, first_row;
  };
  /// What the oracle has said so far; copies share it.
  struct Expected {
    std::vector<double> o;
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<double>> states;
  };

  /// As whole prompts are, for the oracle.
  static Problem plain(Problem problem) {
    problem.initial_state = problem.state_indices = problem.has_initial_state = false;
    problem.prefix_lens = false;
    problem.checkpoint_interval = 0;
    return problem;
  }
  static Problem with_options(Problem problem) {
    problem = EngineBatch::pooled(problem);
    problem.prefix_lens = true;
    problem.checkpoint_interval = interval;
    return problem;
  }
  static std::vector<std::int64_t> lengths_of(
      const std::vector<std::vector<std::int64_t>>& pieces) {
    std::vector<std::int64_t> lengths;
    for (const auto& of_prompt : pieces) {
      lengths.push_back(std::accumulate(of_prompt.begin(), of_prompt.end(), std::int64_t{0}));
    }
    return lengths;
  }

  /// Odd slots are the prompts', from the last one down.
  std::int64_t slots() const noexcept { return 2 * prompts() + 1; }
  std::int32_t slot_of(std::int64_t prompt) const noexcept {
    return static_cast<std::int32_t>(2 * (prompts() - prompt) - 1);
  }
  std::int64_t state_elements() const noexcept {
    return std::int64_t{problem_.v_heads} * problem_.qk_dim * problem_.v_dim;
  }
  std::int64_t slot_stride() const noexcept { return state_elements() + slot_gap_; }
  std::array<std::int64_t, 2> row_extents() const noexcept {
    const bool kv = problem_.state_layout == StateLayout::kv;
    return {kv ? problem_.qk_dim : problem_.v_dim, kv ? problem_.v_dim : problem_.qk_dim};
  }

  static void poison(HostTensor& tensor) {
    std::memset(tensor.view().data, 0xff, static_cast<std::size_t>(tensor.view().bytes()));
  }
  bool is_poison(const char* name, std::int64_t begin, std::int64_t end) const {
    const auto* bytes = tensors_.at(name).as<unsigned char>();
    return std::all_of(bytes + begin, bytes + end, [](unsigned char b) { return b == 0xff; });
  }
  void set_index(const char* name, std::int64_t at, std::int64_t value) {
    if (problem_.index == DType::i64) {
      tensors_[name].as<std::int64_t>()[at] = value;
    } else {
      tensors_[name].as<std::int32_t>()[at] = static_cast<std::int32_t>(value);
    }
  }
  void copy_rows(const Piece& piece) {
    const std::int64_t from =
        whole_.cu_seqlens[static_cast<std::size_t>(piece.prompt)] + piece.prefix;
    const std::pair<const char*, const HostTensor*> sources[] = {{"q", &whole_.q},
                                                                 {"k", &whole_.k},
                                                                 {"v", &whole_.v},
                                                                 {"g", &whole_.g},
                                                                 {"beta", &whole_.beta}};
    for (const auto& [name, source] : sources) {
      const TensorView& view = source->view();
      const std::int64_t row = view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
      std::memcpy(tensors_[name].as<char>() + piece.first_row * row,
                  source->as<char>() + from * row, static_cast<std::size_t>(piece.tokens * row));
    }
  }
  TensorView state_in(const char* name, std::int64_t element) const {
    const HostTensor& memory = tensors_.at(name);
    return TensorView::dense(
        memory.as<char>() + element * static_cast<std::int64_t>(size_of(problem_.state)),
        problem_.state, {1, problem_.v_heads, row_extents()[0], row_extents()[1]});
  }

  const std::vector<double>& outputs() {
    std::vector<double>& o = expected_->o;
    if (o.empty()) o = oracle_recurrent(plain(problem_), whole_.views()).o;
    return o;
  }
  /// A prompt's state behind its first `tokens`.
  const std::vector<double>& state_at(std::int64_t prompt, std::int64_t tokens) {
    std::vector<double>& state = expected_->states[{prompt, tokens}];
    if (state.empty()) {
      OracleInputs inputs = whole_.views();
      const std::int64_t first = whole_.cu_seqlens[static_cast<std::size_t>(prompt)];
      inputs.cu_seqlens = {first, first + tokens};
      state = oracle_recurrent(plain(problem_), inputs).final_state;
    }
    return state;
  }

  Problem problem_;
  std::vector<std::vector<std::int64_t>> pieces_;
  std::int64_t slot_gap_;
  Inputs whole_;
  std::map<std::string, HostTensor> tensors_;
  std::vector<Piece> in_step_;
  std::int64_t step_tokens_ = 0;
  std::shared_ptr<Expected> expected_ = std::make_shared<Expected>();
};

/// Prompts whose first piece is one token, which end within a chunk, at its border and a token
/// behind it, are empty for a step, and are done one after the other.
inline std::vector<std::vector<std::int64_t>> awkward_pieces() {
  return {{1, 70, 59, 64, 136}, {64, 1, 0, 63}, {130, 61}};
}

}  // namespace gdnflow::test
