#pragma once

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
  std::int32_t slot = 0;  ///< where its state is
  bool first = false;     ///< the slot holds another request's state, if any
  bool last = false;      ///< the prompt ends with it
};

/// When a request was served, on the scheduler's clock.
struct Service {
  double arrival_ms = 0;
  double begin_ms = 0;  ///< of its first step
  double end_ms = 0;    ///< of its last one
  int times = 0;        ///< that it ended; more or less than once is a mistake
};

struct SchedulerOptions {
  std::int64_t chunk_tokens = 0;  ///< most of a step
  std::int64_t sequences = 0;     ///< most of a step
  std::int64_t slots = 0;
  std::optional<double>
      speed{};  ///< requests arrive that many times as fast; nothing: all are there
};

/// Chunked prefill: steps of at most a budget of tokens, shared by requests in order of arrival; a
/// prompt that does not fit goes on in the next step. A request holds a slot from its first step to
/// its last; the slot used last is given away first. The clock is virtual: it moves by what steps
/// took, and to the next arrival where nothing is to be done. Knows no device.
class Scheduler {
 public:
  Scheduler(std::span<const Request> requests, const SchedulerOptions& options);

  bool done() const { return active_.empty() && next_ == requests_.size(); }
  /// The pieces of the next step, at least one. Not when done.
  std::span<const Piece> next();
  /// The step has taken this long.
  void finish(double ms);

  std::span<const Service> services() const { return services_; }

 private:
  struct Active {
    std::size_t request;
    std::int64_t done;
    std::int32_t slot;
  };

  double arrival(std::size_t request) const;
  void add_piece(Active& active, std::int64_t budget);

  std::span<const Request> requests_;
  SchedulerOptions options_;
  std::vector<Service> services_;
  std::deque<Active> active_;
  std::vector<std::int32_t> free_slots_;
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;  ///< request that has not begun
  double clock_ms_ = 0;
};

}  // namespace gdnflow::apps::replay
