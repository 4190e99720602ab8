#include "replay/checker.hpp"

#include "replay/settings.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps::replay {
namespace {

/// The first finding is shown, the others are counted.
template <class Finding>
void note(std::string& first, std::int64_t& more, Finding&& finding) {
  if (first.empty()) {
    first = finding();
  } else {
    ++more;
  }
}

}  // namespace

Checker::Checker(const Engine& engine, const TokenTable& tokens, std::span<const Request> requests,
                 std::int64_t checks, const Bounds& bounds)
    : engine_(engine), tokens_(tokens), requests_(requests), checks_(checks), bounds_(bounds) {}

bool Checker::is_chosen(std::size_t request) const {
  return replay::is_chosen(static_cast<std::int64_t>(request), checks_, std::ssize(requests_));
}

// One of the last two, whose activations no later layer of the step has overwritten.
std::int64_t Checker::layer_of(std::size_t request) const {
  const std::int64_t layers = engine_.layers();
  return layers - 1 - static_cast<std::int64_t>(request) % std::min<std::int64_t>(layers, 2);
}

void Checker::after_step(std::span<const Piece> pieces, const std::string& who) {
  std::int64_t row = 0;
  for (const Piece& piece : pieces) {
    if (is_chosen(piece.request)) {
      Followed& followed = follow(piece);
      const TensorView& o = engine_.activation(layer_of(piece.request), "o");
      copy_tensor(rows_of(o, row, piece.tokens),
                  rows_of(followed.o.view, piece.before - followed.cached, piece.tokens), nullptr);
      synchronize(engine_.device());
      follow_states(piece, followed);
      if (piece.last) finish(piece, followed, who);
    }
    row += piece.tokens;
  }
}

Checker::Followed& Checker::follow(const Piece& piece) {
  if (!piece.first) return followed_.at(piece.request);
  const std::int64_t prompt = requests_[piece.request].prompt;
  const TensorView& all = engine_.activation(0, "o");
  std::vector<std::int64_t> extents(all.extents.begin(), all.extents.begin() + all.rank);
  extents.front() = prompt - piece.before;
  Followed followed{piece.before, RunningReference(engine_.problem(), prompt, engine_.device()),
                    make_tensor(all.device, all.dtype, extents)};
  advance(piece.request, followed, piece.before);
  return followed_.insert_or_assign(piece.request, std::move(followed)).first->second;
}

/// To so many tokens of the prompt.
void Checker::advance(std::size_t request, Followed& followed, std::int64_t tokens) const {
  const std::int64_t layer = layer_of(request);
  for (const TokenTable::Rows& rows : tokens_.rows(request, followed.expected.tokens(), tokens)) {
    const auto input = [&](const char* name) {
      return rows_of(tokens_.view(layer, name), rows.first, rows.count);
    };
    followed.expected.advance({input("q"), input("k"), input("v"), input("g"), input("beta")});
  }
}

double Checker::compare_state(const char* what, std::size_t request, std::int32_t row,
                              Followed& followed) const {
  const Comparison state = followed.expected.state(engine_.state(layer_of(request), row));
  if (!state.within(bounds_.state)) {
    note(followed.first_wrong, followed.more_wrong, [&] {
      return fmt::format("{} behind token {}: {}", what, followed.expected.tokens(),
                         to_string(state));
    });
  }
  return for_report(state).relative_rms;
}

// What it read no sequence of the step wrote, and what it wrote no later one has.
void Checker::follow_states(const Piece& piece, Followed& followed) {
  if (piece.source) {
    ++checked_sources_;
    worst_checkpoint_ = worse(worst_checkpoint_, compare_state("the prefix's state", piece.request,
                                                               *piece.source, followed));
  }
  const std::int64_t interval = engine_.problem().checkpoint_interval;
  for (const std::int32_t row : piece.checkpoints) {
    const std::int64_t done = followed.expected.tokens();
    advance(piece.request, followed, (done / interval + 1) * interval);
    if (row < 0) continue;
    ++checked_checkpoints_;
    worst_checkpoint_ =
        worse(worst_checkpoint_, compare_state("the checkpoint", piece.request, row, followed));
  }
  advance(piece.request, followed, piece.before + piece.tokens);
  worst_state_ =
      worse(worst_state_, compare_state("the state", piece.request, piece.row_written(), followed));
}

void Checker::finish(const Piece& piece, Followed& followed, const std::string& who) {
  const Comparison o = followed.expected.o(followed.cached, followed.o.view);
  ++checked_;
  worst_o_ = worse(worst_o_, for_report(o).relative_rms);
  if (!o.within(bounds_.o)) {
    const std::int64_t computed = requests_[piece.request].prompt - followed.cached;
    note(followed.first_wrong, followed.more_wrong, [&] {
      return "o: " + to_string(o, std::vector<std::int64_t>{0, computed});
    });
  }
  if (!followed.first_wrong.empty()) {
    ++wrong_;
    std::fflush(stdout);
    fmt::print(stderr,
               "gdnflow-replay: {}: request {} of {} tokens behind {} cached ones, layer {}: {}; "
               "{} more comparisons wrong\n",
               who, piece.request, requests_[piece.request].prompt - followed.cached,
               followed.cached, layer_of(piece.request), followed.first_wrong, followed.more_wrong);
  }
  followed_.erase(piece.request);
}

}  // namespace gdnflow::apps::replay
