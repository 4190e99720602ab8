#include <gdnflow/error.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "gpu/callers_graph.hpp"
#include "gpu/device_batch.hpp"
#include "support/chunked_prompts.hpp"
#include "support/expect_error.hpp"
#include "support/gpu.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

// What has gone wrong in other systems' serving, each on the GPU through a session; docs/serving.md
// has the list. What takes large tensors is in large_test.cpp.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

/// The buffers of prompts on the device.
class DevicePrompts {
 public:
  explicit DevicePrompts(ChunkedPrompts prompts) : host_(std::move(prompts)) {
    for (const auto& [name, tensor] : host_.tensors()) {
      device_[name] = std::make_unique<DeviceTensor>(tensor.view());
    }
  }

  const ChunkedPrompts& host() const noexcept { return host_; }
  PrefillTensors tensors() const {
    return host_.call([&](const std::string& name) { return device_.at(name)->view(); });
  }
  void begin(std::int64_t step, bool padded) {
    host_.begin(step, padded);
    for (const auto& [name, tensor] : device_) {
      if (name != "pool") tensor->upload(host_.tensors().at(name));
    }
  }
  void check() {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (const char* name : {"o", "checkpoints", "pool"}) {
      device_.at(name)->download(host_.tensors().at(name));
    }
    host_.check(gpu_bound);
  }

 private:
  ChunkedPrompts host_;
  std::map<std::string, std::unique_ptr<DeviceTensor>> device_;
};

/// Whether there is one; says so where there is not.
bool has_second_device(const char* test) {
  if (cuda_device_count() >= 2) return true;
  fmt::print("{}: skipped, expected 2 devices, got 1\n", test);
  return false;
}

/// The device that is current until this ends.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    REQUIRE(cudaGetDevice(&before_) == cudaSuccess);
    REQUIRE(cudaSetDevice(device) == cudaSuccess);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { (void)cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

}  // namespace

TEST_CASE("prompts in pieces: each starts where the one before has left its slot")
{
  GDNFLOW_REQUIRE_GPU();
  for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
    Problem p = small_problem();
    p.state_layout = layout;
    p.index = layout == StateLayout::kv ? DType::i32 : DType::i64;
    const ChunkedPrompts prompts(p, 256, awkward_pieces());
    for (const std::string& recipe : runnable(prompts.problem())) {
      CAPTURE(recipe);
      for (const bool padded : {false, true}) {
        CAPTURE(padded);
        DevicePrompts on_device(prompts);
        PrefillSession session = session_of(prompts.problem(), {prompts.capacity()}, recipe);
        const PrefillTensors tensors = on_device.tensors();
        for (std::int64_t step = 0; step < prompts.steps(); ++step) {
          CAPTURE(step);
          on_device.begin(step, padded);
          session.run(tensors, padded ? prompts.rows() : on_device.host().tokens(),
                      padded ? prompts.prompts() : on_device.host().count());
          on_device.check();
        }
        CHECK(session.stats().captures == 1);
        if (padded) CHECK(session.stats().rebinds == 0);
      }
    }
  }
}

TEST_CASE("short pieces beside long ones: token by token, and by chunks")
{
  GDNFLOW_REQUIRE_GPU();
  // So many sequences of heads that whole heads leave the short ones to the recurrence, which then
  // takes a head a block.
  Problem p = small_problem();
  p.qk_heads = 16;
  p.v_heads = 64;
  std::vector<std::vector<std::int64_t>> pieces{{1, 70, 24},  {24, 25, 1},  {0, 63, 1},
                                                {30, 34, 16}, {150, 3, 26}, {16, 0, 90}};
  for (std::int64_t i = 0; i < 13; ++i) pieces.push_back({i % 4, 20 + i % 6, 8});
  struct Form {
    StateLayout layout;
    DType state;
    std::int64_t slot_gap;  // 64: suits vectors
  };
  for (const Form& form :
       {Form{StateLayout::kv, DType::f32, 64}, Form{StateLayout::vk, DType::f32, 64},
        Form{StateLayout::kv, DType::f32, 1}, Form{StateLayout::vk, DType::f16, 1},
        Form{StateLayout::kv, DType::bf16, 64}}) {
    p.state_layout = form.layout;
    p.state = form.state;
    const ChunkedPrompts prompts(p, 512, pieces, form.slot_gap);
    CAPTURE(to_string(prompts.problem()));
    CAPTURE(form.slot_gap);
    for (const auto& [recipe, options] :
         std::map<std::string, Options>{{"recurrent", {}}, {"one-pass", {{"value_tile", 128}}}}) {
      CAPTURE(recipe);
      const PrefillOptions prefill{.recipe = recipe,
                                   .overrides = {{"one_pass", {recipe, options}}}};
      if (!can_make_pipeline(recipe, prompts.problem(), prompts.capacity(), device_info(gpu),
                             prefill.overrides)) {
        continue;
      }
      DevicePrompts on_device(prompts);
      PrefillSession session(prompts.problem(), {prompts.capacity()}, gpu, {.prefill = prefill});
      const PrefillTensors tensors = on_device.tensors();
      for (std::int64_t step = 0; step < prompts.steps(); ++step) {
        CAPTURE(step);
        const bool padded = step == 1;
        on_device.begin(step, padded);
        session.run(tensors, padded ? prompts.rows() : on_device.host().tokens(),
                    padded ? prompts.prompts() : on_device.host().count());
        on_device.check();
      }
    }
  }
}

TEST_CASE("prompts in pieces by a graph of the caller's, captured at the first piece")
{
  GDNFLOW_REQUIRE_GPU();
  const ChunkedPrompts prompts(small_problem(), 256, awkward_pieces());
  for (const std::string& recipe : runnable(prompts.problem())) {
    CAPTURE(recipe);
    DevicePrompts on_device(prompts);
    PrefillSession session = session_of(prompts.problem(), {prompts.capacity()}, recipe);
    on_device.begin(0, true);
    const CallersGraph graph([&](cudaStream_t stream) {
      session.run(on_device.tensors(), prompts.rows(), prompts.prompts(), stream);
    });
    for (std::int64_t step = 0; step < prompts.steps(); ++step) {
      CAPTURE(step);
      on_device.begin(step, true);
      graph.launch();
      on_device.check();
    }
  }
}

TEST_CASE("what is not finite in one sequence of a session changes no bit of another")
{
  GDNFLOW_REQUIRE_GPU();
  const std::vector<EngineSequence> sequences{{70, 3}, {100, 1}, {65, 0}};
  const EngineBatch clean(small_problem(), 250, 4, sequences);
  for (const std::string& recipe : runnable(clean.problem())) {
    CAPTURE(recipe);
    DeviceBatch batch(clean);
    PrefillSession session = session_of(clean.problem(), {{256, 4}}, recipe);
    session.run(batch.tensors(), batch.tokens(), batch.count());
    const Externals expected = batch.download();
    for (const float poison : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      for (const char* name : {"q", "k", "v", "g", "beta", "initial_state"}) {
        CAPTURE(name);
        EngineBatch poisoned = clean;
        poisoned.poison_sequence(1, name, poison);
        batch.become(std::move(poisoned));
        session.run(batch.tensors(), batch.tokens(), batch.count());
        clean.check_same_but(1, batch.download(), expected);
        CHECK(batch.download().padding_of_o_is(0xff));
      }
    }
  }
}

TEST_CASE("lengths of any kind lead to no row that there is not")
{
  GDNFLOW_REQUIRE_GPU();
  constexpr std::int64_t rows = 137;
  for (const DType index : {DType::i32, DType::i64}) {
    Problem p = small_problem();
    p.index = index;
    for (const std::string& recipe : runnable(EngineBatch::pooled(p))) {
      CAPTURE(recipe);
      PrefillSession session = session_of(EngineBatch::pooled(p), {{4096, 64}}, recipe);
      for (const std::vector<std::int64_t>& offsets : bad_offsets(rows, index)) {
        CAPTURE(offsets);
        EngineBatch batch(p, rows, 3, safe_sequences(offsets, rows));
        batch.set_offsets(offsets);
        DeviceBatch on_device(std::move(batch));
        session.run(on_device.tensors(), rows, 3);
        on_device.check();
      }
      CHECK(session.stats().captures == 1);
    }
  }
}

TEST_CASE("wrong arguments are refused before a byte is written")
{
  GDNFLOW_REQUIRE_GPU();
  DeviceBatch batch(EngineBatch(small_problem(), 640, 5, mixed_batch()));
  const std::vector<unsigned char> untouched = batch.bits();
  const PrefillTensors good = batch.tensors();
  for (const bool built : {false, true}) {
    PrefillSession session = session_of(batch.host().problem(), {{640, 5}});
    if (built) session.prepare(good);
    const SessionStats before = session.stats();
    const auto refused = [&](auto&& spoil, std::initializer_list<std::string_view> parts) {
      PrefillTensors t = good;
      spoil(t);
      expect_error(ErrorCode::invalid_argument, parts,
                   [&] { session.run(t, batch.tokens(), batch.count()); });
    };
    refused([](PrefillTensors& t) { t.q.extents[0] = 100; }, {"q: expected at least 336 rows"});
    refused([](PrefillTensors& t) { t.v.dtype = DType::f16; }, {"v: expected bf16[", "got f16["});
    refused([](PrefillTensors& t) { t.k.strides[2] = 2; }, {"k", "contiguous last dimension"});
    refused([](PrefillTensors& t) { t.g = {}; }, {"g: expected f32[", "got none"});
    refused([](PrefillTensors& t) { t.a = t.v; }, {"a: expected none"});
    refused([](PrefillTensors& t) { t.o.data = nullptr; }, {"o: ", "null pointer"});
    refused([](PrefillTensors& t) { t.state_indices.dtype = DType::i64; },
            {"state_indices: expected i32["});
    refused([](PrefillTensors& t) { t.final_state.extents[3] = 64; },
            {"final_state: expected f32["});
    refused([](PrefillTensors& t) { t.cu_seqlens.device = Device{}; }, {"cu_seqlens", "host"});
    expect_error(ErrorCode::invalid_argument, {"got 641 tokens and 5 sequences"},
                 [&] { session.run(good, 641, 5); });
    const SessionStats after = session.stats();
    CHECK(after.calls == 0);
    CHECK(after.captures == before.captures);
    CHECK(after.rebinds == 0);
    CHECK(batch.bits() == untouched);
    session.run(good, batch.tokens(), batch.count());
    batch.check();
    batch.poison();
  }
}

TEST_CASE("batch_invariant: the same bits alone in a small bucket and in a batch in a large one")
{
  GDNFLOW_REQUIRE_GPU();
  Problem p = small_problem();
  p.mode = Mode::batch_invariant;
  const std::vector<EngineSequence> sequences{{700, 3}, {64, 1}, {1200, 0}, {1, 5}, {0, 4}};
  const EngineBatch whole(p, 2100, 6, sequences);
  for (const std::string& recipe : runnable(whole.problem())) {
    CAPTURE(recipe);
    DeviceBatch batch(whole);
    PrefillSession session =
        session_of(whole.problem(), {{64, 1}, {704, 1}, {1280, 2}, {4096, 8}}, recipe);
    CHECK(session.run(batch.tensors(), batch.tokens(), batch.count()) == Capacity{4096, 8});
    const Externals expected = batch.download();
    for (std::int64_t n = 0; n < batch.count(); ++n) {
      CAPTURE(n);
      const std::int64_t tokens = sequences[static_cast<std::size_t>(n)].tokens;
      const std::int64_t first = whole.externals().offsets()[static_cast<std::size_t>(n)];
      batch.poison();
      PrefillTensors alone = batch.tensors();
      for (TensorView* view : {&alone.q, &alone.k, &alone.v, &alone.g, &alone.beta, &alone.o}) {
        view->data = static_cast<char*>(view->data) +
                     first * view->strides[0] * static_cast<std::int64_t>(size_of(view->dtype));
        view->extents[0] = tokens;
      }
      for (TensorView* view : {&alone.state_indices, &alone.has_initial_state}) {
        view->data =
            static_cast<char*>(view->data) + n * static_cast<std::int64_t>(size_of(view->dtype));
        view->extents[0] = 1;
      }
      const HostTensor offsets(DType::i32, {2});
      offsets.as<std::int32_t>()[1] = static_cast<std::int32_t>(tokens);
      const DeviceTensor on_device(offsets.view());
      alone.cu_seqlens = on_device.view();
      CHECK(session.run(alone, tokens, 1).max_tokens < 4096);
      whole.check_same(n, batch.download(), expected);
    }
  }
}

TEST_CASE("a dirty workspace changes no bit, also where few heads are cut")
{
  GDNFLOW_REQUIRE_GPU();
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  const EngineBatch host(p, 2800, 3, {{2600, 1}, {0, 2}, {130, 0, false}});
  for (const std::string& recipe : runnable(host.problem())) {
    CAPTURE(recipe);
    DeviceBatch batch(host);
    std::vector<unsigned char> bits;
    for (const int dirt : {0xff, 0x00, 0x7f}) {
      batch.poison();
      PrefillSession session = session_of(host.problem(), {{2816, 3}}, recipe);
      const DeviceTensor workspace(DType::u8, {session.workspace_bytes()});
      REQUIRE(cudaMemset(workspace.view().data, dirt,
                         static_cast<std::size_t>(session.workspace_bytes())) == cudaSuccess);
      session.set_workspace(workspace.view().data, session.workspace_bytes());
      session.run(batch.tensors(), batch.tokens(), batch.count());
      if (bits.empty()) {
        batch.check();
        bits = batch.bits();
      }
      CHECK(batch.bits() == bits);
    }
  }
}

TEST_CASE("a session takes the memory that it reports")
{
  GDNFLOW_REQUIRE_GPU();
  DeviceBatch batch(EngineBatch(small_problem(), 8192, 9, mixed_batch()));
  for (const std::string& recipe : runnable(batch.host().problem())) {
    CAPTURE(recipe);
    // Kernels that are loaded for the first time count too: once for all.
    session_of(batch.host().problem(), {{8192, 9}}, recipe)
        .run(batch.tensors(), batch.tokens(), batch.count());
    const std::int64_t before = free_memory();
    PrefillSession session =
        session_of(batch.host().problem(), capacity_ladder({8192, 9}, 512), recipe);
    session.prepare(batch.tensors());
    const std::int64_t taken = before - free_memory();
    constexpr std::int64_t granularity = std::int64_t{4} << 20;
    CHECK(taken <= session.stats().workspace_bytes + session.stats().graph_bytes + granularity);
  }
}

TEST_CASE("a second device is served as the first is")
{
  GDNFLOW_REQUIRE_GPU();
  if (!has_second_device("a second device")) return;
  const EngineBatch host(small_problem(), 640, 5, mixed_batch());
  for (const std::string& recipe : runnable(host.problem())) {
    CAPTURE(recipe);
    std::vector<unsigned char> bits;
    for (const std::int32_t device : {0, 1}) {
      CAPTURE(device);
      // The tensors' device need not be current when a session runs.
      std::unique_ptr<DeviceBatch> batch;
      {
        const CurrentDevice current(device);
        batch = std::make_unique<DeviceBatch>(host);
      }
      PrefillSession session(host.problem(), {{640, 5}}, {DeviceType::cuda, device},
                             {.prefill = {.recipe = recipe}});
      session.run(batch->tensors(), batch->tokens(), batch->count());
      const CurrentDevice current(device);
      batch->check();
      if (bits.empty()) bits = batch->bits();
      CHECK(batch->bits() == bits);
    }
  }
}

TEST_CASE("two devices at once, in turn from one thread and from a thread each")
{
  GDNFLOW_REQUIRE_GPU();
  if (!has_second_device("two devices at once")) return;
  const EngineBatch host(small_problem(), 640, 5, mixed_batch());
  struct Side {
    Side(const EngineBatch& host, std::int32_t device, const std::string& recipe)
        : current(device),
          batch(host),
          session(host.problem(), capacity_ladder({640, 5}, 128), {DeviceType::cuda, device},
                  {.prefill = {.recipe = recipe}}) {}
    void run(int times) {
      for (int i = 0; i < times; ++i) {
        session.run(batch.tensors(), batch.tokens(), batch.count(), stream);
      }
    }

    CurrentDevice current;  // while this is made, and before it ends
    DeviceBatch batch;
    TestStream stream;
    PrefillSession session;
  };
  for (const std::string& recipe : runnable(host.problem())) {
    CAPTURE(recipe);
    std::vector<std::unique_ptr<Side>> sides;
    for (const std::int32_t device : {0, 1}) {
      sides.push_back(std::make_unique<Side>(host, device, recipe));
    }
    for (int i = 0; i < 6; ++i) sides[i % 2]->run(1);
    std::vector<std::future<void>> threads;
    for (const auto& side : sides) {
      threads.push_back(std::async(std::launch::async, [&side] { side->run(8); }));
    }
    for (std::future<void>& thread : threads) thread.get();
    std::vector<std::vector<unsigned char>> bits;
    for (const std::int32_t device : {0, 1}) {
      CAPTURE(device);
      const CurrentDevice current(device);
      sides[device]->batch.check();
      bits.push_back(sides[device]->batch.bits());
      CHECK(sides[device]->session.stats().calls == 11);
    }
    CHECK(bits[0] == bits[1]);
    while (!sides.empty()) sides.pop_back();  // the last first, whose device is current
  }
}

TEST_CASE("the chosen pipeline keeps no state a chunk: its workspace grows with tokens alone")
{
  DeviceInfo h200;
  h200.device = gpu;
  h200.name = "NVIDIA H200";
  h200.capability = 90;
  h200.multiprocessors = 132;
  h200.shared_bytes_per_block = 227 * 1024;
  h200.l2_bytes = 50 << 20;
  const auto bytes = [&](std::int64_t tokens, std::int64_t sequences) {
    Problem p;
    p.qk_heads = 16;
    p.v_heads = 64;
    return Plan(make_pipeline("auto", EngineBatch::pooled(p), {tokens, sequences}, h200))
        .arena_bytes();
  };
  // What blocks hand on to one another depends on the machine. 64 heads' states of one chunk in
  // bf16 are 2 MiB: kept for each, they would be 256 MiB here and 2.5 GiB there.
  constexpr std::int64_t mib = std::int64_t{1} << 20;
  const std::int64_t small = bytes(8192, 64);
  CHECK(small < 32 * mib);
  CHECK(bytes(65536, 256) < small + 8 * mib);
}
