#include <gdnflow/compare.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "gpu/device_batch.hpp"
#include "support/gpu.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

// Sizes at which 32 bits, or a grid's 65535, do not suffice. Everything is drawn on the device; of
// each batch chosen sequences are compared with the fp64 oracle, which gets them alone.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr std::int64_t gib = std::int64_t{1} << 30;

/// Whether the device has this much free memory; says in a line where it has not.
bool device_has(std::int64_t bytes) {
  const std::int64_t free = free_memory();
  if (free >= bytes) return true;
  fmt::print("skipped: expected {:.1f} GiB of free device memory, got {:.1f}\n",
             static_cast<double>(bytes) / gib, static_cast<double>(free) / gib);
  return false;
}

TensorView rows_of(TensorView view, std::int64_t first, std::int64_t rows) {
  view.data = static_cast<char*>(view.data) +
              first * view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
  view.extents[0] = rows;
  return view;
}

/// A batch whose states are a pool, in place, on the device alone.
class LargeBatch {
 public:
  /// `slot_of[n]` is sequence n's slot, -1 for none; `chosen` are the sequences that are checked.
  LargeBatch(Problem problem, const std::vector<std::int64_t>& lengths, std::int64_t slots,
             std::vector<std::int32_t> slot_of, std::vector<std::int64_t> chosen)
      : problem_(std::move(problem)),
        offsets_(offsets_of(lengths)),
        slot_of_(std::move(slot_of)),
        chosen_(std::move(chosen)) {
    problem_.initial_state = problem_.state_indices = true;
    const Problem& p = problem_;
    const std::int64_t tokens = offsets_.back();
    draw("q", query_input(p), p.activation, {tokens, p.qk_heads, p.qk_dim});
    draw("k", key_input(p), p.activation, {tokens, p.qk_heads, p.qk_dim});
    draw("v", InputKind::v, p.activation, {tokens, p.v_heads, p.v_dim});
    draw("g", InputKind::g, DType::f32, {tokens, p.v_heads});
    draw("beta", InputKind::beta, DType::f32, {tokens, p.v_heads});
    make("o", p.activation, {tokens, p.v_heads, p.v_dim});
    draw("pool", InputKind::initial_state, p.state, {slots, p.v_heads, p.qk_dim, p.v_dim});
    const HostTensor starts(DType::i32, {std::ssize(offsets_)});
    std::transform(offsets_.begin(), offsets_.end(), starts.as<std::int32_t>(),
                   [](std::int64_t at) { return static_cast<std::int32_t>(at); });
    tensors_["cu_seqlens"] = std::make_unique<DeviceTensor>(starts.view());
    const HostTensor indices(DType::i32, {std::ssize(slot_of_)});
    std::copy(slot_of_.begin(), slot_of_.end(), indices.as<std::int32_t>());
    tensors_["state_indices"] = std::make_unique<DeviceTensor>(indices.view());
    for (const std::int64_t n : chosen_) expect(n);
  }

  const Problem& problem() const noexcept { return problem_; }
  Capacity capacity() const noexcept { return {offsets_.back(), std::ssize(slot_of_)}; }
  PrefillTensors tensors() const {
    return prefill_tensors([&](const std::string& name, TensorView& view) {
      const bool is_state = name == "initial_state" || name == "final_state";
      const auto found = tensors_.find(is_state ? "pool" : name);
      if (found != tensors_.end()) view = found->second->view();
    });
  }

  /// Runs and checks every recipe that takes the capacity, with a workspace within
  /// `most_workspace` bytes; says in a line which do not.
  void check_recipes(std::int64_t most_workspace) const {
    int ran = 0;
    for (const std::string& recipe : runnable(problem_)) {
      CAPTURE(recipe);
      const Support support = can_make_pipeline(recipe, problem_, capacity(), device_info(gpu));
      if (!support) {
        fmt::print("{} at {}: left out, {}\n", recipe, to_string(capacity()), support.reason);
        continue;
      }
      PrefillSession session = session_of(problem_, {capacity()}, recipe);
      if (session.workspace_bytes() > most_workspace) {
        fmt::print("{} at {}: left out, its workspace is {:.1f} GiB\n", recipe,
                   to_string(capacity()), static_cast<double>(session.workspace_bytes()) / gib);
        continue;
      }
      restore();
      session.run(tensors(), capacity().max_tokens, capacity().max_sequences);
      check();
      ++ran;
    }
    CHECK(ran > 0);
  }

 private:
  struct Expected {
    std::unique_ptr<DeviceTensor> initial, o, final_state;
  };

  const TensorView& make(const char* name, DType dtype, const std::vector<std::int64_t>& extents) {
    return (tensors_[name] = std::make_unique<DeviceTensor>(dtype, extents))->view();
  }
  void draw(const char* name, InputKind kind, DType dtype,
            const std::vector<std::int64_t>& extents) {
    fill_input(kind, Distribution::random_decay, 5, make(name, dtype, extents));
  }
  TensorView rows(const char* name, std::int64_t n) const {
    const auto i = static_cast<std::size_t>(n);
    return rows_of(tensors_.at(name)->view(), offsets_[i], offsets_[i + 1] - offsets_[i]);
  }
  TensorView slot(std::int64_t n) const {
    return rows_of(tensors_.at("pool")->view(), slot_of_[static_cast<std::size_t>(n)], 1);
  }
  static void copy(const TensorView& from, const TensorView& to) {
    REQUIRE(cudaMemcpy(to.data, from.data, static_cast<std::size_t>(from.bytes()),
                       cudaMemcpyDeviceToDevice) == cudaSuccess);
  }
  static std::vector<std::int64_t> extents_of(const TensorView& view) {
    return {view.extents.begin(), view.extents.begin() + view.rank};
  }

  /// The oracle on sequence `n` alone.
  void expect(std::int64_t n) {
    Expected& expected = expected_[n];
    Problem p = problem_;
    p.state_indices = false;
    OracleInputs inputs{rows("q", n), rows("k", n), rows("v", n), rows("g", n), rows("beta", n)};
    inputs.cu_seqlens = {0, inputs.q.extents[0]};
    p.initial_state = slot_of_[static_cast<std::size_t>(n)] >= 0;
    // Doubles, as memory of 64 bits an element.
    expected.o = std::make_unique<DeviceTensor>(DType::i64, extents_of(inputs.v));
    if (p.initial_state) {
      const TensorView state = slot(n);
      expected.initial = std::make_unique<DeviceTensor>(p.state, extents_of(state));
      copy(state, expected.initial->view());
      inputs.initial_state = state;
      expected.final_state = std::make_unique<DeviceTensor>(DType::i64, extents_of(state));
    }
    oracle_on_device(p, inputs, expected.o->view().as<double>(),
                     expected.final_state ? expected.final_state->view().as<double>() : nullptr);
  }

  /// Puts the chosen sequences' states back and poisons the outputs.
  void restore() const {
    for (const auto& [n, expected] : expected_) {
      if (expected.initial) copy(expected.initial->view(), slot(n));
    }
    const TensorView& o = tensors_.at("o")->view();
    REQUIRE(cudaMemset(o.data, 0xff, static_cast<std::size_t>(o.bytes())) == cudaSuccess);
  }

  void check() const {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (const auto& [n, expected] : expected_) {
      CAPTURE(n);
      const Comparison o = compare_on_device(rows("o", n), expected.o->view().as<double>());
      CHECK_MESSAGE(o.within(gpu_bound), "o: ", to_string(o));
      if (!expected.final_state) continue;
      const Comparison state =
          compare_on_device(slot(n), expected.final_state->view().as<double>());
      CHECK_MESSAGE(state.within(gpu_bound), "final state: ", to_string(state));
    }
  }

  Problem problem_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int32_t> slot_of_;
  std::vector<std::int64_t> chosen_;
  std::map<std::string, std::unique_ptr<DeviceTensor>> tensors_;
  std::map<std::int64_t, Expected> expected_;
};

Problem problem_of(std::int32_t qk_heads, std::int32_t v_heads, DType state) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.state = state;
  return p;
}

std::vector<std::int32_t> slots_in_order(std::int64_t sequences) {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(sequences));
  for (std::int64_t n = 0; n < sequences; ++n) {
    slots[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(n);
  }
  return slots;
}

}  // namespace

TEST_SUITE_BEGIN("long");

TEST_CASE("slots past 4096, of a pool of more than 2^31 elements, in either type")
{
  GDNFLOW_REQUIRE_GPU();
  // 4200 slots of 32 heads are 2.2e9 elements.
  for (const DType state : {DType::bf16, DType::f32}) {
    if (!device_has(12 * gib)) return;
    const LargeBatch batch(problem_of(8, 32, state), {70, 1, 0, 65, 200}, 4200,
                           {4199, 4097, 4096, 0, -1}, {0, 1, 3, 4});
    batch.check_recipes(gib);
  }
}

TEST_CASE("more than 65535 sequences times heads")
{
  GDNFLOW_REQUIRE_GPU();
  // A few of them have states, the others are a token from nothing and lead nowhere.
  constexpr std::int64_t sequences = 1100;
  std::vector<std::int64_t> lengths(sequences, 1);
  std::vector<std::int32_t> slots(sequences, -1);
  std::vector<std::int64_t> chosen;
  for (const std::int64_t n : {0, 500, 1023, 1024, 1099}) {
    slots[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(chosen.size());
    chosen.push_back(n);
  }
  lengths[500] = lengths[1099] = 67;
  chosen.push_back(1050);
  if (!device_has(8 * gib)) return;
  const LargeBatch batch(problem_of(16, 64, DType::f32), lengths, 5, slots, chosen);
  batch.check_recipes(7 * gib);
}

TEST_CASE("more than 2^31 elements of v and o")
{
  GDNFLOW_REQUIRE_GPU();
  // Of 8192 elements a token: sequence 32 begins at byte 2^31 and sequence 64 at element 2^31.
  std::vector<std::int64_t> lengths(64, 4096);
  lengths.push_back(129);
  if (!device_has(40 * gib)) return;
  const LargeBatch batch(problem_of(16, 64, DType::f32), lengths, 65, slots_in_order(65),
                         {0, 31, 32, 63, 64});
  batch.check_recipes(26 * gib);
}

TEST_CASE("8192 sequences of 32 heads: more than 2^31 elements of states")
{
  GDNFLOW_REQUIRE_GPU();
  constexpr std::int64_t sequences = 8192;
  std::vector<std::int64_t> lengths(sequences, 1);
  for (std::size_t n = 0; n < sequences; n += 7) lengths[n] = 2;
  lengths[5000] = lengths[8191] = 66;
  lengths[4097] = 0;
  if (!device_has(20 * gib)) return;
  const LargeBatch batch(problem_of(8, 32, DType::bf16), lengths, sequences,
                         slots_in_order(sequences), {0, 1, 4095, 4096, 5000, 8190, 8191});
  batch.check_recipes(11 * gib);
}

TEST_CASE("sequences of very unequal lengths are computed to their ends")
{
  GDNFLOW_REQUIRE_GPU();
  if (!device_has(8 * gib)) return;
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{28672, 4096}, {9999, 65530}}) {
    const LargeBatch batch(problem_of(2, 8, DType::f32), lengths, 2, {0, 1}, {0, 1});
    batch.check_recipes(7 * gib);
  }
}

TEST_SUITE_END();
