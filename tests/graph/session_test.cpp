#include <gdnflow/error.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "graph/small_session.hpp"
#include "support/engine_batch.hpp"
#include "support/expect_error.hpp"

#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

// On the host; tests/gpu does the same with graphs.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

PrefillSession session_of(const Problem& problem, std::vector<Capacity> buckets,
                          const std::string& recipe = "") {
  return {problem, std::move(buckets), Device{}, {.prefill = {.recipe = recipe}}};
}

std::vector<std::string> host_recipes(const Problem& problem) {
  std::vector<std::string> ids;
  for (const Recipe& recipe : recipes()) {
    if (can_make_pipeline(recipe.id, problem, {64, 1}, device_info({})))
      ids.emplace_back(recipe.id);
  }
  REQUIRE(ids.size() >= 4);
  return ids;
}

std::vector<unsigned char> bits(const HostTensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.view().data);
  return {bytes, bytes + tensor.view().bytes()};
}

/// Slots -1, an empty sequence with a slot, one of a token, and a fresh one whose slot holds what
/// another request left.
std::vector<EngineSequence> mixed_batch() {
  return {{.tokens = 70, .slot = 3},
          {.tokens = 0, .slot = 5},
          {.tokens = 1, .slot = -1},
          {.tokens = 65, .slot = 0, .started = false},
          {.tokens = 1, .slot = 4}};
}

}  // namespace

TEST_CASE("a ladder of capacities grows in whole chunks up to the most")
{
  CHECK(capacity_ladder({1000, 7}, 100) ==
        std::vector<Capacity>{{128, 7}, {256, 7}, {448, 7}, {832, 7}, {1000, 7}});
  CHECK(capacity_ladder({64, 1}, 64) == std::vector<Capacity>{{64, 1}});
  CHECK(capacity_ladder({10, 2}) == std::vector<Capacity>{{10, 2}});
  // Steps of less than a chunk make no bucket twice.
  CHECK(capacity_ladder({200, 1}, 1, 1.25) ==
        std::vector<Capacity>{{64, 1}, {128, 1}, {192, 1}, {200, 1}});
  expect_error(ErrorCode::invalid_argument, {"at least 1 token and 1 sequence", "0 tokens"}, [] {
    capacity_ladder({0, 1});
  });
  expect_error(ErrorCode::invalid_argument, {"factor above 1", "got 64 and 1"}, [] {
    capacity_ladder({100, 1}, 64, 1.0);
  });
}

TEST_CASE("the smallest bucket that holds a batch serves it")
{
  const PrefillSession session =
      session_of(small_session_problem(), {{512, 2}, {64, 8}, {128, 2}, {128, 16}, {64, 8}});
  CHECK(std::vector(session.buckets().begin(), session.buckets().end()) ==
        std::vector<Capacity>{{64, 8}, {128, 2}, {128, 16}, {512, 2}});
  CHECK(session.bucket_for(0, 0) == 0);
  CHECK(session.bucket_for(64, 8) == 0);
  CHECK(session.bucket_for(65, 2) == 1);
  CHECK(session.bucket_for(1, 9) == 2);
  CHECK(session.bucket_for(129, 1) == 3);
  expect_error(ErrorCode::invalid_argument, {"512", "got 129 tokens and 3 sequences"},
               [&] { (void)session.bucket_for(129, 3); });
  expect_error(ErrorCode::invalid_argument, {"at least 0", "-1"},
               [&] { (void)session.bucket_for(-1, 1); });
}

TEST_CASE("a batch in any bucket, from buffers larger or just large enough, gives the same bits")
{
  Problem p = small_session_problem();
  SUBCASE("ready gates")
  {}
  SUBCASE("raw gates, norms")
  {
    p.gate = GateForm::raw;
    p.beta = BetaForm::logit;
    p.qk_norm = true;
  }
  for (const std::string& recipe : host_recipes(p)) {
    CAPTURE(recipe);
    std::vector<unsigned char> o;
    std::vector<unsigned char> state;
    for (const Capacity& bucket : {Capacity{137, 5}, Capacity{192, 8}, Capacity{512, 64}}) {
      for (const bool exact : {false, true}) {
        EngineBatch batch(p, 600, 9, mixed_batch());
        PrefillSession session = session_of(batch.problem(), {bucket}, recipe);
        PrefillTensors tensors = batch.tensors();
        if (exact) tensors = exact_rows(tensors, batch.tokens(), batch.count());
        CHECK(session.run(tensors, batch.tokens(), batch.count()) == bucket);
        batch.check(session_bound);
        if (o.empty()) {
          o = bits(batch.externals()["o"]);
          state = bits(batch.externals()["final_state"]);
        }
        CHECK(bits(batch.externals()["o"]) == o);
        CHECK(bits(batch.externals()["final_state"]) == state);
      }
    }
  }
}

TEST_CASE("it computes what a call of its own for the shape does")
{
  EngineBatch batch(small_session_problem(), 137, 5, mixed_batch());
  EngineBatch alone(small_session_problem(), 137, 5, mixed_batch());
  PrefillSession session = session_of(batch.problem(), {{300, 9}}, "residual");
  session.run(batch.tensors(), batch.tokens(), batch.count());
  PrefillTensors tensors = alone.tensors();
  tensors.state_indices.extents[0] = tensors.has_initial_state.extents[0] = alone.count();
  const PrefillOptions options{.recipe = "residual"};
  std::vector<std::byte> workspace(static_cast<std::size_t>(
      prefill_workspace_bytes(alone.problem(), {137, 5}, Device{}, options)));
  prefill(alone.problem(), tensors, workspace.data(), std::ssize(workspace), nullptr, options);
  CHECK(bits(batch.externals()["o"]) == bits(alone.externals()["o"]));
  CHECK(bits(batch.externals()["final_state"]) == bits(alone.externals()["final_state"]));
}

TEST_CASE("fewer sequences than before: what the larger batch left is not looked at")
{
  const Problem p = small_session_problem();
  for (const std::string& recipe : host_recipes(p)) {
    CAPTURE(recipe);
    PrefillSession session = session_of(EngineBatch::pooled(p), {{256, 6}}, recipe);
    for (const std::vector<EngineSequence>& sequences :
         {std::vector<EngineSequence>{{40, 0}, {40, 1}, {40, 2}, {40, 3}, {40, 4}, {40, 5}},
          {{100, 2}},
          {},
          {{0, 1}, {0, -1}},
          {{1, 5}, {255, 0}}}) {
      EngineBatch batch(p, 256, 6, sequences, 7);
      session.run(batch.tensors(), batch.tokens(), batch.count());
      batch.check(session_bound);
    }
    CHECK(session.stats().captures == 1);
    CHECK(session.stats().hits == 4);
  }
}

TEST_CASE("lengths that fall or run over lead to no row that a tensor does not have")
{
  // The tensors end where the bucket does not: an allocation of its own, so that a sanitizer sees.
  for (const std::string& recipe : host_recipes(small_session_problem())) {
    CAPTURE(recipe);
    EngineBatch batch(small_session_problem(), 90, 3, {{50, 0}, {20, 1}, {20, 2}});
    PrefillSession session = session_of(batch.problem(), {{256, 8}}, recipe);
    auto* offsets = batch.externals()["cu_seqlens"].as<std::int32_t>();
    offsets[1] = 1000000;
    offsets[2] = -5;
    session.run(batch.tensors(), 90, 3);
    EngineBatch clamped(small_session_problem(), 90, 3, {{90, 0}, {0, 1}, {0, 2}});
    clamped.check(batch.externals(), session_bound);
  }
}

TEST_CASE("states of a row a sequence are bound with as many rows as the batch has")
{
  Problem p = small_session_problem();
  p.initial_state = true;
  for (const std::string& recipe : host_recipes(p)) {
    CAPTURE(recipe);
    Externals x(p, {200, 3}, {70, 0, 100});
    const PrefillTensors tensors = prefill_tensors([&](const std::string& name, TensorView& view) {
      if (const auto found = x.tensors().find(name); found != x.tensors().end()) {
        view = found->second.view();
      }
    });
    PrefillSession session = session_of(p, {{512, 16}}, recipe);
    session.run(tensors, 170, 3);
    const OracleResult expected = oracle_recurrent(p, x.oracle_inputs());
    CHECK(compare(x.owned_o(), std::span(expected.o).first(x.owned_elements()))
              .within(session_bound));
    CHECK(compare(x.tensors().at("final_state"), expected.final_state).within(session_bound));
  }
}

TEST_CASE("prepared buckets are hits, and a repeated call binds nothing")
{
  EngineBatch batch(small_session_problem(), 512, 9, mixed_batch());
  PrefillSession session = session_of(batch.problem(), capacity_ladder({512, 9}, 128), "residual");
  CHECK(session.stats().captures == 0);
  session.prepare(batch.tensors());
  CHECK(session.stats().captures == session.buckets().size());
  CHECK(session.stats().calls == 0);
  session.run(batch.tensors(), batch.tokens(), batch.count());
  CHECK(session.stats().rebinds == 1);  // prepared with nine sequences
  const PrefillTensors same = batch.tensors();
  session.run(same, batch.tokens(), batch.count());
  session.prepare(same);
  const SessionStats stats = session.stats();
  CHECK(stats.calls == 2);
  CHECK(stats.hits == 2);
  CHECK(stats.rebinds == 1);
  CHECK(stats.captures == session.buckets().size());
  CHECK(stats.graph_bytes == 0);  // the host has none
  batch.check(session_bound);
}

TEST_CASE("buckets share a workspace, the caller's where one is given")
{
  EngineBatch batch(small_session_problem(), 512, 9, mixed_batch());
  PrefillSession session = session_of(batch.problem(), {{192, 9}, {512, 9}}, "residual");
  CHECK(session.workspace_bytes(0) < session.workspace_bytes(1));
  CHECK(session.workspace_bytes() == session.workspace_bytes(1));
  CHECK(session.stats().workspace_bytes == session.workspace_bytes());
  std::vector<std::byte> memory(static_cast<std::size_t>(session.workspace_bytes()) + 8,
                                std::byte{0xee});
  expect_error(ErrorCode::invalid_argument, {"workspace: expected at least", "got 16"},
               [&] { session.set_workspace(memory.data(), 16); });
  expect_error(ErrorCode::invalid_argument, {"workspace", "null pointer"},
               [&] { session.set_workspace(nullptr, 1 << 30); });
  session.set_workspace(memory.data() + 8, session.workspace_bytes());
  session.run(batch.tensors(), batch.tokens(), batch.count());
  batch.check(session_bound);
  CHECK(std::any_of(memory.begin() + 8, memory.end(),
                    [](std::byte b) { return b != std::byte{0xee}; }));
  CHECK(std::all_of(memory.begin(), memory.begin() + 8,
                    [](std::byte b) { return b == std::byte{0xee}; }));
  expect_error(ErrorCode::invalid_argument, {"before anything is built"},
               [&] { session.set_workspace(memory.data(), session.workspace_bytes() + 8); });
  expect_error(ErrorCode::invalid_argument, {"bucket: expected a number below 2, got 2"},
               [&] { (void)session.workspace_bytes(2); });
}

TEST_CASE("what it cannot serve is refused in one line, and the session stays as it was")
{
  EngineBatch batch(small_session_problem(), 256, 6, {{100, 1}, {20, 2}});
  PrefillSession session = session_of(batch.problem(), {{128, 4}, {256, 6}});
  const PrefillTensors good = batch.tensors();
  session.run(good, 120, 2);
  batch.check(session_bound);
  const auto refused = [&](auto&& spoil, std::initializer_list<std::string_view> parts) {
    PrefillTensors t = good;
    spoil(t);
    expect_error(ErrorCode::invalid_argument, parts, [&] { session.run(t, 120, 2); });
  };
  refused([](PrefillTensors& t) { t.q.extents[0] = 119; },
          {"prefill session: q: expected at least 120 rows for the tokens", "got f32[119,1,16]"});
  refused([](PrefillTensors& t) { t.cu_seqlens.extents[0] = 2; },
          {"cu_seqlens: expected at least 3 rows for the sequences", "got i32[2]"});
  refused([](PrefillTensors& t) { t.state_indices.extents[0] = 1; },
          {"state_indices: expected at least 2 rows for the sequences"});
  refused([](PrefillTensors& t) { t.v.dtype = DType::f16; }, {"v: expected f32[", "got f16["});
  refused([](PrefillTensors& t) { t.g = {}; }, {"prefill session: g: expected f32[", "got none"});
  refused([](PrefillTensors& t) { t.b = t.beta; }, {"prefill session: b: expected none"});
  refused([](PrefillTensors& t) { t.o.data = nullptr; }, {"o: ", "null pointer"});
  refused([](PrefillTensors& t) { t.k.rank = 0; }, {"k: expected at least 120 rows", "rank 0"});
  refused([](PrefillTensors& t) { t.k.rank = 99; }, {"k: expected at least 120 rows", "rank 99"});
  refused([](PrefillTensors& t) { t.final_state.extents[2] = 15; }, {"final_state: expected f32["});
  expect_error(ErrorCode::invalid_argument, {"got 257 tokens and 1 sequences"},
               [&] { session.run(good, 257, 1); });
  const SessionStats before = session.stats();
  CHECK(before.calls == 1);
  CHECK(before.rebinds == 0);
  session.run(good, 120, 2);
  CHECK(session.stats().rebinds == 0);
  batch.check(session_bound);

  Problem dense = small_session_problem();
  dense.cu_seqlens = false;
  expect_error(ErrorCode::invalid_argument, {"expected a problem with cu_seqlens"}, [&] {
    session_of(dense, {{64, 1}});
  });
  expect_error(ErrorCode::invalid_argument, {"at least one capacity"},
               [] { session_of(small_session_problem(), {}); });
  expect_error(ErrorCode::invalid_argument, {"max_tokens"}, [] {
    session_of(small_session_problem(), {{-1, 1}});
  });
  expect_error(ErrorCode::invalid_argument, {"recipe", "'nothing'"}, [] {
    session_of(small_session_problem(), {{64, 1}}, "nothing");
  });
}

TEST_CASE("a session moves")
{
  EngineBatch batch(small_session_problem(), 256, 6, {{100, 1}, {20, 2}});
  PrefillSession session = session_of(batch.problem(), {{256, 6}});
  session.run(batch.tensors(), 120, 2);
  PrefillSession moved = std::move(session);
  moved.run(batch.tensors(), 120, 2);
  CHECK(moved.stats().hits == 1);
  batch.check(session_bound);
}

TEST_CASE("several sessions in several threads share nothing")
{
  constexpr std::size_t threads = 4;
  constexpr int steps = 6;
  std::vector<std::vector<EngineBatch>> batches(threads);
  for (std::size_t t = 0; t < threads; ++t) {
    for (int i = 0; i < steps; ++i) {
      batches[t].emplace_back(
          small_session_problem(), 200, 4,
          std::vector<EngineSequence>{{20 + 10 * i, 3}, {static_cast<std::int64_t>(t), 1}},
          t * 100 + static_cast<std::uint64_t>(i));
    }
  }
  std::vector<std::thread> running;
  for (std::size_t t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      PrefillSession session =
          session_of(batches[t].front().problem(), capacity_ladder({200, 4}, 64), "residual");
      for (const EngineBatch& batch : batches[t]) {
        session.run(batch.tensors(), batch.tokens(), batch.count());
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (const auto& of_thread : batches) {
    for (const EngineBatch& batch : of_thread) batch.check(session_bound);
  }
}
