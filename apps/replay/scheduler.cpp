#include "replay/scheduler.hpp"

#include <algorithm>
#include <utility>

namespace gdnflow::apps::replay {

Scheduler::Scheduler(std::span<const Request> requests, const SchedulerOptions& options)
    : requests_(requests),
      options_(options),
      cache_(static_cast<std::int32_t>(options.slots), options.checkpoint_rows),
      services_(requests.size()) {
  for (std::size_t i = 0; i < requests.size(); ++i) services_[i].arrival_ms = arrival(i);
  for (std::int64_t slot = options.slots; slot-- > 0;) {
    free_slots_.push_back(static_cast<std::int32_t>(slot));
  }
}

double Scheduler::arrival(std::size_t request) const {
  return options_.speed ? requests_[request].arrival_ms / *options_.speed : 0.0;
}

PrefixKey Scheduler::prefix(std::size_t request, std::int64_t tokens) const {
  return {owner_of(requests_, request, tokens - 1), tokens};
}

void Scheduler::begin_behind_prefix(Active& active) {
  const std::int64_t interval = options_.checkpoint_interval;
  if (interval == 0) return;
  // Nobody had more of this prompt before than what is shared.
  const std::int64_t shared = requests_[active.request].shared;
  std::int64_t tokens = options_.exact_prefix ? shared : shared - shared % interval;
  while (tokens > 0) {
    const PrefixKey found = prefix(active.request, tokens);
    if (const std::optional<std::int32_t> row = cache_.acquire(found)) {
      active.source = {found, *row};
      active.done = services_[active.request].cached = tokens;
      return;
    }
    tokens = (tokens - 1) / interval * interval;
  }
}

// Those at multiples of the interval are kept as the piece goes over them; for a state in between
// it has to end there. The state goes to the prefix's row alone, and the next piece starts from it.
void Scheduler::end_where_prompts_part(Active& active, Piece& piece) {
  const std::int64_t shared = requests_[active.request].shared;
  if (!options_.exact_prefix || shared % options_.checkpoint_interval == 0) return;
  if (shared <= piece.before || shared > piece.before + piece.tokens) return;
  const PrefixKey parting = prefix(active.request, shared);
  const std::optional<std::int32_t> row = cache_.reserve(parting, PrefixCache::Hold::yes);
  if (!row) return;
  piece.tokens = shared - piece.before;
  piece.target = *row;
  active.source = {parting, *row};
}

void Scheduler::add_piece(Active& active, std::int64_t budget) {
  const Request& request = requests_[active.request];
  Piece piece;
  piece.request = active.request;
  piece.before = active.done;
  piece.tokens = std::min(request.prompt - active.done, budget);
  piece.slot = active.slot;
  piece.first = !std::exchange(active.begun, true);
  if (active.source) {
    piece.source = active.source->row;
    read_.push_back(active.source->prefix);
    active.source.reset();
  }
  end_where_prompts_part(active, piece);
  active.done += piece.tokens;
  piece.last = active.done == request.prompt;
  if (const std::int64_t interval = options_.checkpoint_interval; interval > 0) {
    for (std::int64_t tokens = (piece.before / interval + 1) * interval; tokens <= active.done;
         tokens += interval) {
      piece.checkpoints.push_back(
          cache_.reserve(prefix(active.request, tokens)).value_or(std::int32_t{-1}));
    }
  }
  pieces_.push_back(std::move(piece));
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
    begin_behind_prefix(active_.back());
    services_[next_].begin_ms = clock_ms_;
    ++next_;
    add_piece(active_.back(), budget);
    budget -= pieces_.back().tokens;
  }
  return pieces_;
}

void Scheduler::finish(double ms) {
  clock_ms_ += ms;
  for (const PrefixKey& prefix : read_) cache_.release(prefix);
  read_.clear();
  cache_.commit();
  for (const Piece& piece : pieces_) {
    if (!piece.last) continue;
    services_[piece.request].end_ms = clock_ms_;
    ++services_[piece.request].times;
    free_slots_.push_back(piece.slot);
  }
  std::erase_if(active_, [&](const Active& active) {
    return active.done == requests_[active.request].prompt;
  });
}

}  // namespace gdnflow::apps::replay
