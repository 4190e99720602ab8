// Random batches for a given time, two at once on two streams, each through a session's graphs and
// buckets, and once more kernel by kernel on tensors that end where the batch does: the same bits,
// in every row and every slot. Now and then a sequence is compared with the oracle, and memory is
// looked at. A batch is drawn from the seed and its number, and pools are drawn anew every so many
// batches, so that a failure comes again without all that was before.

#include <gdnflow/gdnflow.hpp>

#include "common/arguments.hpp"
#include "common/output.hpp"
#include "common/progress.hpp"
#include "common/reference.hpp"
#include "replay/engine.hpp"
#include "replay/settings.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps::replay {
namespace {

constexpr std::int64_t lanes = 2;
constexpr std::int64_t batches_an_epoch = 32;  ///< between two drawings of the pools
constexpr std::int64_t most_shift = 64;        ///< rows that a batch begins behind its buffers
constexpr std::int64_t oracle_every = 8;       ///< batches
constexpr std::int64_t most_oracle_tokens = 4096;

struct Settings {
  Device device{};
  Problem problem;
  double seconds = 0;
  std::int64_t start = 0;
  std::int64_t most_tokens = 0;  ///< of a sequence
  std::int64_t slots = 0;
  Capacity capacity;
  Bounds bounds;
  Draw draw;
};

Settings settings_from(const po::variables_map& arguments) {
  Settings s;
  s.device = device_from(arguments);
  const bool on_host = s.device.type == DeviceType::host;
  s.problem = engine_problem_from(arguments, s.device);
  s.seconds = arguments["soak"].as<double>();
  if (!(s.seconds > 0)) {
    throw UsageError(fmt::format("--soak: expected a number above 0, got {}", s.seconds));
  }
  s.start = count_or(arguments, "start-batch", 0, 0);
  s.start -= s.start % batches_an_epoch;
  s.most_tokens = count_or(arguments, "most-tokens", 1, on_host ? 300 : 40000);
  s.slots = count_or(arguments, "slots", 1, on_host ? 8 : 32);
  s.capacity = {s.most_tokens + s.most_tokens / 2, count_or(arguments, "sequences", 1, 16)};
  s.bounds = bounds_from(arguments, s.problem);
  s.draw = draw_from(arguments);
  validate(s.problem, s.capacity);
  return s;
}

/// A batch by its number.
struct Batch {
  std::int64_t number = 0;
  std::vector<Piece> pieces;
  std::int64_t tokens = 0;
  std::int64_t shift = 0;
  std::optional<std::size_t> checked{};  ///< the piece that the oracle sees
};

Batch draw_batch(const Settings& settings, std::int64_t number) {
  std::seed_seq sequence{settings.draw.seed, static_cast<std::uint64_t>(number)};
  std::mt19937_64 random(sequence);
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
  };
  Batch batch;
  batch.number = number;
  batch.shift = below(most_shift);
  std::vector<std::int32_t> slots(static_cast<std::size_t>(settings.slots));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  const std::int64_t count = below(settings.capacity.max_sequences + 1);
  for (std::int64_t n = 0; n < count; ++n) {
    Piece piece;
    // Empty ones, those around one chunk, and any length, short ones as likely as long ones.
    const std::int64_t kind = below(5);
    const auto most = static_cast<double>(settings.most_tokens);
    const double part = static_cast<double>(below(1 << 20)) / (1 << 20);
    if (kind == 1) piece.tokens = below(130);
    if (kind > 1) piece.tokens = std::llround(std::pow(most, part));
    piece.tokens =
        std::min({piece.tokens, settings.most_tokens, settings.capacity.max_tokens - batch.tokens});
    piece.before = below(4) == 0 ? 0 : below(1000);
    piece.first = below(3) == 0;  // starts from zero, whatever its slot holds
    piece.slot = n < settings.slots && below(8) != 0 ? slots[static_cast<std::size_t>(n)] : -1;
    batch.tokens += piece.tokens;
    batch.pieces.push_back(piece);
  }
  if (number % oracle_every == 0) {
    for (std::size_t n = 0; n < batch.pieces.size(); ++n) {
      const Piece& piece = batch.pieces[n];
      if (piece.slot >= 0 && piece.tokens > 0 && piece.tokens <= most_oracle_tokens) {
        batch.checked = n;
      }
    }
  }
  return batch;
}

/// The tensors behind a batch's shift.
PrefillTensors shifted(PrefillTensors t, std::int64_t shift) {
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.g, &t.beta, &t.o}) {
    *view = rows_of(*view, shift, view->extents[0] - shift);
  }
  return t;
}

/// The same with the batch's rows alone.
PrefillTensors exact(PrefillTensors t, std::int64_t tokens, std::int64_t sequences) {
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.g, &t.beta, &t.o}) {
    *view = first_rows(*view, tokens);
  }
  for (TensorView* view : {&t.prefix_lens, &t.state_indices, &t.has_initial_state}) {
    *view = first_rows(*view, sequences);
  }
  t.cu_seqlens = first_rows(t.cu_seqlens, sequences + 1);
  return t;
}

/// One stream with a session, and what its results are compared with.
class Lane {
 public:
  Lane(const Settings& settings, const PrefillOptions& prefill, const Draw& draw)
      : settings_(settings),
        tested_(settings.problem, buffers(settings), 1, settings.slots, draw, settings.device),
        expected_(settings.problem, buffers(settings), 1, settings.slots, draw, settings.device),
        session_(settings.problem, buckets(settings), settings.device, {prefill, true}),
        eager_(settings.problem, buckets(settings), settings.device, {prefill, false}),
        stream_(settings.device),
        initial_(make_tensor(settings.device, settings.problem.state,
                             state_extents(settings.problem, 1))) {
    session_.prepare(tested_.tensors(0));
    eager_.prepare(expected_.tensors(0));
  }

  void begin_epoch(std::uint64_t seed) const {
    for (const Engine* engine : {&tested_, &expected_}) {
      engine->draw_pools(seed);
      const TensorView& o = engine->activation(0, "o");
      fill_bytes(o.data, o.device, 0xff, o.bytes());
    }
  }

  /// Enqueues the batch on this lane's stream.
  void start(const Batch& batch) {
    batch_ = batch;
    tested_.set_step(batch_.pieces);
    expected_.set_step(batch_.pieces);
    if (batch_.checked) {
      const Piece& piece = batch_.pieces[*batch_.checked];
      if (piece.first) {
        fill_bytes(initial_.view.data, settings_.device, 0, initial_.view.bytes());
      } else {
        copy_tensor(tested_.state(0, piece.slot), initial_.view, nullptr);
        synchronize(settings_.device);
      }
    }
    session_.run(shifted(tested_.tensors(0), batch_.shift), batch_.tokens,
                 std::ssize(batch_.pieces), stream_.get());
  }

  /// Waits, runs the batch kernel by kernel and compares. What is wrong; empty: nothing.
  std::string finish() {
    synchronize(settings_.device, stream_.get());
    const std::int64_t sequences = std::ssize(batch_.pieces);
    eager_.run(exact(shifted(expected_.tensors(0), batch_.shift), batch_.tokens, sequences),
               batch_.tokens, sequences, stream_.get());
    synchronize(settings_.device, stream_.get());
    std::string wrong = difference("o", tested_.activation(0, "o"), expected_.activation(0, "o"));
    wrong += difference("pool", tested_.tensors(0).final_state, expected_.tensors(0).final_state);
    if (batch_.checked) wrong += against_oracle(*batch_.checked);
    return wrong;
  }

  SessionStats stats() const { return session_.stats(); }
  std::int64_t checked() const { return checked_; }

 private:
  static Capacity buffers(const Settings& settings) {
    return {settings.capacity.max_tokens + most_shift, settings.capacity.max_sequences};
  }
  static std::vector<Capacity> buckets(const Settings& settings) {
    return capacity_ladder(settings.capacity, 256, 4);
  }

  std::string difference(const char* name, const TensorView& got, const TensorView& want) const {
    const Comparison c = settings_.device.type == DeviceType::host ? compare(got, want)
                                                                   : compare_on_device(got, want);
    if (c.max_abs == 0 && c.nonfinite_mismatches == 0) return {};
    return fmt::format("{} differs from what kernel by kernel gives: {}; ", name, to_string(c));
  }

  std::string against_oracle(std::size_t number) {
    std::int64_t row = batch_.shift;
    for (std::size_t n = 0; n < number; ++n) row += batch_.pieces[n].tokens;
    const Piece& piece = batch_.pieces[number];
    const auto rows = [&](const char* name) {
      return rows_of(tested_.activation(0, name), row, piece.tokens);
    };
    const OracleInputs inputs{rows("q"),    rows("k"),     rows("v"),        rows("g"),
                              rows("beta"), initial_.view, {0, piece.tokens}};
    const Reference reference(settings_.problem, inputs);
    const Comparison o = reference.o(rows("o"));
    const Comparison state = reference.final_state(tested_.state(0, piece.slot));
    ++checked_;
    if (o.within(settings_.bounds.o) && state.within(settings_.bounds.state)) return {};
    return fmt::format("sequence {}: o: {}; final state: {}; ", number,
                       to_string(o, inputs.cu_seqlens), to_string(state));
  }

  const Settings& settings_;
  Engine tested_;
  Engine expected_;
  PrefillSession session_;
  PrefillSession eager_;
  OwnedStream stream_;
  OwnedTensor initial_;
  Batch batch_;
  std::int64_t checked_ = 0;
};

/// Whether memory has grown since this was made.
class MemoryWatch {
 public:
  explicit MemoryWatch(Device device)
      : device_(device), resident_(resident_bytes()), free_(free_bytes()) {}

  /// What has grown; empty: nothing beyond what allocators keep back.
  std::string look() const {
    constexpr std::int64_t slack = std::int64_t{256} << 20;
    const std::int64_t host = resident_bytes() - resident_;
    const std::int64_t device = free_ - free_bytes();
    if (host > slack) return fmt::format("host memory grew by {} bytes; ", host);
    if (device > slack) return fmt::format("GPU memory grew by {} bytes; ", device);
    return {};
  }

 private:
  std::int64_t free_bytes() const {
    return device_.type == DeviceType::cuda ? free_memory(device_) : 0;
  }

  Device device_;
  std::int64_t resident_;
  std::int64_t free_;
};

/// What a soak came to.
struct Outcome {
  std::int64_t batches = 0;
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  std::string wrong{};  ///< of the first batch that was; empty: none
  std::int64_t wrong_batch = 0;
};

Outcome soak(const Settings& settings, std::array<std::unique_ptr<Lane>, lanes>& running) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  Outcome outcome;
  const MemoryWatch memory(settings.device);
  Progress progress(static_cast<int>(std::ceil(settings.seconds)));
  double shown = 0;
  for (std::int64_t number = settings.start; outcome.batches == 0 || seconds() < settings.seconds;
       number += lanes) {
    if (seconds() >= shown) {
      progress.step(fmt::format("seconds, {} batches", outcome.batches));
      ++shown;
    }
    if (number % batches_an_epoch == 0) {
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        running[static_cast<std::size_t>(lane)]->begin_epoch(
            settings.draw.seed + static_cast<std::uint64_t>(number + lane));
      }
      outcome.wrong = memory.look();
      outcome.wrong_batch = number;
      if (!outcome.wrong.empty()) break;
    }
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const Batch batch = draw_batch(settings, number + lane);
      running[static_cast<std::size_t>(lane)]->start(batch);
      outcome.tokens += batch.tokens;
      outcome.sequences += std::ssize(batch.pieces);
    }
    for (std::int64_t lane = 0; lane < lanes && outcome.wrong.empty(); ++lane) {
      outcome.wrong = running[static_cast<std::size_t>(lane)]->finish();
      outcome.wrong_batch = number + lane;
      ++outcome.batches;
    }
    if (!outcome.wrong.empty()) break;
  }
  progress.clear();
  return outcome;
}

}  // namespace

int run_soak(const po::variables_map& arguments) {
  const Settings settings = settings_from(arguments);
  check_files_apart(arguments, {"costs"}, {"json"});
  const std::optional<OutputTarget> json = json_target_from(arguments);
  use_device(settings.device);
  const PrefillOptions prefill = prefill_options_from(
      arguments, settings.problem, settings.capacity, device_info(settings.device));
  std::array<std::unique_ptr<Lane>, lanes> running;
  for (std::size_t lane = 0; lane < running.size(); ++lane) {
    running[lane] = std::make_unique<Lane>(settings, prefill, settings.draw.next(lane));
  }

  const Outcome outcome = soak(settings, running);
  const bool right = outcome.wrong.empty();
  std::int64_t checked = 0;
  std::uint64_t captures = 0;
  for (const std::unique_ptr<Lane>& lane : running) {
    checked += lane->checked();
    captures += lane->stats().captures;
  }
  const Json result = {{"pipeline", prefill.recipe},
                       {"device", device_name(settings.device)},
                       {"problem", to_string(settings.problem)},
                       {"distribution", to_string(settings.draw.distribution)},
                       {"seed", settings.draw.seed},
                       {"first_batch", settings.start},
                       {"batches", outcome.batches},
                       {"sequences", outcome.sequences},
                       {"tokens", outcome.tokens},
                       {"checked", checked},
                       {"captures", captures},
                       {"right", right}};
  if (json) json->write(result.dump(2));
  if (!json || !json->is_stdout()) {
    fmt::print(
        "{} on {}\n{}\n{} batches from number {} with seed {}: {} sequences, {} tokens; every "
        "one compared with launching kernel by kernel, {} sequences with the oracle: {}\n",
        prefill.recipe, to_string(device_info(settings.device)), to_string(settings.problem),
        outcome.batches, settings.start, settings.draw.seed, outcome.sequences, outcome.tokens,
        checked, right ? "right" : "WRONG");
  }
  if (right) return exit_success;
  std::fflush(stdout);
  fmt::print(stderr,
             "gdnflow-replay: batch {}: {}again with the same options and --seed {} --start-batch "
             "{}\n",
             outcome.wrong_batch, outcome.wrong, settings.draw.seed, outcome.wrong_batch);
  return exit_wrong_result;
}

}  // namespace gdnflow::apps::replay
