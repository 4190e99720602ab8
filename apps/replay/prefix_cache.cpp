#include "replay/prefix_cache.hpp"

#include <algorithm>

namespace gdnflow::apps::replay {

PrefixCache::PrefixCache(std::int32_t first_row, std::int64_t rows) {
  for (std::int64_t row = rows; row-- > 0;) {
    free_rows_.push_back(first_row + static_cast<std::int32_t>(row));
  }
}

std::optional<std::int32_t> PrefixCache::acquire(const PrefixKey& prefix) {
  const auto found = by_prefix_.find(prefix);
  if (found == by_prefix_.end() || !found->second->ready) return {};
  entries_.splice(entries_.begin(), entries_, found->second);
  ++found->second->readers;
  return found->second->row;
}

void PrefixCache::release(const PrefixKey& prefix) { --by_prefix_.at(prefix)->readers; }

std::optional<std::int32_t> PrefixCache::reserve(const PrefixKey& prefix, Hold hold) {
  if (by_prefix_.contains(prefix)) {
    ++counts_.present;
    return {};
  }
  const std::optional<std::int32_t> row = take_row();
  if (!row) {
    ++counts_.no_row;
    return {};
  }
  entries_.push_front({prefix, *row, hold == Hold::yes ? 1 : 0});
  by_prefix_[prefix] = entries_.begin();
  reserved_.push_back(prefix);
  ++counts_.written;
  counts_.rows_in_use = std::ssize(entries_);
  return row;
}

void PrefixCache::commit() {
  for (const PrefixKey& prefix : reserved_) by_prefix_.at(prefix)->ready = true;
  reserved_.clear();
}

std::optional<std::int32_t> PrefixCache::take_row() {
  if (!free_rows_.empty()) {
    const std::int32_t row = free_rows_.back();
    free_rows_.pop_back();
    return row;
  }
  const auto last = std::find_if(entries_.rbegin(), entries_.rend(), [](const Entry& entry) {
    return entry.ready && entry.readers == 0;
  });
  if (last == entries_.rend()) return {};
  const std::int32_t row = last->row;
  by_prefix_.erase(last->prefix);
  entries_.erase(std::next(last).base());
  ++counts_.evictions;
  return row;
}

}  // namespace gdnflow::apps::replay
