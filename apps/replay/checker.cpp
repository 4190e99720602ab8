#include "replay/checker.hpp"

#include "replay/settings.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps::replay {

Checker::Checker(const Engine& engine, std::span<const Request> requests, std::int64_t checks,
                 const Bounds& bounds)
    : engine_(engine), requests_(requests), checks_(checks), bounds_(bounds) {}

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
      keep(piece, row);
      if (piece.last) compare(piece, who);
    }
    row += piece.tokens;
  }
}

void Checker::keep(const Piece& piece, std::int64_t row) {
  Kept& kept = kept_[piece.request];
  const std::int64_t layer = layer_of(piece.request);
  for (const char* name : {"q", "k", "v", "g", "beta", "o"}) {
    const TensorView& all = engine_.activation(layer, name);
    OwnedTensor& rows = kept.rows[name];
    if (rows.view.rank == 0) {
      std::vector<std::int64_t> extents(all.extents.begin(), all.extents.begin() + all.rank);
      extents.front() = requests_[piece.request].computed();
      rows = make_tensor(all.device, all.dtype, extents);
    }
    copy_tensor(rows_of(all, row, piece.tokens), rows_of(rows.view, kept.done, piece.tokens),
                nullptr);
  }
  synchronize(engine_.device());
  kept.done += piece.tokens;
}

void Checker::compare(const Piece& piece, const std::string& who) {
  const auto found = kept_.find(piece.request);
  const TensorMap& rows = found->second.rows;
  const Request& request = requests_[piece.request];
  const std::int64_t layer = layer_of(piece.request);
  const OwnedTensor initial =
      make_tensor(engine_.device(), engine_.problem().state, state_extents(engine_.problem(), 1));
  engine_.draw_prefix_state(request, layer, initial.view);
  OracleInputs inputs;
  inputs.q = rows.find("q")->second.view;
  inputs.k = rows.find("k")->second.view;
  inputs.v = rows.find("v")->second.view;
  inputs.g = rows.find("g")->second.view;
  inputs.beta = rows.find("beta")->second.view;
  inputs.initial_state = initial.view;
  inputs.cu_seqlens = {0, request.computed()};
  const Reference reference(engine_.problem(), inputs);
  const Comparison o = reference.o(rows.find("o")->second.view);
  const Comparison state = reference.final_state(engine_.state(layer, piece.slot));
  ++checked_;
  worst_o_ = worse(worst_o_, for_report(o).relative_rms);
  worst_state_ = worse(worst_state_, for_report(state).relative_rms);
  if (!o.within(bounds_.o) || !state.within(bounds_.state)) {
    ++wrong_;
    std::fflush(stdout);
    fmt::print(stderr,
               "gdnflow-replay: {}: request {} of {} tokens behind {} cached ones, layer {}: o: "
               "{}; final state: {}\n",
               who, piece.request, request.computed(), request.cached, layer,
               to_string(o, inputs.cu_seqlens), to_string(state));
  }
  kept_.erase(found);
}

}  // namespace gdnflow::apps::replay
