#include <gdnflow/compare.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/prefill.hpp>

#include "support/expect_error.hpp"
#include "support/externals.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

Problem small_problem() {
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  p.qk_dim = 24;
  p.v_dim = 16;
  p.activation = DType::f32;
  return p;
}

/// Memory for intermediates.
class Workspace {
 public:
  explicit Workspace(std::int64_t bytes) : memory_(bytes + misalignment) {}
  /// Aligned to nothing in particular.
  void* data() const noexcept { return memory_.data() + misalignment; }
  std::int64_t bytes() const noexcept { return std::ssize(memory_) - misalignment; }

 private:
  static constexpr std::ptrdiff_t misalignment = 8;
  mutable std::vector<std::byte> memory_;
};

PrefillTensors tensors_of(Externals& x) {
  PrefillTensors t;
  const auto set = [&](TensorView& member, const std::string& name) {
    if (const auto found = x.tensors().find(name); found != x.tensors().end()) {
      member = found->second.view();
    }
  };
  set(t.q, "q");
  set(t.k, "k");
  set(t.v, "v");
  set(t.g, "g");
  set(t.beta, "beta");
  set(t.a, "a");
  set(t.b, "b");
  set(t.a_log, "a_log");
  set(t.dt_bias, "dt_bias");
  set(t.cu_seqlens, "cu_seqlens");
  set(t.initial_state, "initial_state");
  set(t.final_state, "final_state");
  set(t.o, "o");
  return t;
}

void run(Externals& x, const PrefillOptions& options = {}) {
  const Workspace workspace(prefill_workspace_bytes(x.problem(), x.capacity(), Device{}, options));
  prefill(x.problem(), tensors_of(x), workspace.data(), workspace.bytes(), nullptr, options,
          x.capacity().max_sequences);
}

void check_against_oracle(const Externals& x) {
  const OracleResult expected = oracle_recurrent(x.problem(), x.oracle_inputs());
  const Comparison o = compare(x.owned_o(), std::span(expected.o).first(x.owned_elements()));
  CHECK_MESSAGE(o.within(1e-5), "o: ", to_string(o));
  const Comparison state = compare(x.tensors().at("final_state"), expected.final_state);
  CHECK_MESSAGE(state.within(1e-5), "final_state: ", to_string(state));
}

}  // namespace

TEST_CASE("one call computes a prefill")
{
  Problem p = small_problem();
  SUBCASE("packed")
  {}
  SUBCASE("from an initial state, with raw gates and logits")
  {
    p.initial_state = true;
    p.gate = GateForm::raw;
    p.beta = BetaForm::logit;
    p.qk_norm = true;
  }
  for (const std::string recipe : {"", "naive", "residual", "fused", "recurrent"}) {
    CAPTURE(recipe);
    Externals x(p, {200, 3}, {70, 0, 100});
    run(x, {.recipe = recipe});
    check_against_oracle(x);
  }
}

TEST_CASE("dense sequences are counted by the caller")
{
  Problem p = small_problem();
  p.cu_seqlens = false;
  Externals x(p, {150, 3}, {50, 50, 50});
  run(x);
  check_against_oracle(x);
}

TEST_CASE("no tokens")
{
  Problem p = small_problem();
  p.initial_state = true;
  Externals x(p, {0, 2}, {0, 0});
  PrefillTensors t = tensors_of(x);
  // Nothing to point at.
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.g, &t.beta, &t.o}) view->data = nullptr;
  const Workspace workspace(prefill_workspace_bytes(p, x.capacity(), {}));
  prefill(p, t, workspace.data(), workspace.bytes());
  CHECK(compare(x["final_state"], x["initial_state"]).max_abs == 0);
}

TEST_CASE("repeated shapes, other pointers, another workspace and many shapes")
{
  std::vector<Externals> all;
  for (std::int64_t i = 0; i < 40; ++i) {
    const std::int64_t tokens = 20 + i % 20;  // more shapes than are kept
    all.emplace_back(small_problem(), Capacity{tokens, 1}, std::vector{tokens},
                     Distribution::random_decay, static_cast<std::uint64_t>(i));
  }
  for (Externals& x : all) run(x);
  for (Externals& x : all) check_against_oracle(x);
}

TEST_CASE("several threads call at once")
{
  std::vector<Externals> all;
  for (std::uint64_t i = 0; i < 8; ++i) {
    all.emplace_back(small_problem(), Capacity{90, 2}, std::vector<std::int64_t>{50, 40},
                     Distribution::random_decay, i);
  }
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      run(all[2 * i]);
      run(all[2 * i + 1]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Externals& x : all) check_against_oracle(x);
}

TEST_CASE("wrong arguments are refused in one line before anything is written")
{
  Problem p = small_problem();
  Externals x(p, {100, 2}, {60, 40});
  const Workspace workspace(prefill_workspace_bytes(p, x.capacity(), {}));
  const PrefillTensors good = tensors_of(x);
  const auto refused = [&](const std::function<void(PrefillTensors&)>& spoil,
                           std::initializer_list<std::string_view> parts) {
    PrefillTensors t = good;
    spoil(t);
    expect_error(ErrorCode::invalid_argument, parts,
                 [&] { prefill(p, t, workspace.data(), workspace.bytes()); });
  };
  refused([](PrefillTensors& t) { t.k.extents[0] = 99; },
          {"prefill: k: expected f32[100,1,24] host", "got f32[99,1,24] host"});
  refused([](PrefillTensors& t) { t.v.dtype = DType::f16; },
          {"prefill: v: expected f32[100,2,16]", "got f16[100,2,16]"});
  refused([](PrefillTensors& t) { t.g = {}; }, {"prefill: g: expected f32[100,2] host, got none"});
  refused([](PrefillTensors& t) { t.o.data = nullptr; }, {"prefill: o: ", "null pointer"});
  refused([](PrefillTensors& t) { t.q = {}; }, {"prefill: q: expected [T,Hqk,Dk]", "rank 0"});
  refused([](PrefillTensors& t) { t.q.rank = 2; },
          {"prefill: q: expected [T,Hqk,Dk]", "f32[100,1]"});
  refused([](PrefillTensors& t) { t.cu_seqlens = {}; }, {"prefill: cu_seqlens: expected [N+1]"});
  refused([](PrefillTensors& t) { t.cu_seqlens.extents[0] = 1; },
          {"prefill: cu_seqlens", "at least 1 sequence", "i32[1]"});
  refused(
      [](PrefillTensors& t) {
        t.k.device = {DeviceType::cuda, 0};
      },
      {"prefill: k: expected f32[100,1,24] host", "cuda:0"});
  refused([](PrefillTensors& t) { t.k.strides[2] = 3; }, {"prefill: k: ", "contiguous"});
  refused([](PrefillTensors& t) { t.b = t.beta; }, {"prefill: b: expected none", "got f32[100,2]"});
  refused([](PrefillTensors& t) { t.initial_state = t.final_state; },
          {"prefill: initial_state: expected none"});
  expect_error(ErrorCode::invalid_argument, {"prefill: workspace", "bytes", "got 16"},
               [&] { prefill(p, good, workspace.data(), 16); });
  expect_error(ErrorCode::invalid_argument, {"prefill: workspace", "null pointer"},
               [&] { prefill(p, good, nullptr, workspace.bytes()); });
  expect_error(ErrorCode::invalid_argument, {"recipe", "'nothing'"}, [&] {
    prefill(p, good, workspace.data(), workspace.bytes(), nullptr, {.recipe = "nothing"});
  });
  Problem bad = p;
  bad.v_heads = 0;
  expect_error(ErrorCode::invalid_argument, {"v_heads"},
               [&] { prefill(bad, good, workspace.data(), workspace.bytes()); });
  CHECK(x.padding_of_o_is(0xff));
  const auto* o = static_cast<const unsigned char*>(x["o"].view().data);
  for (std::int64_t i = 0; i < x["o"].view().bytes(); ++i) REQUIRE(o[i] == 0xff);
  // And the right arguments still work.
  prefill(p, good, workspace.data(), workspace.bytes());
  check_against_oracle(x);
}
