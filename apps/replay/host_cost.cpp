// What a call costs the host: with nothing rebound, with everything rebound, launched kernel by
// kernel, and where a graph has to be made. Batches have no tokens, so that the device keeps up and
// what is measured is the host's own time. Beside it, what a bucket costs that is hardly filled.

#include <gdnflow/gdnflow.hpp>

#include "common/arguments.hpp"
#include "common/output.hpp"
#include "common/table.hpp"
#include "common/tensors.hpp"
#include "replay/bucket_cost.hpp"
#include "replay/engine.hpp"
#include "replay/server.hpp"
#include "replay/settings.hpp"

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps::replay {
namespace {

struct Cost {
  std::string what;
  std::string key;
  Percentiles us;
};

/// Host time of calls, with waits between them that are not timed, so that no queue fills up.
class Meter {
 public:
  Meter(Device device, Stream stream) : device_(device), stream_(stream) {}

  Percentiles measure(int calls, const std::function<void()>& call) const {
    constexpr int warm_up = 4;
    constexpr int calls_in_flight = 16;
    std::vector<double> samples;
    for (int i = 0; i < warm_up + calls; ++i) {
      if (i % calls_in_flight == 0) synchronize(device_, stream_);
      const double us = host_microseconds(call);
      if (i >= warm_up) samples.push_back(us);
    }
    synchronize(device_, stream_);
    return percentiles(std::move(samples));
  }

 private:
  Device device_;
  Stream stream_;
};

/// The session's calls, eager or graph.
void add_session_costs(std::vector<Cost>& costs, const Meter& meter, const Engine& engine,
                       const Capacity& capacity, const PrefillOptions& prefill, bool graphs,
                       Stream stream) {
  const std::string name = engine.device().type == DeviceType::host ? "session"
                           : graphs                                 ? "replay"
                                                                    : "eager";
  PrefillSession session(engine.problem(), {capacity}, engine.device(), {prefill, graphs});
  // Another layer's: other activations, another pool.
  const std::array<PrefillTensors, 2> sets{engine.tensors(0), engine.tensors(1)};
  constexpr int calls = 1000;
  const auto run = [&](const PrefillTensors& tensors) {
    session.run(tensors, capacity.max_tokens, capacity.max_sequences, stream);
  };
  costs.push_back({name + ", nothing rebound", name, meter.measure(calls, [&] { run(sets[0]); })});
  int turn = 0;
  costs.push_back({name + ", every pointer rebound", name + "_rebound",
                   meter.measure(calls, [&] { run(sets[static_cast<std::size_t>(++turn % 2)]); })});
  turn = 0;
  costs.push_back(
      {name + ", one sequence more or less", name + "_other_rows", meter.measure(calls, [&] {
         session.run(sets[0], capacity.max_tokens, capacity.max_sequences - ++turn % 2, stream);
       })});
}

/// `Executor::bind` by itself, with every pointer another one: what a graph takes longer for than
/// launching does is the update of its nodes.
Percentiles bind_cost(const Meter& meter, const Engine& engine, const Capacity& capacity,
                      const Plan& plan, bool graph) {
  const auto bindings = [&](std::int64_t layer) {
    return bindings_of(engine.tensors(layer), capacity.max_tokens, capacity.max_sequences);
  };
  const std::array<Bindings, 2> sets{bindings(0), bindings(1)};
  const std::unique_ptr<Executor> executor =
      graph ? make_graph_executor(plan) : make_executor(plan);
  executor->bind(sets[0]);
  executor->build();
  int turn = 0;
  return meter.measure(1000, [&] { executor->bind(sets[static_cast<std::size_t>(++turn % 2)]); });
}

std::vector<Cost> measure(const Engine& engine, const Capacity& capacity,
                          const PrefillOptions& prefill, Stream stream) {
  const Device device = engine.device();
  const bool on_gpu = device.type == DeviceType::cuda;
  const Meter meter(device, stream);
  std::vector<Cost> costs;
  add_session_costs(costs, meter, engine, capacity, prefill, true, stream);
  if (on_gpu) add_session_costs(costs, meter, engine, capacity, prefill, false, stream);

  const Memory workspace(device,
                         prefill_workspace_bytes(engine.problem(), capacity, device, prefill));
  const PrefillTensors tensors = engine.tensors(0);
  costs.push_back({"gdnflow::prefill, the same tensors", "prefill", meter.measure(1000, [&] {
                     gdnflow::prefill(engine.problem(), tensors, workspace.data(),
                                      workspace.bytes(), stream, prefill);
                   })});

  const DeviceInfo info = device_info(device);
  const Plan plan(
      make_pipeline(prefill.recipe, engine.problem(), capacity, info, prefill.overrides));
  costs.push_back(
      {"bind alone, every pointer", "bind", bind_cost(meter, engine, capacity, plan, false)});
  if (on_gpu) {
    costs.push_back({"bind alone, with the graph's nodes", "bind_graph",
                     bind_cost(meter, engine, capacity, plan, true)});
  }

  constexpr int builds = 20;
  costs.push_back({"planning a shape", "plan", meter.measure(builds, [&] {
                     const Plan again(make_pipeline(prefill.recipe, engine.problem(), capacity,
                                                    info, prefill.overrides));
                   })});
  costs.push_back({on_gpu ? "a shape's graph: planned, captured, instantiated, run"
                          : "a shape's executor: planned, built, run",
                   "capture", meter.measure(builds, [&] {
                     PrefillSession fresh(engine.problem(), {capacity}, device, {prefill, true});
                     fresh.run(tensors, capacity.max_tokens, capacity.max_sequences, stream);
                     synchronize(device, stream);
                   })});
  return costs;
}

}  // namespace

int run_host_cost(const po::variables_map& arguments) {
  const Device device = device_from(arguments);
  const bool on_host = device.type == DeviceType::host;
  const Problem problem = engine_problem_from(arguments, device);
  const Capacity capacity{count_or(arguments, "tokens", 1, on_host ? 256 : 8192),
                          count_or(arguments, "sequences", 1, 8)};
  validate(problem, capacity);
  check_files_apart(arguments, {"costs"}, {"json"});
  const std::optional<OutputTarget> json = json_target_from(arguments);
  use_device(device);
  const PrefillOptions prefill =
      prefill_options_from(arguments, problem, capacity, device_info(device));

  constexpr std::int64_t layers = 2;
  Engine engine(problem, capacity, layers, capacity.max_sequences, draw_from(arguments), device);
  engine.set_empty_step();
  const OwnedStream stream(device);
  const std::vector<Cost> costs = measure(engine, capacity, prefill, stream.get());
  const std::vector<BucketCost> buckets = bucket_costs(problem, capacity.max_sequences, prefill,
                                                       draw_from(arguments), device, stream.get());

  const Pipeline pipeline =
      make_pipeline(prefill.recipe, problem, capacity, device_info(device), prefill.overrides);
  Json result = {{"pipeline", prefill.recipe},
                 {"nodes", pipeline.nodes().size()},
                 {"device", device_name(device)},
                 {"problem", to_string(problem)},
                 {"capacity", to_string(capacity)}};
  Json& host_us = result["host_us"] = Json::object();
  Table table({"host time of a call, us", "p50", "p95", "p99"}, 1);
  for (const Cost& cost : costs) {
    host_us[cost.key] = to_json(cost.us);
    table.add({cost.what, fmt::format("{:.2f}", cost.us.p50), fmt::format("{:.2f}", cost.us.p95),
               fmt::format("{:.2f}", cost.us.p99)});
  }
  Json& bucket_us = result["bucket_us"] = Json::object();
  Table bucket_table({fmt::format("{} tokens in a bucket of", bucket_cost_tokens),
                      on_host ? "call, us" : "device, us", "times the first"},
                     0);
  for (const BucketCost& bucket : buckets) {
    const double us = bucket.time.median_ms * 1e3;
    bucket_us[std::to_string(bucket.bucket_tokens)] = us;
    bucket_table.add({std::to_string(bucket.bucket_tokens), fmt::format("{:.2f}", us),
                      fmt::format("{:.2f}", bucket.time.median_ms / buckets[0].time.median_ms)});
  }
  if (json) json->write(result.dump(2));
  if (!json || !json->is_stdout()) {
    fmt::print("{} on {}\n{}; {}; {} stages\n", prefill.recipe, to_string(device_info(device)),
               to_string(problem), to_string(capacity), pipeline.nodes().size());
    if (on_host) fmt::print("on the host there is no launch: a call's time is the work itself\n");
    fmt::print("\n{}\n{}", table.str(), bucket_table.str());
  }
  return exit_success;
}

}  // namespace gdnflow::apps::replay
