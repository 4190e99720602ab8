// Random batches within one capacity: one captured graph beside launching kernel by kernel.

#include <gdnflow/gdnflow.hpp>

#include "common/arguments.hpp"
#include "common/output.hpp"
#include "common/progress.hpp"
#include "common/reference.hpp"
#include "common/table.hpp"
#include "common/tensors.hpp"
#include "common/timing.hpp"
#include "replay/settings.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps::replay {
namespace {

struct Settings {
  Device device{};
  Problem problem;
  Capacity capacity;
  std::int64_t batches = 0;
  std::int64_t buffers = 0;
  std::int64_t checks = 0;
  Draw draw;
  Bounds bounds;
};

Settings settings_from(const po::variables_map& arguments) {
  Settings s;
  s.device = device_from(arguments);
  const bool on_host = s.device.type == DeviceType::host;
  s.problem = problem_from(arguments, s.device);
  s.problem.initial_state = flag(arguments, "initial-state");
  s.capacity = {count_or(arguments, "tokens", 1, on_host ? 256 : 8192),
                count_or(arguments, "sequences", 1, 8)};
  s.batches = count_or(arguments, "batches", 1, on_host ? 20 : 500);
  s.buffers = std::min(count_or(arguments, "buffers", 1, 2), s.batches);
  s.checks = std::min(count_or(arguments, "check", 0, 4), s.batches);
  s.draw = draw_from(arguments);
  s.bounds = bounds_from(arguments, s.problem);
  validate(s.problem, s.capacity);
  return s;
}

/// Lengths of random batches: any number of sequences up to the capacity's with any number of
/// tokens together; the other sequences are empty, and stand anywhere.
class Batches {
 public:
  Batches(const Capacity& capacity, std::uint64_t seed) : capacity_(capacity), random_(seed) {}

  std::vector<std::int64_t> next() {
    const std::int64_t tokens = 1 + below(capacity_.max_tokens);
    const std::int64_t sequences = 1 + below(std::min(capacity_.max_sequences, tokens));
    // Cuts the tokens at random places.
    std::vector<std::int64_t> cuts{0, tokens};
    for (std::int64_t i = 1; i < sequences; ++i) cuts.push_back(below(tokens + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(capacity_.max_sequences));
    std::adjacent_difference(cuts.begin() + 1, cuts.end(), lengths.begin());
    std::shuffle(lengths.begin(), lengths.end(), random_);
    return lengths;
  }

 private:
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }

  Capacity capacity_;
  std::mt19937_64 random_;
};

/// An executor and what it took, batch by batch.
struct Contestant {
  std::unique_ptr<Executor> executor;
  std::vector<double> latency_ms;
  std::vector<double> run_us;   ///< host time of Executor::run
  std::vector<double> bind_us;  ///< host time of Executor::bind with another set of tensors
  double worst_o = 0;
  double worst_state = 0;
  bool right = true;
};

std::vector<Contestant> make_contestants(const Settings& settings, const Pipeline& pipeline,
                                         const Workload& first) {
  std::vector<std::unique_ptr<Executor>> executors;
  if (settings.device.type == DeviceType::cuda) {
    executors.push_back(make_graph_executor(Plan(pipeline)));
    executors.push_back(make_eager_executor(Plan(pipeline)));
  } else {
    executors.push_back(make_host_executor(Plan(pipeline)));
  }
  std::vector<Contestant> contestants;
  for (std::unique_ptr<Executor>& executor : executors) {
    executor->bind(first.bindings());
    executor->build();
    executor->run();
    synchronize(settings.device);
    contestants.emplace_back().executor = std::move(executor);
  }
  return contestants;
}

void run_batch(Contestant& contestant, const Workload& workload, Stopwatch& watch, Stream stream) {
  const Bindings bindings = workload.bindings();
  contestant.bind_us.push_back(host_microseconds([&] { contestant.executor->bind(bindings); }));
  watch.start(stream);
  contestant.run_us.push_back(host_microseconds([&] { contestant.executor->run(stream); }));
  contestant.latency_ms.push_back(watch.stop(stream));
}

void check_batch(Contestant& contestant, const Workload& workload, const Reference& reference,
                 const Bounds& bounds) {
  const Comparison o = reference.o(workload.view("o"));
  const Comparison state = reference.final_state(workload.view("final_state"));
  contestant.worst_o = worse(contestant.worst_o, for_report(o).relative_rms);
  contestant.worst_state = worse(contestant.worst_state, for_report(state).relative_rms);
  if (o.within(bounds.o) && state.within(bounds.state)) return;
  contestant.right = false;
  std::fflush(stdout);
  fmt::print(stderr, "gdnflow-replay: {}: cu_seqlens {}: o: {}; final_state: {}\n",
             contestant.executor->kind(), fmt::join(workload.cu_seqlens, ","),
             to_string(o, workload.cu_seqlens), to_string(state));
}

double tokens_per_second(const Contestant& contestant, std::int64_t tokens) {
  const double ms =
      std::accumulate(contestant.latency_ms.begin(), contestant.latency_ms.end(), 0.0);
  return static_cast<double>(tokens) / (ms * 1e-3);
}

}  // namespace

int run_batches(const po::variables_map& arguments) {
  const Settings settings = settings_from(arguments);
  check_files_apart(arguments, {"costs"}, {"json"});
  const std::optional<OutputTarget> json = json_target_from(arguments);
  use_device(settings.device);
  const DeviceInfo info = device_info(settings.device);
  const auto [recipe, overrides, name] =
      pipeline_from(arguments, settings.problem, settings.capacity, info);
  const Pipeline pipeline =
      make_pipeline(recipe, settings.problem, settings.capacity, info, overrides);

  Batches batches(settings.capacity, settings.draw.seed);
  std::vector<Workload> workloads;
  const std::vector<std::int64_t> first = batches.next();
  for (std::int64_t i = 0; i < settings.buffers; ++i) {
    workloads.push_back(make_workload(settings.problem, settings.capacity, first,
                                      settings.draw.distribution, settings.draw.next(i).seed,
                                      settings.device));
  }
  std::vector<Contestant> contestants = make_contestants(settings, pipeline, workloads.front());

  const OwnedStream stream(settings.device);
  Stopwatch watch(settings.device);
  Progress progress(static_cast<int>(settings.batches));
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < settings.batches; ++i) {
    progress.step(fmt::format("batches replayed, {} tokens", tokens));
    Workload& workload = workloads[static_cast<std::size_t>(i % settings.buffers)];
    workload.set_lengths(batches.next());
    tokens += workload.tokens();
    const bool checked = is_chosen(i, settings.checks, settings.batches);
    std::optional<Reference> reference;
    if (checked) reference.emplace(settings.problem, workload.oracle_inputs());
    for (Contestant& contestant : contestants) {
      if (checked) workload.poison_outputs();
      run_batch(contestant, workload, watch, stream.get());
      if (reference) {
        check_batch(contestant, workload, *reference, settings.bounds);
      }
    }
  }
  progress.clear();

  Json result = {{"pipeline", name},
                 {"device", device_name(settings.device)},
                 {"problem", to_string(settings.problem)},
                 {"capacity", to_string(settings.capacity)},
                 {"batches", settings.batches},
                 {"tokens", tokens},
                 {"distribution", to_string(settings.draw.distribution)},
                 {"seed", settings.draw.seed},
                 {"checked", settings.checks}};
  Table table({"executor", "p50 ms", "p95 ms", "p99 ms", "tokens/s", "run p50 us", "run p99 us",
               "bind p50 us"},
              1);
  bool right = true;
  for (const Contestant& contestant : contestants) {
    const Percentiles latency = percentiles(contestant.latency_ms);
    const Percentiles run_us = percentiles(contestant.run_us);
    const Percentiles bind_us = percentiles(contestant.bind_us);
    const double rate = tokens_per_second(contestant, tokens);
    const std::string kind(contestant.executor->kind());
    result[kind] = {{"latency_ms", to_json(latency)},
                    {"tokens_per_second", rate},
                    {"run_host_us", to_json(run_us)},
                    {"bind_host_us", to_json(bind_us)},
                    {"worst_o_rel_rms", contestant.worst_o},
                    {"worst_state_rel_rms", contestant.worst_state},
                    {"right", contestant.right}};
    table.add({kind, fmt::format("{:.4f}", latency.p50), fmt::format("{:.4f}", latency.p95),
               fmt::format("{:.4f}", latency.p99), fmt::format("{:.4g}", rate),
               fmt::format("{:.1f}", run_us.p50), fmt::format("{:.1f}", run_us.p99),
               fmt::format("{:.1f}", bind_us.p50)});
    right = right && contestant.right;
  }
  result["right"] = right;
  if (json) {
    json->write(result.dump(2));
  }
  if (!json || !json->is_stdout()) {
    fmt::print("{} on {}\n{}; at most {}\n", name, to_string(info), to_string(settings.problem),
               to_string(settings.capacity));
    fmt::print("{} random batches, {} tokens, ", settings.batches, tokens);
    if (settings.checks > 0) {
      fmt::print("{} checked against the oracle: {}\n", settings.checks, right ? "right" : "WRONG");
    } else {
      fmt::print("none checked against the oracle\n");
    }
    if (settings.device.type == DeviceType::host) {
      fmt::print("on the host there is no graph and no launch: one executor, timed whole\n");
    }
    fmt::print("\n{}", table.str());
  }
  return right ? exit_success : exit_wrong_result;
}

}  // namespace gdnflow::apps::replay
