#include "replay/token_table.hpp"

#include <algorithm>
#include <random>

namespace gdnflow::apps::replay {

TokenTable::TokenTable(const Engine& engine, std::span<const Request> requests, std::int64_t rows,
                       const Draw& draw)
    : requests_(requests) {
  for (std::int64_t set = 0; set < engine.sets(); ++set) {
    tables_.push_back(
        make_activations(engine.problem(), {rows, 1}, draw.next(set), engine.device()));
    tables_.back().tensors.erase("o");
  }
  std::mt19937_64 random(draw.seed);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    starts_.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows)));
  }
}

void TokenTable::load(const Engine& engine, std::span<const Piece> pieces) const {
  std::int64_t to = 0;
  for (const Piece& piece : pieces) {
    for (const Rows& from : rows(piece.request, piece.before, piece.before + piece.tokens)) {
      for (std::int64_t set = 0; set < engine.sets(); ++set) {
        for (const char* name : {"q", "k", "v", "g", "beta"}) {
          copy_tensor(rows_of(view(set, name), from.first, from.count),
                      rows_of(engine.activation(set, name), to, from.count), nullptr);
        }
      }
      to += from.count;
    }
  }
  synchronize(engine.device());
}

std::vector<TokenTable::Rows> TokenTable::rows(std::size_t request, std::int64_t begin,
                                               std::int64_t end) const {
  const std::int64_t all = tables_.front().capacity.max_tokens;
  std::vector<Rows> found;
  for (const Run& run : runs_of(requests_, request, begin, end)) {
    for (std::int64_t token = run.begin; token < run.end; token += found.back().count) {
      const std::int64_t first = (starts_[run.owner] + token) % all;
      found.push_back({first, std::min(run.end - token, all - first)});
    }
  }
  return found;
}

const TensorView& TokenTable::view(std::int64_t layer, std::string_view name) const {
  return tables_[static_cast<std::size_t>(layer) % tables_.size()].view(name);
}

}  // namespace gdnflow::apps::replay
