#include <gdnflow/executor.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/prefill.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "gpu/callers_graph.hpp"
#include "gpu/device_batch.hpp"
#include "gpu/device_externals.hpp"
#include "gpu/neighbour_kernels.hpp"
#include "support/gpu.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

// Kernels of the caller's right in front of a run and right behind it, launched programmatically: a
// run reads and writes nothing before the one in front is done with it, and the one behind sees all
// of it, although each lets the next one start at once.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr int late_us = 200;  // many times what a launch takes

bool waits_by_itself() { return device_info(gpu).capability >= 90; }

/// With all of the optional stages in front and behind.
Problem full_problem() {
  Problem p = raw_problem();
  p.initial_state = true;
  p.zero_padding = true;
  return p;
}

struct Case {
  Problem problem;
  Capacity capacity;
  std::string recipe;
  VariantOverrides overrides{};
};

/// Every recipe, and what else a pass can begin with.
std::vector<Case> cases() {
  Problem plain = small_problem();
  plain.initial_state = true;
  std::vector<Case> list;
  for (const Problem& p : {plain, full_problem()}) {
    for (const std::string& recipe : runnable(p)) list.push_back({p, {400, 5}, recipe});
  }
  const auto one_pass = [](const char* options) {
    return VariantOverrides{{"one_pass", parse_variant_choice(std::string("one-pass:") + options)}};
  };
  for (const char* options : {"value_tile=64", "value_tile=128", "value_tile=64,segments=0",
                              "value_tile=128,segments=0"}) {
    list.push_back({plain, {400, 5}, "one-pass", one_pass(options)});
  }
  // Two launches for the chunk table; so many states would be gigabytes.
  Problem stateless = small_problem();
  stateless.final_state = false;
  list.push_back({stateless, {400, 5000}, "residual"});
  std::erase_if(list, [](const Case& c) {
    return is_excluded(c.recipe) ||
           !can_make_pipeline(c.recipe, c.problem, c.capacity, device_info(gpu), c.overrides);
  });
  return list;
}

bool is_output(const std::string& name) { return name == "o" || name == "final_state"; }

/// Tensors that a run is bound to, with batches beside them that kernels of the caller's bring in.
class Scene {
 public:
  explicit Scene(const Externals& host) : bound_(host) {
    for (const auto& [name, tensor] : host.tensors()) names_.push_back(name);
  }

  DeviceExternals& bound() noexcept { return bound_; }

  /// From `source` to the inputs, late. What the outputs hold until then is kept in `before`, and
  /// they are poisoned.
  Neighbour in_front(const DeviceExternals& source, const DeviceExternals& before,
                     bool programmatic) const {
    Neighbour front{.copies = {}, .programmatic = programmatic, .delay_us = late_us};
    for (const std::string& name : names_) {
      if (is_output(name)) front.copies.push_back(copy(before.view(name), bound_.view(name)));
    }
    // Of a batch that has not run: its outputs are poison.
    for (const std::string& name : names_) {
      front.copies.push_back(copy(bound_.view(name), source.view(name)));
    }
    return front;
  }
  /// From the outputs to `kept`.
  Neighbour behind(const DeviceExternals& kept) const {
    Neighbour last{.copies = {}, .programmatic = true};
    for (const std::string& name : names_) {
      if (is_output(name)) last.copies.push_back(copy(kept.view(name), bound_.view(name)));
    }
    return last;
  }
  /// Bytes of 0xff everywhere: no lengths, no numbers.
  void poison() const {
    for (const std::string& name : names_) {
      const TensorView& view = bound_.view(name);
      REQUIRE(cudaMemset(view.data, 0xff, static_cast<std::size_t>(view.bytes())) == cudaSuccess);
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }

 private:
  static DeviceCopy copy(const TensorView& to, const TensorView& from) {
    return {to.data, from.data, to.bytes()};
  }

  DeviceExternals bound_;
  std::vector<std::string> names_;
};

using Run = std::function<void(cudaStream_t)>;

/// Two batches in turn, each brought in by a kernel right in front of its run and taken away by one
/// right behind it, all on a stream or in a graph of the caller's.
class Relay {
 public:
  Relay(const Externals& first, const Externals& second)
      : scene_(first),
        sources_{DeviceExternals(first), DeviceExternals(second)},
        before_{DeviceExternals(first), DeviceExternals(first)},
        kept_{DeviceExternals(first), DeviceExternals(first)} {}

  const DeviceExternals& bound() noexcept { return scene_.bound(); }

  /// What the batches give by themselves.
  void expect(const Run& run) {
    for (int i = 0; i < 2; ++i) {
      scene_.poison();
      Neighbour front = scene_.in_front(sources_[i], before_[i], false);
      front.delay_us = 0;
      launch(front, nullptr);
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      run(nullptr);
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      expected_[i] = scene_.bound().bits();
    }
    CHECK(expected_[0] != expected_[1]);
  }
  void enqueue(const Run& run, cudaStream_t stream) const {
    for (int i = 0; i < 2; ++i) {
      launch(scene_.in_front(sources_[i], before_[i], i > 0), stream);
      run(stream);
      run(stream);  // right behind itself, in the same memory, for the same results
      launch(scene_.behind(kept_[i]), stream);
    }
  }
  void check(const std::function<void()>& pass) {
    scene_.poison();
    pass();
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    const std::vector<unsigned char> untouched = before_[0].bits();
    CHECK_MESSAGE(std::all_of(untouched.begin(), untouched.end(),
                              [](unsigned char byte) { return byte == 0xff; }),
                  "outputs were written while the kernel in front ran");
    CHECK_MESSAGE(kept_[0].bits() == expected_[0], "the first batch differs");
    CHECK_MESSAGE(before_[1].bits() == expected_[0],
                  "outputs were written while the second kernel in front ran");
    CHECK_MESSAGE(kept_[1].bits() == expected_[1], "the second batch differs");
  }
  void check_on_stream(const Run& run) {
    const TestStream stream;
    check([&] {
      enqueue(run, stream);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    });
  }
  void check_in_graph(const Run& run) {
    const CallersGraph graph([&](cudaStream_t stream) { enqueue(run, stream); });
    for (int replay = 0; replay < 2; ++replay) check([&] { graph.launch(); });
  }

 private:
  Scene scene_;
  DeviceExternals sources_[2];
  DeviceExternals before_[2];
  DeviceExternals kept_[2];
  std::vector<unsigned char> expected_[2];
};

using Factory = std::unique_ptr<Executor> (*)(Plan, ExecutorOptions);

std::unique_ptr<Executor> built(Factory make, const Case& c, const Bindings& bindings,
                                bool behind_callers) {
  ExecutorOptions options;
  options.behind_callers = behind_callers;
  auto executor = make(
      Plan(make_pipeline(c.recipe, c.problem, c.capacity, device_info(gpu), c.overrides)), options);
  executor->bind(bindings);
  executor->build();
  return executor;
}

Neighbour nothing() { return {}; }

class TestEvent {
 public:
  TestEvent() { REQUIRE(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming) == cudaSuccess); }
  TestEvent(const TestEvent&) = delete;
  TestEvent& operator=(const TestEvent&) = delete;
  ~TestEvent() { (void)cudaEventDestroy(event_); }
  operator cudaEvent_t() const noexcept { return event_; }  // NOLINT

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

TEST_CASE(
    "between kernels of the caller's that write late and read early, on a stream and captured")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Case& c : cases()) {
    CAPTURE(c.recipe);
    CAPTURE(to_string(c.problem));
    CAPTURE(to_string(c.capacity));
    Relay relay(Externals(c.problem, c.capacity, {100, 0, 1, 250}, Distribution::random_decay, 1),
                Externals(c.problem, c.capacity, {33, 200, 64}, Distribution::random_decay, 2));
    for (const bool behind_callers : {true, false}) {
      CAPTURE(behind_callers);
      for (const Factory make : {make_eager_executor, make_graph_executor}) {
        const auto executor = built(make, c, relay.bound().bindings(), behind_callers);
        CAPTURE(executor->kind());
        const Run run = [&](cudaStream_t stream) { executor->run(stream); };
        relay.expect(run);
        relay.check_on_stream(run);
        relay.check_in_graph(run);
      }
    }
  }
}

TEST_CASE("in a capture, all that comes first hangs on the caller's kernel by programmatic edges")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Case& c : cases()) {
    CAPTURE(c.recipe);
    CAPTURE(to_string(c.problem));
    DeviceExternals x(Externals(c.problem, c.capacity, {100, 0, 1, 250}));
    for (const Factory make : {make_eager_executor, make_graph_executor}) {
      for (const bool behind_callers : {true, false}) {
        const auto executor = built(make, c, x.bindings(), behind_callers);
        CAPTURE(executor->kind());
        CAPTURE(behind_callers);
        const bool overlaps = behind_callers && waits_by_itself();
        const CallersGraph behind_kernel([&](cudaStream_t stream) {
          launch(nothing(), stream);
          executor->run(stream);
        });
        REQUIRE(behind_kernel.roots() == 1);
        const EdgeCount first = behind_kernel.edges_from_root();
        CHECK(first.all > 0);
        CHECK(first.programmatic == (overlaps ? first.all : 0));
        // Of the last one alone: the rest of the run is in front of it.
        const CallersGraph twice([&](cudaStream_t stream) {
          executor->run(stream);
          executor->run(stream);
        });
        const CallersGraph once([&](cudaStream_t stream) { executor->run(stream); });
        const std::size_t between = twice.programmatic_edges() - 2 * once.programmatic_edges();
        CHECK(between == (overlaps ? first.all : 0));
      }
    }
  }
}

TEST_CASE("in a capture, the caller's kernel behind hangs on the last one by a programmatic edge")
{
  GDNFLOW_REQUIRE_GPU();
  if (!waits_by_itself()) return;
  for (const Case& c : cases()) {
    CAPTURE(c.recipe);
    DeviceExternals x(Externals(c.problem, c.capacity, {100, 0, 1, 250}));
    for (const Factory make : {make_eager_executor, make_graph_executor}) {
      const auto executor = built(make, c, x.bindings(), false);
      CAPTURE(executor->kind());
      const CallersGraph alone([&](cudaStream_t stream) { executor->run(stream); });
      const CallersGraph with([&](cudaStream_t stream) {
        executor->run(stream);
        launch({.copies = {}, .programmatic = true}, stream);
      });
      CHECK(with.nodes() == alone.nodes() + 1);
      CHECK(with.programmatic_edges() == alone.programmatic_edges() + 1);
    }
  }
}

TEST_CASE("in a capture, behind anything but one kernel a run waits for its end")
{
  GDNFLOW_REQUIRE_GPU();
  const DeviceTensor bytes(DType::u8, {256});
  const TestStream other;
  const TestEvent fork;
  const TestEvent join;
  const std::vector<std::pair<std::string, Run>> fronts{
      {"nothing", [](cudaStream_t) {}},
      {"a memset",
       [&](cudaStream_t stream) {
         launch(nothing(), stream);
         REQUIRE(cudaMemsetAsync(bytes.view().data, 1, 256, stream) == cudaSuccess);
       }},
      {"two kernels that are joined", [&](cudaStream_t stream) {
         launch(nothing(), stream);
         REQUIRE(cudaEventRecord(fork, stream) == cudaSuccess);
         REQUIRE(cudaStreamWaitEvent(other, fork) == cudaSuccess);
         launch(nothing(), stream);
         launch(nothing(), other);
         REQUIRE(cudaEventRecord(join, other) == cudaSuccess);
         REQUIRE(cudaStreamWaitEvent(stream, join) == cudaSuccess);
       }}};
  for (const Case& c : cases()) {
    CAPTURE(c.recipe);
    const Externals host(c.problem, c.capacity, {100, 0, 1, 250});
    DeviceExternals x(host);
    for (const Factory make : {make_eager_executor, make_graph_executor}) {
      const auto executor = built(make, c, x.bindings(), true);
      CAPTURE(executor->kind());
      executor->run();
      const std::vector<unsigned char> expected = x.bits();
      const CallersGraph alone([&](cudaStream_t stream) { executor->run(stream); });
      for (const auto& [name, front] : fronts) {
        CAPTURE(name);
        const CallersGraph graph([&, &front = front](cudaStream_t stream) {
          front(stream);
          executor->run(stream);
        });
        CHECK(graph.programmatic_edges() == alone.programmatic_edges());
        x.overwrite(host);
        graph.launch();
        CHECK(x.bits() == expected);
      }
    }
  }
}

TEST_CASE("a node that can be switched off in a graph has ordinary edges there")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = full_problem();
  const Capacity capacity{400, 5};
  const Externals host(p, capacity, {100, 0, 1, 250});
  for (const std::string& recipe : runnable(p)) {
    CAPTURE(recipe);
    DeviceExternals x(host);
    const Case c{p, capacity, recipe};
    const auto graph = built(make_graph_executor, c, x.bindings(), true);
    graph->run();
    const std::vector<unsigned char> expected = x.bits();
    for (const bool enabled : {false, true}) {
      graph->set_enabled("zero_padding", enabled);
      for (int i = 0; i < 3; ++i) {
        x.overwrite(host);
        graph->run();
        CHECK(x.download().padding_of_o_is(enabled ? 0x00 : 0xff));
      }
    }
    CHECK(x.bits() == expected);
  }
}

TEST_CASE("sessions and single calls behind the caller's kernels")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Problem& problem : {small_problem(), raw_problem()}) {
    const EngineBatch first(problem, 640, 5, mixed_batch(), 1);
    const EngineBatch second(problem, 640, 5, {{1, 0}, {600, 1}, {0, 2}, {3, 3, false}, {0, -1}},
                             2);
    for (const std::string& recipe : runnable(first.problem())) {
      CAPTURE(recipe);
      Relay relay(first.externals(), second.externals());
      const PrefillTensors tensors =
          prefill_tensors([&](const std::string& name, TensorView& view) {
            if (first.externals().tensors().contains(name)) view = relay.bound().view(name);
          });
      for (const bool graphs : {true, false}) {
        CAPTURE(graphs);
        PrefillSession session(
            first.problem(), {{640, 5}}, gpu,
            {.prefill = {.recipe = recipe, .behind_callers = true}, .graphs = graphs});
        const Run run = [&](cudaStream_t stream) { session.run(tensors, 640, 5, stream); };
        relay.expect(run);
        relay.check_on_stream(run);
        relay.check_in_graph(run);
      }
      const PrefillOptions options{.recipe = recipe, .behind_callers = true};
      const std::int64_t bytes = prefill_workspace_bytes(first.problem(), {640, 5}, gpu, options);
      const DeviceTensor workspace(DType::u8, {bytes});
      const Run run = [&](cudaStream_t stream) {
        prefill(first.problem(), tensors, workspace.view().data, bytes, stream, options);
      };
      relay.expect(run);
      relay.check_on_stream(run);
      relay.check_in_graph(run);
    }
  }
}
