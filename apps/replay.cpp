// gdnflow-replay: what a serving loop sees, with random batches or with the requests of a trace.

#include "common/arguments.hpp"
#include "common/program.hpp"
#include "replay/settings.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow::apps::replay {
namespace {

void describe(po::options_description& options) {
  add_device_option(options);
  add_pipeline_option(options);
  add_variant_option(options);
  const auto count = [] { return po::value<std::int64_t>()->value_name("N"); };
  options.add_options()(
      "heads", po::value<std::string>()->value_name("QK,V"),
      "query/key heads and value heads; default: 2,4 on the host, 16,64 on a GPU")(
      "head-dim", po::value<std::int64_t>()->default_value(128)->value_name("D"), "head dim");
  add_problem_options(options);
  options.add_options()("distribution",
                        po::value<std::string>()->default_value("random_decay")->value_name("NAME"),
                        "distribution of the inputs, as gdnflow-ablate has it")(
      "seed", po::value<std::uint64_t>()->default_value(1)->value_name("N"),
      "of lengths, inputs and states")(
      "sequences", count(),
      "most sequences of a batch; default: 8, of a soak 16, of a trace on a GPU 64")(
      "check", count(),
      "batches, or requests of a trace, evenly spread, that are compared with the fp64 oracle; 0: "
      "none; default: 4")("bound", po::value<double>()->value_name("X"),
                          "relative RMS error above which a checked result is wrong; default: by "
                          "type")(
      "json", po::value<std::string>()->implicit_value("-", "stdout")->value_name("FILE"),
      "print the result as JSON, or write it to a file");
  options.add_options()("tokens", count(),
                        "random batches: most tokens; default: 256 on the host, 8192 on a GPU")(
      "initial-state", po::bool_switch(), "random batches: sequences start from given states")(
      "batches", count(), "random batches: how many; default: 20 on the host, 500 on a GPU")(
      "buffers", count(), "random batches: sets of tensors, rebound in turn; default: 2");
  options.add_options()(
      "trace", po::value<std::string>()->value_name("FILE"),
      "serve the requests of a CSV file with the columns arrival_ms, prompt_tokens, output_tokens "
      "and cached_tokens")("requests", count(),
                           "the first N of them; default: 20 on the host, all on a GPU")(
      "length-scale", po::value<double>()->value_name("X"),
      "lengths times X, at least a token; default: 0.125 on the host, 1 on a GPU")(
      "speed", po::value<double>()->value_name("X"),
      "requests arrive X times as fast as in the trace, by a clock that runs with the steps; "
      "default: all wait already")(
      "chunk-tokens", count(), "most tokens of a step; default: 128 on the host, 8192 on a GPU")(
      "least-bucket", count(),
      "tokens of the smallest bucket, doubled up to --chunk-tokens; default: 64 on the host, 256 "
      "on a GPU")("layers", count(), "layers of a step; default: 2 on the host, 36 on a GPU")(
      "slots", count(), "of the pool of states; default: 4 on the host, 64 on a GPU")(
      "checkpoint-interval", count(),
      "keep the state of every prompt at multiples of N tokens, themselves a multiple of 64, for "
      "prompts that begin alike; 0: never; default: 64 on the host, 512 on a GPU")(
      "checkpoint-rows", count(),
      "more rows of the pool, for those states; the one used longest ago makes room; default: 32 "
      "on the host, 64 on a GPU")("exact-prefix", po::bool_switch(),
                                  "keep the state also where prompts part, wherever that is")(
      "svg", po::value<std::string>()->value_name("FILE"),
      "write a plot of the latencies (with gnuplot)");
  options.add_options()("soak", po::value<double>()->value_name("SECONDS"),
                        "random batches on two streams, every one compared with launching kernel "
                        "by kernel, for this long")("start-batch", count(),
                                                    "the batch to begin with; default: 0")(
      "most-tokens", count(),
      "tokens of the longest sequence; default: 300 on the host, 40000 on a GPU");
  options.add_options()(
      "host-cost", po::bool_switch(),
      "measure the host's time a call: replayed, rebound, launched, captured; and a "
      "bucket that a batch hardly fills");
}

/// A way to use the program, and the options that only it takes.
struct Mode {
  std::string_view option;  ///< that asks for it; "": none does
  int (*run)(const po::variables_map& arguments);
  std::vector<std::string_view> takes;
};

const std::array<Mode, 4>& modes() {
  static const std::array<Mode, 4> all{
      {{"trace",
        run_trace,
        {"requests", "length-scale", "speed", "chunk-tokens", "least-bucket", "layers", "slots",
         "checkpoint-interval", "checkpoint-rows", "exact-prefix", "svg", "sequences", "check",
         "bound"}},
       {"soak", run_soak, {"start-batch", "most-tokens", "slots", "sequences", "bound"}},
       {"host-cost", run_host_cost, {"tokens", "sequences"}},
       {"",
        run_batches,
        {"tokens", "initial-state", "batches", "buffers", "sequences", "check", "bound"}}}};
  return all;
}

bool is_given(const po::variables_map& arguments, std::string_view option) {
  const po::variable_value& value = arguments[std::string(option)];
  return !value.empty() && !value.defaulted();
}

int run(const po::variables_map& arguments) {
  const Mode* chosen = &modes().back();
  for (const Mode& mode : modes()) {
    if (mode.option.empty() || !is_given(arguments, mode.option)) continue;
    if (!chosen->option.empty()) {
      throw UsageError(fmt::format("--{}: expected it without --{}", mode.option, chosen->option));
    }
    chosen = &mode;
  }
  // An option that would be ignored is a misunderstanding.
  for (const Mode& mode : modes()) {
    for (const std::string_view option : mode.takes) {
      const auto& taken = chosen->takes;
      if (!is_given(arguments, option) ||
          std::find(taken.begin(), taken.end(), option) != taken.end()) {
        continue;
      }
      throw UsageError(fmt::format("--{}: expected it {}{}, got it {}{}", option,
                                   mode.option.empty() ? "with " : "with --",
                                   mode.option.empty() ? "random batches" : mode.option,
                                   chosen->option.empty() ? "with " : "with --",
                                   chosen->option.empty() ? "random batches" : chosen->option));
    }
  }
  return chosen->run(arguments);
}

}  // namespace
}  // namespace gdnflow::apps::replay

int main(int argc, char** argv) {
  using namespace gdnflow::apps;
  return run_program(
      {"gdnflow-replay",
       "Does what a serving loop does. Random batches within one capacity, replayed by one\n"
       "executable, on a GPU a captured graph beside launching kernel by kernel; or, with "
       "--trace,\n"
       "the requests of a trace in chunks that share steps, through a session's buckets, layer by\n"
       "layer, with their states in a pool, where prompts that begin alike find them again. "
       "--soak\n"
       "looks for what differs, --host-cost for what a call costs the host. Decode steps are not\n"
       "run: a slot is free when its prompt is done.",
       "  gdnflow-replay\n"
       "  gdnflow-replay --heads 16,64 --tokens 8192 --sequences 16 --batches 1000\n"
       "  gdnflow-replay --device host --initial-state --check 20 --json\n"
       "  gdnflow-replay --trace apps/traces/conversation.csv --check 20 --svg latency.svg\n"
       "  gdnflow-replay --trace apps/traces/code.csv --speed 50 --layers 48\n"
       "  gdnflow-replay --trace apps/traces/conversation.csv --checkpoint-interval 2048 "
       "--exact-prefix\n"
       "  gdnflow-replay --soak 180 --seed 7\n"
       "  gdnflow-replay --host-cost --heads 4,16",
       replay::describe, replay::run},
      argc, argv);
}
