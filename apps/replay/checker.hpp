#pragma once

#include "common/reference.hpp"
#include "common/tensors.hpp"
#include "replay/engine.hpp"
#include "replay/token_table.hpp"

#include <cstdint>
#include <map>
#include <span>
#include <string>

namespace gdnflow::apps::replay {

/// Compares chosen requests with the fp64 oracle, which computes the whole of their prompts from
/// the table of tokens, a cached prefix as well: the state that a request starts from, every
/// checkpoint that it writes and the state behind each of its pieces as soon as the step has run,
/// and the outputs when the prompt is done. So a state that was lost, mixed up, of another prefix
/// or touched between two steps shows.
class Checker {
 public:
  Checker(const Engine& engine, const TokenTable& tokens, std::span<const Request> requests,
          std::int64_t checks, const Bounds& bounds);

  bool is_chosen(std::size_t request) const;
  /// Behind a step: takes what belongs to chosen requests. Waits. `who` names what ran it.
  void after_step(std::span<const Piece> pieces, const std::string& who);

  std::int64_t checked() const { return checked_; }  ///< requests
  std::int64_t wrong() const { return wrong_; }
  std::int64_t checked_checkpoints() const { return checked_checkpoints_; }  ///< written
  std::int64_t checked_sources() const { return checked_sources_; }          ///< read
  double worst_o() const { return worst_o_; }
  double worst_state() const { return worst_state_; }
  double worst_checkpoint() const { return worst_checkpoint_; }  ///< written or read

 private:
  /// A chosen request that is not done.
  struct Followed {
    std::int64_t cached;  ///< tokens
    RunningReference expected;
    OwnedTensor o;
    std::string first_wrong{};
    std::int64_t more_wrong = 0;
  };

  std::int64_t layer_of(std::size_t request) const;
  Followed& follow(const Piece& piece);
  void advance(std::size_t request, Followed& followed, std::int64_t tokens) const;
  void follow_states(const Piece& piece, Followed& followed);
  void finish(const Piece& piece, Followed& followed, const std::string& who);
  double compare_state(const char* what, std::size_t request, std::int32_t row,
                       Followed& followed) const;

  const Engine& engine_;
  const TokenTable& tokens_;
  std::span<const Request> requests_;
  std::int64_t checks_;
  Bounds bounds_;
  std::map<std::size_t, Followed> followed_;
  std::int64_t checked_ = 0;
  std::int64_t wrong_ = 0;
  std::int64_t checked_checkpoints_ = 0;
  std::int64_t checked_sources_ = 0;
  double worst_o_ = 0;
  double worst_state_ = 0;
  double worst_checkpoint_ = 0;
};

}  // namespace gdnflow::apps::replay
