#include <gdnflow/cache.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/session.hpp>

#include "gpu/callers_graph.hpp"
#include "gpu/device_batch.hpp"
#include "support/allocations.hpp"
#include "support/expect_error.hpp"
#include "support/gpu.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

// Sessions on a GPU: any bucket and any tensors, captures, streams, and what a call costs in
// memory.

using namespace gdnflow;
using namespace gdnflow::test;

TEST_CASE("a batch in any bucket, from buffers larger or just large enough, graph or eager")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Problem& p : {small_problem(), raw_problem()}) {
    DeviceBatch batch(EngineBatch(p, 1500, 9, mixed_batch()));
    for (const std::string& recipe : runnable(batch.host().problem())) {
      CAPTURE(recipe);
      for (const Capacity& bucket : {Capacity{336, 5}, Capacity{1024, 8}, Capacity{4096, 64}}) {
        CAPTURE(bucket.max_tokens);
        std::vector<unsigned char> expected;
        for (const bool graphs : {true, false}) {
          for (const bool exact : {false, true}) {
            CAPTURE(graphs);
            CAPTURE(exact);
            batch.poison();
            PrefillSession session = session_of(batch.host().problem(), {bucket}, recipe, graphs);
            session.run(exact ? batch.exact() : batch.tensors(), batch.tokens(), batch.count());
            if (expected.empty()) {
              batch.check();
              expected = batch.bits();
            }
            CHECK(batch.bits() == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("tensors that end where the batch does: nothing past them is touched")
{
  GDNFLOW_REQUIRE_GPU();
  // Of 137 rows and five sequences in a bucket of 4096 and 64, with lengths that run over.
  for (const std::string& recipe : runnable(EngineBatch::pooled(small_problem()))) {
    CAPTURE(recipe);
    EngineBatch wrong(small_problem(), 137, 3, {{50, 0}, {20, 1}, {67, 2}});
    auto* offsets = wrong.externals()["cu_seqlens"].as<std::int32_t>();
    offsets[1] = 1 << 30;
    offsets[2] = -5;
    DeviceBatch batch(std::move(wrong));
    PrefillSession session = session_of(batch.host().problem(), {{4096, 64}}, recipe);
    session.run(batch.tensors(), 137, 3);
    batch.become(EngineBatch(small_problem(), 137, 3, {{137, 0}, {0, 1}, {0, 2}}));
    session.run(batch.tensors(), 137, 3);
    batch.check();
    CHECK(session.stats().captures == 1);
  }
}

TEST_CASE("lengths and slots that change in place need no rebind, and leave nothing stale")
{
  GDNFLOW_REQUIRE_GPU();
  // The engine pads its metadata to the bucket: the same tensors and numbers call after call.
  const auto padded = [](std::vector<EngineSequence> batch) {
    batch.resize(6, {.tokens = 0, .slot = -1});
    return EngineBatch(small_problem(), 640, 6, std::move(batch), 3);
  };
  for (const std::string& recipe : runnable(EngineBatch::pooled(small_problem()))) {
    CAPTURE(recipe);
    DeviceBatch batch(padded({{100, 0}, {100, 1}, {100, 2}, {100, 3}, {100, 4}, {140, 5}}));
    PrefillSession session = session_of(batch.host().problem(), {{640, 6}}, recipe);
    for (const std::vector<EngineSequence>& next :
         {std::vector<EngineSequence>{{100, 0}, {100, 1}, {100, 2}, {100, 3}, {100, 4}, {140, 5}},
          {{640, 2}},
          {{0, 1}, {1, 4}},
          {{1, -1}, {63, 3}, {0, 2}, {65, 0, false}}}) {
      batch.become(padded(next));
      session.run(batch.tensors(), 640, 6);
      batch.check();
    }
    CHECK(session.stats().captures == 1);
    CHECK(session.stats().hits == 3);
    CHECK(session.stats().rebinds == 0);
  }
}

TEST_CASE("a replay with every pointer rebound, and two sessions interleaved on two streams")
{
  GDNFLOW_REQUIRE_GPU();
  for (const std::string& recipe : runnable(EngineBatch::pooled(small_problem()))) {
    CAPTURE(recipe);
    std::vector<std::unique_ptr<DeviceBatch>> batches;
    for (std::uint64_t i = 0; i < 6; ++i) {
      batches.push_back(std::make_unique<DeviceBatch>(EngineBatch(
          small_problem(), 700, 4,
          {{static_cast<std::int64_t>(90 * i), 3}, {static_cast<std::int64_t>(i), 1}, {64, 2}},
          i)));
    }
    const TestStream streams[2];
    PrefillSession sessions[2] = {
        session_of(batches[0]->host().problem(), capacity_ladder({768, 4}, 128), recipe),
        session_of(batches[0]->host().problem(), capacity_ladder({768, 4}, 128), recipe)};
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < batches.size(); ++i) {
        DeviceBatch& batch = *batches[i];
        sessions[i % 2].run(batch.tensors(), batch.tokens(), batch.count(), streams[i % 2]);
      }
    }
    for (const auto& batch : batches) batch->check();
    for (const PrefillSession& session : sessions) {
      CHECK(session.stats().calls == 9);
      CHECK(session.stats().captures <= session.buckets().size());
    }
  }
}

TEST_CASE("a steady state allocates nothing, on the host or on the device")
{
  GDNFLOW_REQUIRE_GPU();
  DeviceBatch x(EngineBatch(raw_problem(), 700, 9, mixed_batch(), 1));
  DeviceBatch y(EngineBatch(raw_problem(), 700, 9, {{20, 1}, {300, 2}}, 2));
  for (const bool graphs : {true, false}) {
    PrefillSession session =
        session_of(x.host().problem(), capacity_ladder({1024, 9}, 128), "", graphs);
    session.prepare(x.tensors());
    const TestStream stream;
    const PrefillTensors larger = x.tensors();
    const PrefillTensors smaller = y.exact();
    const auto round = [&] {
      session.run(larger, x.tokens(), x.count(), stream);
      session.run(smaller, y.tokens(), y.count(), stream);
    };
    round();
    const std::int64_t free_before = free_memory();
    const long before = allocations();
    for (int i = 0; i < 10; ++i) round();
    const long made = allocations() - before;
    CHECK(made == 0);
    CHECK(free_memory() == free_before);
    CHECK(session.stats().captures == session.buckets().size());
  }
}

TEST_CASE("a session is captured into the caller's graph, built or not, with other work around it")
{
  GDNFLOW_REQUIRE_GPU();
  for (const std::string& recipe : runnable(EngineBatch::pooled(small_problem()))) {
    CAPTURE(recipe);
    DeviceBatch batch(EngineBatch(small_problem(), 640, 5, mixed_batch()));
    PrefillSession session =
        session_of(batch.host().problem(), capacity_ladder({640, 5}, 128), recipe);
    const DeviceTensor counter(DType::u8, {256});
    // The first call in a bucket, inside a capture in the strictest mode.
    const CallersGraph step([&](cudaStream_t stream) {
      REQUIRE(cudaMemsetAsync(counter.view().data, 1, 128, stream) == cudaSuccess);
      session.run(batch.tensors(), 640, 5, stream);
      REQUIRE(cudaMemsetAsync(counter.view().data, 2, 256, stream) == cudaSuccess);
    });
    CHECK(step.roots() == 1);
    CHECK(step.nodes() > 2);
    CHECK(session.stats().captures == 1);
    step.launch();
    batch.check();
    const std::vector<unsigned char> bits = batch.bits();
    // Replayed for another batch in place.
    batch.become(EngineBatch(small_problem(), 640, 5,
                             {{1, 0}, {600, 1}, {0, 2}, {3, 3, false}, {0, -1}}, 5));
    step.launch();
    batch.check();
    // Built by now, and outside of a capture again.
    batch.become(EngineBatch(small_problem(), 640, 5, mixed_batch()));
    session.run(batch.tensors(), 640, 5);
    CHECK(batch.bits() == bits);
    CHECK(session.stats().captures == 1);
  }
}

TEST_CASE("a miss of the graph cache stands inside a capture, and so does the eviction it causes")
{
  GDNFLOW_REQUIRE_GPU();
  Problem p = small_problem();
  p.initial_state = true;
  const Capacity capacity{256, 2};
  DeviceExternals x(Externals(p, capacity, {100, 60}));
  GraphCache cache(1);
  const GraphKey other{"residual", p, {128, 2}, {}, gpu};
  DeviceExternals y(Externals(p, {128, 2}, {100, 20}));
  cache.get(other, y.bindings());
  std::shared_ptr<Executor> executor;
  const CallersGraph step([&](cudaStream_t stream) {
    executor = cache.get({"residual", p, capacity, {}, gpu}, x.bindings());
    executor->run(stream);
  });
  CHECK(cache.stats().evictions == 1);
  step.launch();
  const std::vector<unsigned char> bits = x.bits();
  const Externals host(p, capacity, {100, 60});
  x.overwrite(host);
  executor->run();
  CHECK(x.bits() == bits);
  const OracleResult expected = oracle_recurrent(p, host.oracle_inputs());
  CHECK(compare(x.download().tensors().at("final_state"), expected.final_state).within(gpu_bound));
}

TEST_CASE("a workspace of the caller's, and memory in numbers")
{
  GDNFLOW_REQUIRE_GPU();
  DeviceBatch batch(EngineBatch(small_problem(), 640, 5, mixed_batch()));
  PrefillSession session =
      session_of(batch.host().problem(), capacity_ladder({640, 5}, 128), "residual");
  const DeviceTensor workspace(DType::u8, {session.workspace_bytes() + 8});
  session.set_workspace(static_cast<char*>(workspace.view().data) + 8, session.workspace_bytes());
  session.prepare(batch.tensors());
  session.run(batch.tensors(), batch.tokens(), batch.count());
  batch.check();
  CHECK(session.stats().workspace_bytes == session.workspace_bytes());
  CHECK(session.workspace_bytes(0) < session.workspace_bytes(session.buckets().size() - 1));
}

TEST_CASE("tensors of another place are refused before anything is launched")
{
  GDNFLOW_REQUIRE_GPU();
  DeviceBatch batch(EngineBatch(small_problem(), 640, 5, mixed_batch()));
  PrefillSession session = session_of(batch.host().problem(), {{640, 5}});
  PrefillTensors tensors = batch.tensors();
  tensors.k.device = Device{};
  expect_error(ErrorCode::invalid_argument, {"k: expected bf16[640,2,128] cuda:0", "host"},
               [&] { session.run(tensors, batch.tokens(), batch.count()); });
  CHECK(session.stats().captures == 0);
  session.run(batch.tensors(), batch.tokens(), batch.count());
  batch.check();
}
