#pragma once

#include <gdnflow/problem.hpp>

#include "common/tensors.hpp"
#include "replay/engine.hpp"
#include "replay/requests.hpp"
#include "replay/scheduler.hpp"
#include "replay/settings.hpp"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace gdnflow::apps::replay {

/// What the tokens of prompts are to a layer: rows of q, k, v, g and beta. A request's own tokens
/// are a walk through the table, round and round, from a row drawn for it; so a token has the same
/// rows in whatever prompt, step and place it is computed, as an engine's has that computes it
/// from its text.
class TokenTable {
 public:
  /// For the layers of an engine, whose sets of activations it has a table each for.
  TokenTable(const Engine& engine, std::span<const Request> requests, std::int64_t rows,
             const Draw& draw);

  /// The tokens of a step's pieces into every set of the engine's activations. Waits.
  void load(const Engine& engine, std::span<const Piece> pieces) const;

  /// Rows of the table that follow each other.
  struct Rows {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  /// Where tokens [begin, end) of a prompt are, in order.
  std::vector<Rows> rows(std::size_t request, std::int64_t begin, std::int64_t end) const;
  /// A layer's table of q, k, v, g or beta.
  const TensorView& view(std::int64_t layer, std::string_view name) const;

 private:
  std::span<const Request> requests_;
  std::vector<Workload> tables_;
  std::vector<std::int64_t> starts_;  ///< of the requests' walks
};

}  // namespace gdnflow::apps::replay
