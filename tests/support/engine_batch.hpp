#pragma once

#include <gdnflow/compare.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/prefill.hpp>

#include "src/prefill_tensors.hpp"
#include "support/externals.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace gdnflow::test {

/// PrefillTensors of tensors that are known by name.
template <class Find>
PrefillTensors prefill_tensors(Find&& find) {
  PrefillTensors t;
  for (const TensorName& name : tensor_names) find(std::string(name.edge), t.*name.member);
  return t;
}

/// A sequence of a batch as an engine has it.
struct EngineSequence {
  std::int64_t tokens = 0;
  std::int32_t slot = -1;  ///< of the pool; one that it has not: starts from zero, and its state
                           ///< goes nowhere
  bool started = true;     ///< has an initial state
};

/// What an engine holds for one step: buffers for `rows` tokens and `sequences` sequences, and
/// pools of as many slots. Metadata behind the batch is what an earlier, larger one left: sequences
/// that own the rest of the tokens, with slots that exist.
class EngineBatch {
 public:
  EngineBatch(Problem problem, std::int64_t rows, std::int64_t sequences,
              std::vector<EngineSequence> batch, std::uint64_t seed = 1)
      : batch_(std::move(batch)),
        externals_(pooled(problem), {rows, sequences}, lengths(batch_), Distribution::random_decay,
                   seed) {
    HostTensor slots(DType::i32, {sequences});
    HostTensor flags(DType::u8, {sequences});
    for (std::int64_t n = 0; n < sequences; ++n) {
      const bool there = n < count();
      const auto i = static_cast<std::size_t>(n);
      slots.as<std::int32_t>()[n] = there ? batch_[i].slot : 0;
      flags.as<std::uint8_t>()[n] = there && !batch_[i].started ? 0 : 1;
    }
    externals_.tensors()["state_indices"] = std::move(slots);
    externals_.tensors()["has_initial_state"] = std::move(flags);
    std::vector<std::int64_t> offsets = externals_.offsets();
    std::fill(offsets.begin() + count() + 1, offsets.end(), rows);
    set_offsets(offsets);
  }

  static Problem pooled(Problem problem) {
    problem.initial_state = problem.state_indices = problem.has_initial_state = true;
    return problem;
  }

  const Problem& problem() const noexcept { return externals_.problem(); }
  Externals& externals() noexcept { return externals_; }
  const Externals& externals() const noexcept { return externals_; }
  std::int64_t tokens() const noexcept { return externals_.tokens(); }
  std::int64_t count() const noexcept { return std::ssize(batch_); }

  PrefillTensors tensors() const {
    return prefill_tensors([&](const std::string& name, TensorView& view) {
      const auto found = externals_.tensors().find(name);
      if (found != externals_.tensors().end()) view = found->second.view();
    });
  }

  /// Compares `x`, this batch's tensors after a run, with the oracle; nothing else may be written.
  void check(const Externals& x, double bound) const {
    OracleInputs inputs = x.oracle_inputs();
    inputs.cu_seqlens = externals_.offsets();
    inputs.cu_seqlens.resize(static_cast<std::size_t>(count()) + 1);
    HostTensor initial(problem().state, {std::max<std::int64_t>(count(), 1), problem().v_heads,
                                         row_extents()[0], row_extents()[1]});
    const std::size_t row = row_bytes();
    for (std::int64_t n = 0; n < count(); ++n) {
      const EngineSequence& sequence = batch_[static_cast<std::size_t>(n)];
      if (!has_slot(sequence) || !sequence.started) continue;
      std::memcpy(initial.as<char>() + static_cast<std::size_t>(n) * row,
                  x.tensors().at("initial_state").as<char>() + sequence.slot * row, row);
    }
    TensorView starts = initial.view();
    starts.extents[0] = count();
    inputs.initial_state = starts;
    const OracleResult expected = oracle_recurrent(problem(), inputs);
    const Comparison o = compare(x.owned_o(), std::span(expected.o).first(x.owned_elements()));
    CHECK_MESSAGE(o.within(bound), "o: ", to_string(o));
    CHECK(x.padding_of_o_is(0xff));

    std::set<std::int64_t> written;
    const TensorView& final = x.tensors().at("final_state").view();
    const std::size_t elements =
        expected.final_state.size() / std::max<std::size_t>(static_cast<std::size_t>(count()), 1);
    for (std::int64_t n = 0; n < count(); ++n) {
      if (!has_slot(batch_[static_cast<std::size_t>(n)])) continue;
      const std::int32_t slot = batch_[static_cast<std::size_t>(n)].slot;
      written.insert(slot);
      TensorView one = final;
      one.extents[0] = 1;
      one.data = static_cast<char*>(final.data) + slot * row;
      const Comparison state =
          compare(one, std::span(expected.final_state)
                           .subspan(static_cast<std::size_t>(n) * elements, elements));
      CHECK_MESSAGE(state.within(bound), "sequence ", n, ": ", to_string(state));
    }
    for (std::int64_t slot = 0; slot < final.extents[0]; ++slot) {
      if (written.contains(slot)) continue;
      const auto* bytes = static_cast<const unsigned char*>(final.data) + slot * row;
      CHECK_MESSAGE(std::all_of(bytes, bytes + row, [](unsigned char b) { return b == 0xff; }),
                    "slot ", slot, " was written");
    }
  }
  void check(double bound) const { check(externals_, bound); }

  /// Writes `value` over the rows of sequence `n` in an input of f32 or of 16 bits, over its slot
  /// in `initial_state`.
  void poison_sequence(std::int64_t n, const std::string& name, float value) {
    const TensorView& view = externals_[name].view();
    const auto i = static_cast<std::size_t>(n);
    const bool state = name == "initial_state";
    const std::int64_t first = state ? batch_[i].slot : externals_.offsets()[i];
    const std::int64_t rows = state ? 1 : batch_[i].tokens;
    const std::vector<float> row(static_cast<std::size_t>(view.strides[0]), value);
    for (std::int64_t at = first; at < first + rows; ++at) {
      host::store(view, at * view.strides[0], view.strides[0], row.data());
    }
  }
  /// Bits of sequence `n`'s rows and slot in `a` and `b`, tensors of this batch.
  void check_same(std::int64_t n, const Externals& a, const Externals& b) const {
    const auto same = [&](const char* name, std::int64_t first, std::int64_t rows) {
      const TensorView& x = a.tensors().at(name).view();
      const auto row = static_cast<std::int64_t>(size_of(x.dtype)) * x.strides[0];
      return std::memcmp(x.as<char>() + first * row, b.tensors().at(name).as<char>() + first * row,
                         static_cast<std::size_t>(rows * row)) == 0;
    };
    const auto i = static_cast<std::size_t>(n);
    CHECK_MESSAGE(same("o", externals_.offsets()[i], batch_[i].tokens), "o of sequence ", n,
                  " differs");
    if (has_slot(batch_[i])) {
      CHECK_MESSAGE(same("final_state", batch_[i].slot, 1), "state of sequence ", n, " differs");
    }
  }
  /// The same for every sequence but `n`.
  void check_same_but(std::int64_t n, const Externals& a, const Externals& b) const {
    for (std::int64_t m = 0; m < count(); ++m) {
      if (m != n) check_same(m, a, b);
    }
  }

  /// Other entries of cu_seqlens; the batch stays what it is compared with.
  void set_offsets(const std::vector<std::int64_t>& offsets) {
    HostTensor& tensor = externals_["cu_seqlens"];
    for (std::size_t n = 0; n < offsets.size(); ++n) {
      if (problem().index == DType::i64) {
        tensor.as<std::int64_t>()[n] = offsets[n];
      } else {
        tensor.as<std::int32_t>()[n] = static_cast<std::int32_t>(offsets[n]);
      }
    }
  }

 private:
  bool has_slot(const EngineSequence& sequence) const {
    return sequence.slot >= 0 && sequence.slot < externals_.capacity().max_sequences;
  }
  static std::vector<std::int64_t> lengths(const std::vector<EngineSequence>& batch) {
    std::vector<std::int64_t> result;
    for (const EngineSequence& sequence : batch) result.push_back(sequence.tokens);
    return result;
  }
  std::array<std::int64_t, 2> row_extents() const {
    const bool kv = problem().state_layout == StateLayout::kv;
    return {kv ? problem().qk_dim : problem().v_dim, kv ? problem().v_dim : problem().qk_dim};
  }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(problem().v_heads * problem().qk_dim * problem().v_dim) *
           size_of(problem().state);
  }

  std::vector<EngineSequence> batch_;
  Externals externals_;
};

/// Entries of cu_seqlens for three sequences that fall, are negative or run over.
inline std::vector<std::vector<std::int64_t>> bad_offsets(std::int64_t rows, DType index) {
  const bool wide = index == DType::i64;
  const std::int64_t least =
      wide ? std::numeric_limits<std::int64_t>::min() : std::numeric_limits<std::int32_t>::min();
  const std::int64_t most =
      wide ? std::numeric_limits<std::int64_t>::max() : std::numeric_limits<std::int32_t>::max();
  // More by as much as 32 bits hold is a small number to who looks at those alone.
  const std::int64_t turn = wide ? std::int64_t{1} << 32 : 0;
  return {{0, rows / 2, rows / 4, rows}, {-7, 64, 64, rows + 1000}, {0, most, least, most},
          {0, -1, rows - 7, rows - 8},   {0, 0, 0, most},           {least, least, 1, rows + 1},
          {0, 20, 40 + turn, 60 - turn}};
}

/// The sequences that these are, in slots 0, 1, 2: an entry counts as the largest so far, within
/// the rows that there are.
inline std::vector<EngineSequence> safe_sequences(const std::vector<std::int64_t>& offsets,
                                                  std::int64_t rows) {
  std::vector<EngineSequence> sequences;
  std::int64_t from = std::clamp<std::int64_t>(offsets.front(), 0, rows);
  for (std::size_t n = 1; n < offsets.size(); ++n) {
    const std::int64_t to = std::max(from, std::clamp<std::int64_t>(offsets[n], 0, rows));
    sequences.push_back({to - from, static_cast<std::int32_t>(n - 1)});
    from = to;
  }
  return sequences;
}

/// The first rows of every tensor, as an engine has them whose tensors are made for the step.
inline PrefillTensors exact_rows(PrefillTensors t, std::int64_t tokens, std::int64_t sequences) {
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.g, &t.beta, &t.a, &t.b, &t.o}) {
    if (view->rank > 0) view->extents[0] = tokens;
  }
  for (TensorView* view :
       {&t.prefix_lens, &t.state_indices, &t.output_state_indices, &t.has_initial_state}) {
    if (view->rank > 0) view->extents[0] = sequences;
  }
  if (t.cu_seqlens.rank > 0) t.cu_seqlens.extents[0] = sequences + 1;
  return t;
}

}  // namespace gdnflow::test
