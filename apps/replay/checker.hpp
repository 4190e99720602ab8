#pragma once

#include "common/reference.hpp"
#include "common/tensors.hpp"
#include "replay/engine.hpp"

#include <cstdint>
#include <map>
#include <span>
#include <string>

namespace gdnflow::apps::replay {

/// Compares chosen requests, whole, with the fp64 oracle: keeps the inputs and outputs of their
/// pieces step by step, and looks when a prompt is done. So a state that was lost, mixed up or
/// touched between two steps shows.
class Checker {
 public:
  Checker(const Engine& engine, std::span<const Request> requests, std::int64_t checks,
          const Bounds& bounds);

  bool is_chosen(std::size_t request) const;
  /// Behind a step: takes what belongs to chosen requests. Waits. `who` names what ran it.
  void after_step(std::span<const Piece> pieces, const std::string& who);

  std::int64_t checked() const { return checked_; }
  std::int64_t wrong() const { return wrong_; }
  double worst_o() const { return worst_o_; }
  double worst_state() const { return worst_state_; }

 private:
  struct Kept {
    TensorMap rows;
    std::int64_t done = 0;
  };

  std::int64_t layer_of(std::size_t request) const;
  void keep(const Piece& piece, std::int64_t row);
  void compare(const Piece& piece, const std::string& who);

  const Engine& engine_;
  std::span<const Request> requests_;
  std::int64_t checks_;
  Bounds bounds_;
  std::map<std::size_t, Kept> kept_;
  std::int64_t checked_ = 0;
  std::int64_t wrong_ = 0;
  double worst_o_ = 0;
  double worst_state_ = 0;
};

}  // namespace gdnflow::apps::replay
