#include "replay/scheduler.hpp"

#include <algorithm>

namespace gdnflow::apps::replay {

Scheduler::Scheduler(std::span<const Request> requests, const SchedulerOptions& options)
    : requests_(requests), options_(options), services_(requests.size()) {
  for (std::size_t i = 0; i < requests.size(); ++i) services_[i].arrival_ms = arrival(i);
  for (std::int64_t slot = options.slots; slot-- > 0;) {
    free_slots_.push_back(static_cast<std::int32_t>(slot));
  }
}

double Scheduler::arrival(std::size_t request) const {
  return options_.speed ? requests_[request].arrival_ms / *options_.speed : 0.0;
}

void Scheduler::add_piece(Active& active, std::int64_t budget) {
  const Request& request = requests_[active.request];
  Piece piece;
  piece.request = active.request;
  piece.before = request.cached + active.done;
  piece.tokens = std::min(request.computed() - active.done, budget);
  piece.slot = active.slot;
  piece.first = active.done == 0;
  active.done += piece.tokens;
  piece.last = active.done == request.computed();
  pieces_.push_back(piece);
}

std::span<const Piece> Scheduler::next() {
  pieces_.clear();
  if (active_.empty()) clock_ms_ = std::max(clock_ms_, arrival(next_));
  std::int64_t budget = options_.chunk_tokens;
  const auto has_room = [&] { return budget > 0 && std::ssize(pieces_) < options_.sequences; };
  for (Active& active : active_) {
    if (!has_room()) break;
    add_piece(active, budget);
    budget -= pieces_.back().tokens;
  }
  while (has_room() && !free_slots_.empty() && next_ < requests_.size() &&
         arrival(next_) <= clock_ms_) {
    active_.push_back({next_, 0, free_slots_.back()});
    free_slots_.pop_back();
    services_[next_].begin_ms = clock_ms_;
    ++next_;
    add_piece(active_.back(), budget);
    budget -= pieces_.back().tokens;
  }
  return pieces_;
}

void Scheduler::finish(double ms) {
  clock_ms_ += ms;
  for (const Piece& piece : pieces_) {
    if (!piece.last) continue;
    services_[piece.request].end_ms = clock_ms_;
    ++services_[piece.request].times;
    free_slots_.push_back(piece.slot);
  }
  std::erase_if(active_, [&](const Active& active) {
    return active.done == requests_[active.request].computed();
  });
}

}  // namespace gdnflow::apps::replay
