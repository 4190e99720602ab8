// The requests of a trace through an engine's loop, once for each way to serve it.

#include <gdnflow/gdnflow.hpp>

#include "common/arguments.hpp"
#include "common/output.hpp"
#include "common/plot.hpp"
#include "common/progress.hpp"
#include "common/table.hpp"
#include "replay/checker.hpp"
#include "replay/engine.hpp"
#include "replay/requests.hpp"
#include "replay/scheduler.hpp"
#include "replay/server.hpp"
#include "replay/settings.hpp"
#include "replay/token_table.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps::replay {
namespace {

struct Settings {
  Device device{};
  Problem problem;
  std::string trace;
  std::vector<Request> requests;
  SchedulerOptions scheduler;
  std::vector<Capacity> buckets;
  std::int64_t layers = 0;
  double scale = 1;
  std::int64_t checks = 0;
  Draw draw;
  Bounds bounds;

  std::int64_t pool_rows() const { return scheduler.slots + scheduler.checkpoint_rows; }
  std::int64_t pool_bytes() const {  ///< of all layers
    const std::vector<std::int64_t> extents = state_extents(problem, pool_rows());
    return layers * TensorView::dense(nullptr, problem.state, extents).bytes();
  }
};

double positive_or(const po::variables_map& arguments, const char* name, double fallback) {
  if (!has(arguments, name)) return fallback;
  const auto value = arguments[name].as<double>();
  if (!(value > 0) || value > std::numeric_limits<float>::max()) {
    throw UsageError(fmt::format("--{}: expected a number above 0, got {}", name, value));
  }
  return value;
}

/// What of each prompt is kept for others that begin alike, and where.
void set_prefix_cache(const po::variables_map& arguments, bool on_host, Settings& s) {
  const std::int64_t interval =
      count_or(arguments, "checkpoint-interval", 0, on_host ? chunk_tokens : 8 * chunk_tokens);
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (interval % chunk_tokens != 0 || interval > most) {
    throw UsageError(
        fmt::format("--checkpoint-interval: expected 0 or a multiple of {} of at most {}, got {}",
                    chunk_tokens, most - most % chunk_tokens, interval));
  }
  if (interval == 0) {
    if (flag(arguments, "exact-prefix")) {
      throw UsageError("--exact-prefix: expected it with a --checkpoint-interval above 0, got 0");
    }
    if (has(arguments, "checkpoint-rows")) {
      throw UsageError(
          "--checkpoint-rows: expected it with a --checkpoint-interval above 0, got 0");
    }
    return;
  }
  s.scheduler.checkpoint_interval = interval;
  s.scheduler.checkpoint_rows = count_or(arguments, "checkpoint-rows", 1, on_host ? 32 : 64);
  s.scheduler.exact_prefix = flag(arguments, "exact-prefix");
  s.problem.checkpoint_interval = static_cast<std::int32_t>(interval);
  s.problem.checkpoint_state_indices = true;
  // What starts from a checkpoint writes to its slot.
  s.problem.output_state_indices = true;
}

Settings settings_from(const po::variables_map& arguments) {
  Settings s;
  s.device = device_from(arguments);
  const bool on_host = s.device.type == DeviceType::host;
  s.problem = engine_problem_from(arguments, s.device);
  s.draw = draw_from(arguments);
  s.layers = count_or(arguments, "layers", 1, on_host ? 2 : 36);
  s.scheduler.chunk_tokens = count_or(arguments, "chunk-tokens", 1, on_host ? 128 : 8192);
  s.scheduler.sequences = count_or(arguments, "sequences", 1, on_host ? 8 : 64);
  s.scheduler.slots = count_or(arguments, "slots", 1, on_host ? 4 : 64);
  if (has(arguments, "speed")) s.scheduler.speed = positive_or(arguments, "speed", 1);
  s.scale = positive_or(arguments, "length-scale", on_host ? 0.125 : 1);
  set_prefix_cache(arguments, on_host, s);
  constexpr std::int64_t most_rows = std::numeric_limits<std::int32_t>::max();
  if (s.scheduler.slots > most_rows - s.scheduler.checkpoint_rows) {
    throw UsageError(
        fmt::format("--slots and --checkpoint-rows: expected at most {} together, got {} and {}",
                    most_rows, s.scheduler.slots, s.scheduler.checkpoint_rows));
  }
  s.bounds = bounds_from(arguments, s.problem);
  // From step to step a state is rounded to the pool's type, and outputs come from it.
  s.bounds.o = std::max(s.bounds.o, s.bounds.state);
  const std::int64_t least = count_or(arguments, "least-bucket", 1, on_host ? 64 : 256);
  s.buckets = capacity_ladder({s.scheduler.chunk_tokens, s.scheduler.sequences}, least);
  for (const Capacity& bucket : s.buckets) validate(s.problem, bucket);

  s.trace = text(arguments, "trace");
  s.requests = requests_from(Csv::parse(s.trace, read_file(s.trace)),
                             {count_or(arguments, "requests", 1, on_host ? 20 : 0), s.scale});
  s.checks = std::min(count_or(arguments, "check", 0, 4), std::ssize(s.requests));
  return s;
}

/// What one way to serve the requests came to.
struct Outcome {
  std::string name;
  Json counts;
  std::int64_t steps = 0;
  std::int64_t pieces = 0;
  std::int64_t computed_tokens = 0;
  std::int64_t padded_tokens = 0;
  std::int64_t cached_tokens = 0;
  std::int64_t prefix_hits = 0;  ///< requests with cached tokens
  PrefixCacheCounts prefixes{};
  std::int64_t served = 0;  ///< requests that ended once
  double prepare_ms = 0;
  std::vector<double> step_ms{};
  std::vector<double> request_ms{};  ///< from its first step's begin to its last one's end
  std::vector<double> wait_ms{};     ///< from its arrival to its first step
  std::vector<double> call_us{};     ///< host time of a layer
  std::int64_t checked = 0;
  std::int64_t wrong = 0;
  std::int64_t checked_checkpoints = 0;
  std::int64_t checked_sources = 0;
  double worst_o = 0;
  double worst_state = 0;
  double worst_checkpoint = 0;

  bool right(std::int64_t requests) const { return wrong == 0 && served == requests; }
  double tokens_per_second() const {
    const double ms = std::accumulate(step_ms.begin(), step_ms.end(), 0.0);
    return static_cast<double>(computed_tokens) / (ms * 1e-3);
  }
};

Outcome serve(const Settings& settings, Engine& engine, const TokenTable& table, Server& server,
              Stream stream) {
  Outcome outcome;
  outcome.name = server.name();
  Scheduler scheduler(settings.requests, settings.scheduler);
  Checker checker(engine, table, settings.requests, settings.checks, settings.bounds);
  Stopwatch watch(settings.device);
  Progress progress(static_cast<int>(settings.requests.size()));
  // Nothing of the way before is there to be found: every prefix is computed in this one.
  engine.poison_pools();
  while (!scheduler.done()) {
    const std::span<const Piece> pieces = scheduler.next();
    std::int64_t tokens = 0;
    for (const Piece& piece : pieces) {
      tokens += piece.tokens;
      if (piece.first) progress.step(fmt::format("requests, {}", outcome.name));
    }
    engine.set_step(pieces);
    table.load(engine, pieces);
    std::int64_t planned = 0;
    watch.start(stream);
    for (std::int64_t layer = 0; layer < engine.layers(); ++layer) {
      const PrefillTensors tensors = engine.tensors(layer);
      outcome.call_us.push_back(host_microseconds(
          [&] { planned = server.call(tensors, tokens, std::ssize(pieces), stream); }));
    }
    const double ms = watch.stop(stream);
    checker.after_step(pieces, outcome.name);
    outcome.step_ms.push_back(ms);
    outcome.pieces += std::ssize(pieces);
    outcome.computed_tokens += tokens;
    outcome.padded_tokens += planned - tokens;
    ++outcome.steps;
    scheduler.finish(ms);
  }
  progress.clear();
  for (const Service& service : scheduler.services()) {
    outcome.request_ms.push_back(service.end_ms - service.begin_ms);
    outcome.wait_ms.push_back(service.begin_ms - service.arrival_ms);
    outcome.served += service.times == 1 ? 1 : 0;
    outcome.cached_tokens += service.cached;
    outcome.prefix_hits += service.cached > 0 ? 1 : 0;
  }
  outcome.prefixes = scheduler.prefix_counts();
  outcome.counts = server.counts();
  outcome.checked = checker.checked();
  outcome.wrong = checker.wrong();
  outcome.checked_checkpoints = checker.checked_checkpoints();
  outcome.checked_sources = checker.checked_sources();
  outcome.worst_o = checker.worst_o();
  outcome.worst_state = checker.worst_state();
  outcome.worst_checkpoint = checker.worst_checkpoint();
  return outcome;
}

std::vector<Outcome> serve_all(const Settings& settings, const PrefillOptions& prefill) {
  const Capacity largest{settings.scheduler.chunk_tokens, settings.scheduler.sequences};
  Engine engine(settings.problem, largest, settings.layers, settings.pool_rows(), settings.draw,
                settings.device);
  // Longer than a step and of no length that steps or chunks divide: the next one has other rows.
  const std::int64_t table_rows = 4 * settings.scheduler.chunk_tokens + 61;
  const TokenTable table(engine, settings.requests, table_rows, settings.draw);
  const OwnedStream stream(settings.device);
  std::vector<Outcome> outcomes;
  const auto run = [&](auto&& make) {
    // One at a time, so that one's memory is not in the other's way.
    std::unique_ptr<Server> server;
    const double prepare_us = host_microseconds([&] { server = make(); });
    outcomes.push_back(serve(settings, engine, table, *server, stream.get()));
    outcomes.back().prepare_ms = prepare_us * 1e-3;
  };
  const auto session = [&](bool graphs) {
    return make_session_server(settings.problem, settings.buckets, settings.device,
                               {prefill, graphs}, engine.tensors(0));
  };
  run([&] { return session(true); });
  if (settings.device.type == DeviceType::cuda) run([&] { return session(false); });
  run([&] { return make_shape_server(settings.problem, settings.device, prefill); });
  return outcomes;
}

struct Totals {
  std::int64_t prompt = 0;
  std::int64_t shared = 0;
  std::int64_t sharing = 0;  ///< requests

  explicit Totals(std::span<const Request> requests) {
    for (const Request& request : requests) {
      prompt += request.prompt;
      shared += request.shared;
      sharing += request.shared > 0 ? 1 : 0;
    }
  }
};

Json to_json(const Settings& settings, const std::string& pipeline,
             const std::vector<Outcome>& outcomes) {
  const Totals totals(settings.requests);
  Json buckets = Json::array();
  for (const Capacity& bucket : settings.buckets) buckets.push_back(bucket.max_tokens);
  Json result = {{"trace", settings.trace},
                 {"pipeline", pipeline},
                 {"device", device_name(settings.device)},
                 {"problem", to_string(settings.problem)},
                 {"distribution", to_string(settings.draw.distribution)},
                 {"seed", settings.draw.seed},
                 {"length_scale", settings.scale},
                 {"layers", settings.layers},
                 {"slots", settings.scheduler.slots},
                 {"chunk_tokens", settings.scheduler.chunk_tokens},
                 {"sequences", settings.scheduler.sequences},
                 {"buckets", buckets},
                 {"checkpoint_interval", settings.scheduler.checkpoint_interval},
                 {"checkpoint_rows", settings.scheduler.checkpoint_rows},
                 {"exact_prefix", settings.scheduler.exact_prefix},
                 {"pool_bytes", settings.pool_bytes()},
                 {"requests", settings.requests.size()},
                 {"prompt_tokens", totals.prompt},
                 {"shared_tokens", totals.shared},
                 {"sharing_requests", totals.sharing}};
  if (settings.scheduler.speed) result["speed"] = *settings.scheduler.speed;
  bool right = true;
  Json& ways = result["served_by"] = Json::object();
  for (const Outcome& o : outcomes) {
    right = right && o.right(std::ssize(settings.requests));
    ways[o.name] = {{"steps", o.steps},
                    {"pieces", o.pieces},
                    {"cached_tokens", o.cached_tokens},
                    {"computed_tokens", o.computed_tokens},
                    {"padded_tokens", o.padded_tokens},
                    {"served", o.served},
                    {"tokens_per_second", o.tokens_per_second()},
                    {"prepare_ms", o.prepare_ms},
                    {"step_ms", replay::to_json(percentiles(o.step_ms))},
                    {"request_ms", replay::to_json(percentiles(o.request_ms))},
                    {"wait_ms", replay::to_json(percentiles(o.wait_ms))},
                    {"call_host_us", replay::to_json(percentiles(o.call_us))},
                    {"counts", o.counts},
                    {"prefix_cache",
                     {{"hits", o.prefix_hits},
                      {"misses", totals.sharing - o.prefix_hits},
                      {"checkpoints_written", o.prefixes.written},
                      {"already_there", o.prefixes.present},
                      {"no_row", o.prefixes.no_row},
                      {"evictions", o.prefixes.evictions},
                      {"rows_in_use", o.prefixes.rows_in_use}}},
                    {"checked", o.checked},
                    {"wrong", o.wrong},
                    {"checked_checkpoints", o.checked_checkpoints},
                    {"checked_starts", o.checked_sources},
                    {"worst_o_rel_rms", o.worst_o},
                    {"worst_state_rel_rms", o.worst_state},
                    {"worst_checkpoint_rel_rms", o.worst_checkpoint},
                    {"right", o.right(std::ssize(settings.requests))}};
  }
  result["right"] = right;
  return result;
}

void print(const Settings& settings, const std::string& pipeline,
           const std::vector<Outcome>& outcomes) {
  const Totals totals(settings.requests);
  const SchedulerOptions& options = settings.scheduler;
  const bool keeps_prefixes = options.checkpoint_interval > 0;
  fmt::print("{} on {}\n{}, {} layers, pools of {} slots", pipeline,
             to_string(device_info(settings.device)), to_string(settings.problem), settings.layers,
             options.slots);
  if (keeps_prefixes) {
    fmt::print(" and {} rows for checkpoints every {} tokens{}", options.checkpoint_rows,
               options.checkpoint_interval, options.exact_prefix ? " and where prompts part" : "");
  }
  fmt::print(", {:.4g} MB\n", static_cast<double>(settings.pool_bytes()) * 1e-6);
  fmt::print("{}: {} requests, lengths times {}, {}; steps of at most {} tokens and {} sequences\n",
             settings.trace, settings.requests.size(), settings.scale,
             options.speed ? fmt::format("arriving {} times as fast", *options.speed)
                           : std::string("all waiting"),
             options.chunk_tokens, options.sequences);
  const Outcome& first = outcomes.front();
  fmt::print(
      "prompt tokens {}: {} in {} requests shared with an earlier prompt, {} found cached, {} "
      "computed; padded {} in {} buckets\n",
      totals.prompt, totals.shared, totals.sharing, first.cached_tokens, first.computed_tokens,
      first.padded_tokens, settings.buckets.size());
  for (const Outcome& o : outcomes) {
    fmt::print("{}: {} of {} requests served; ", o.name, o.served, settings.requests.size());
    if (o.checked == 0) {
      fmt::print("none checked against the oracle\n");
    } else {
      fmt::print("{} checked against the oracle", o.checked);
      if (keeps_prefixes) {
        fmt::print(", with {} checkpoints that they wrote and {} that they started from",
                   o.checked_checkpoints, o.checked_sources);
      }
      fmt::print(": {}\n", o.wrong == 0 ? "right" : fmt::format("{} WRONG", o.wrong));
    }
  }
  if (settings.device.type == DeviceType::host) {
    fmt::print("on the host there is no graph and no launch: a call's time is the work itself\n");
  }
  Table latency({"served by", "steps", "tokens/s", "step p50 ms", "p95", "p99", "request p50 ms",
                 "p95", "p99", "wait p50 ms", "p99"},
                1);
  Table cost({"served by", "call p50 us", "p95", "p99", "hits", "captures", "rebinds",
              "workspace bytes", "graph bytes", "prepare ms"},
             1);
  Table prefixes({"served by", "cached tokens", "prefix hits", "misses", "checkpoints written",
                  "already there", "no row", "evictions", "rows in use"},
                 1);
  const auto ms = [](double value) { return fmt::format("{:.3f}", value); };
  const auto us = [](double value) { return fmt::format("{:.1f}", value); };
  for (const Outcome& o : outcomes) {
    const Percentiles step = percentiles(o.step_ms);
    const Percentiles request = percentiles(o.request_ms);
    const Percentiles wait = percentiles(o.wait_ms);
    const Percentiles call = percentiles(o.call_us);
    const auto counted = [&](const char* name) {
      return o.counts.contains(name) ? o.counts.at(name).dump() : std::string();
    };
    latency.add({o.name, fmt::to_string(o.steps), fmt::format("{:.4g}", o.tokens_per_second()),
                 ms(step.p50), ms(step.p95), ms(step.p99), ms(request.p50), ms(request.p95),
                 ms(request.p99), ms(wait.p50), ms(wait.p99)});
    cost.add({o.name, us(call.p50), us(call.p95), us(call.p99), counted("hits"),
              counted("captures"), counted("rebinds"), counted("workspace_bytes"),
              counted("graph_bytes"), us(o.prepare_ms)});
    const PrefixCacheCounts& p = o.prefixes;
    prefixes.add({o.name, fmt::to_string(o.cached_tokens), fmt::to_string(o.prefix_hits),
                  fmt::to_string(totals.sharing - o.prefix_hits), fmt::to_string(p.written),
                  fmt::to_string(p.present), fmt::to_string(p.no_row), fmt::to_string(p.evictions),
                  fmt::to_string(p.rows_in_use)});
  }
  fmt::print("\n{}\n{}", latency.str(), cost.str());
  if (keeps_prefixes) fmt::print("\n{}", prefixes.str());
}

/// Shares of steps and of requests that took no longer, by time.
std::string latency_script(const Settings& settings, const std::vector<Outcome>& outcomes) {
  struct Panel {
    const char* name;
    std::vector<double> Outcome::*samples;
  };
  const Panel panels[] = {{"step", &Outcome::step_ms}, {"request", &Outcome::request_ms}};
  std::string script;
  for (const Panel& panel : panels) {
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
      std::vector<double> sorted = outcomes[i].*panel.samples;
      std::sort(sorted.begin(), sorted.end());
      script += fmt::format("${}{} << EOD\n", panel.name, i);
      // A point a thousandth at most: a plot is no wider.
      const std::size_t stride = std::max<std::size_t>(sorted.size() / 1000, 1);
      for (std::size_t at = 0; at < sorted.size(); at += stride) {
        script +=
            fmt::format("{:.6g} {:.4f}\n", sorted[at],
                        100.0 * static_cast<double>(at + 1) / static_cast<double>(sorted.size()));
      }
      script += fmt::format("{:.6g} 100\nEOD\n", sorted.back());
    }
  }
  script += fmt::format(
      "set terminal svg size 800,700 noenhanced background rgb 'white'\n"
      "set multiplot layout 2,1 title {}\n"
      "set logscale x\nset yrange [0:100]\nset grid\nset key right bottom\n",
      quoted(settings.trace + ", " + to_string(settings.problem)));
  for (const Panel& panel : panels) {
    script += fmt::format("set xlabel {}\nset ylabel '% of them'\nplot ",
                          quoted(fmt::format("time of a {}, ms", panel.name)));
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
      script += fmt::format("{}${}{} using 1:2 with steps linewidth 2 title {}", i == 0 ? "" : ", ",
                            panel.name, i, quoted(outcomes[i].name));
    }
    script += '\n';
  }
  return script + "unset multiplot\n";
}

}  // namespace

int run_trace(const po::variables_map& arguments) {
  const Settings settings = settings_from(arguments);
  check_files_apart(arguments, {"costs", "trace"}, {"json", "svg"});
  const std::optional<OutputTarget> json = json_target_from(arguments);
  if (has(arguments, "svg")) check_replaceable(text(arguments, "svg"));
  use_device(settings.device);
  const PrefillOptions prefill = prefill_options_from(
      arguments, settings.problem, settings.buckets.back(), device_info(settings.device));

  const std::vector<Outcome> outcomes = serve_all(settings, prefill);
  const Json result = to_json(settings, prefill.recipe, outcomes);
  if (json) json->write(result.dump(2));
  if (!json || !json->is_stdout()) print(settings, prefill.recipe, outcomes);
  if (has(arguments, "svg")) {
    const std::string& path = text(arguments, "svg");
    if (const Support drawn = draw(latency_script(settings, outcomes), path); !drawn) {
      std::fflush(stdout);
      fmt::print(stderr, "gdnflow-replay: no plot: {}; the other outputs are written\n",
                 drawn.reason);
    }
  }
  return result.at("right").get<bool>() ? exit_success : exit_wrong_result;
}

}  // namespace gdnflow::apps::replay
