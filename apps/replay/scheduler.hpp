#pragma once

#include "replay/prefix_cache.hpp"
#include "replay/requests.hpp"

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace gdnflow::apps::replay {

/// A request's part in a step.
struct Piece {
  std::size_t request = 0;
  std::int64_t before = 0;  ///< tokens of the prompt in front of it, cached ones included
  std::int64_t tokens = 0;
  std::int32_t slot = 0;                    ///< where its state is, and goes
  bool first = false;                       ///< the slot holds another request's state, if any
  bool last = false;                        ///< the prompt ends with it
  std::optional<std::int32_t> source{};     ///< a prefix's row that it starts from instead
  std::optional<std::int32_t> target{};     ///< a prefix's row that its state goes to instead
  std::vector<std::int32_t> checkpoints{};  ///< rows for the states at multiples of the interval
                                            ///< that it passes, in order; -1: not kept

  std::int32_t row_written() const { return target.value_or(slot); }
};

/// When a request was served, on the scheduler's clock.
struct Service {
  double arrival_ms = 0;
  double begin_ms = 0;      ///< of its first step
  double end_ms = 0;        ///< of its last one
  int times = 0;            ///< that it ended; more or less than once is a mistake
  std::int64_t cached = 0;  ///< tokens that its first step found the state behind
};

struct SchedulerOptions {
  std::int64_t chunk_tokens = 0;  ///< most of a step
  std::int64_t sequences = 0;     ///< most of a step
  std::int64_t slots = 0;         ///< the pool's first rows
  std::optional<double>
      speed{};  ///< requests arrive that many times as fast; nothing: all are there
  std::int64_t checkpoint_interval = 0;  ///< tokens; 0: no prefix is kept
  std::int64_t checkpoint_rows = 0;      ///< the pool's rows behind the slots
  bool exact_prefix = false;             ///< prefixes are also kept where prompts part
};

/// Chunked prefill: steps of at most a budget of tokens, shared by requests in order of arrival; a
/// prompt that does not fit goes on in the next step. A request holds a slot from its first step to
/// its last; the slot used last is given away first. The clock is virtual: it moves by what steps
/// took, and to the next arrival where nothing is to be done.
///
/// Every step leaves states at multiples of the interval in the prefix cache, and a request begins
/// behind the longest of its prefixes that an earlier step left there. With `exact_prefix` the
/// first request that shares tokens up to a place between them ends a piece there and leaves that
/// state, too. Knows no device.
class Scheduler {
 public:
  Scheduler(std::span<const Request> requests, const SchedulerOptions& options);

  bool done() const { return active_.empty() && next_ == requests_.size(); }
  /// The pieces of the next step, at least one. Not when done.
  std::span<const Piece> next();
  /// The step has taken this long.
  void finish(double ms);

  std::span<const Service> services() const { return services_; }
  const PrefixCacheCounts& prefix_counts() const { return cache_.counts(); }

 private:
  /// A prefix's row that is held for a piece to come.
  struct Source {
    PrefixKey prefix;
    std::int32_t row;
  };
  struct Active {
    std::size_t request;
    std::int64_t done;  ///< tokens of the prompt, cached ones included
    std::int32_t slot;
    std::optional<Source> source{};
    bool begun = false;
  };

  double arrival(std::size_t request) const;
  PrefixKey prefix(std::size_t request, std::int64_t tokens) const;
  void begin_behind_prefix(Active& active);
  void end_where_prompts_part(Active& active, Piece& piece);
  void add_piece(Active& active, std::int64_t budget);

  std::span<const Request> requests_;
  SchedulerOptions options_;
  PrefixCache cache_;
  std::vector<Service> services_;
  std::deque<Active> active_;
  std::vector<std::int32_t> free_slots_;
  std::vector<Piece> pieces_;
  std::vector<PrefixKey> read_;  ///< in this step
  std::size_t next_ = 0;         ///< request that has not begun
  double clock_ms_ = 0;
};

}  // namespace gdnflow::apps::replay
