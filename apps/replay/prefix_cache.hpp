#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

namespace gdnflow::apps::replay {

/// A prefix of prompts. Who was the first to bring its last token says what stands in front of that
/// token, so that with the length it is one text.
struct PrefixKey {
  std::size_t owner = 0;  ///< a request
  std::int64_t tokens = 0;

  friend bool operator<(const PrefixKey& a, const PrefixKey& b) {
    return std::tie(a.owner, a.tokens) < std::tie(b.owner, b.tokens);
  }
};

struct PrefixCacheCounts {
  std::int64_t written = 0;    ///< rows given to be written
  std::int64_t present = 0;    ///< asked for where the prefix had a row
  std::int64_t no_row = 0;     ///< asked for where every row was being read or written
  std::int64_t evictions = 0;  ///< prefixes that lost their row to another
  std::int64_t rows_in_use = 0;
};

/// Which prefixes have their state in which rows of the pool; where there is none left, the row
/// used longest ago is taken. A row that is read or written in a step belongs to nobody else in it:
/// what a call reads and writes comes in no order. Knows no device.
class PrefixCache {
 public:
  /// Rows `first_row` and behind.
  PrefixCache(std::int32_t first_row, std::int64_t rows);

  /// The row of a prefix to be read, which stays until `release`; nothing where there is none, or
  /// none yet.
  std::optional<std::int32_t> acquire(const PrefixKey& prefix);
  void release(const PrefixKey& prefix);
  /// Whether a row to be written is to be read by who has it written, and stays until `release`.
  enum class Hold : bool { no, yes };
  /// A row for a prefix to be written in the step; nothing where it has one, or none can be had.
  std::optional<std::int32_t> reserve(const PrefixKey& prefix, Hold hold = Hold::no);
  /// The step has run: what was to be written can be read.
  void commit();

  const PrefixCacheCounts& counts() const { return counts_; }

 private:
  struct Entry {
    PrefixKey prefix;
    std::int32_t row = 0;
    int readers = 0;
    bool ready = false;
  };
  using Entries = std::list<Entry>;

  std::optional<std::int32_t> take_row();

  Entries entries_;  ///< those used last in front
  std::map<PrefixKey, Entries::iterator> by_prefix_;
  std::vector<std::int32_t> free_rows_;
  std::vector<PrefixKey> reserved_;  ///< in this step
  PrefixCacheCounts counts_;
};

}  // namespace gdnflow::apps::replay
