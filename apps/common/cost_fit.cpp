#include "common/cost_fit.hpp"

#include <gdnflow/error.hpp>

#include "common/csv.hpp"
#include "common/table.hpp"
#include "common/variations.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <Eigen/Dense>
#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

enum Term : std::uint8_t { launch, round, step, crowded_step, work, traffic, segments };
using Terms = std::vector<Term>;

/// A form's share that is known without measuring: how its blocks and steps are cut.
struct Layout {
  std::string_view pipeline;
  std::int32_t columns;
  std::int32_t step_tokens;
  bool whole;               ///< its front is not the others', or it has none
  bool spread;              ///< a part of it spreads over all chunks at once
  bool cut;                 ///< sequences of few heads were cut where the rows were measured,
  std::int32_t shares = 0;  ///< but blocks of as many columns stayed and took equal shares
};
constexpr std::array<Layout, 6> layouts{{
    {"naive", 32, 64, true, true, false},
    {"residual", 32, 64, false, true, false},
    {"fused-64", 64, 64, false, false, false},
    {"register-state", 128, 64, false, false, true},
    {"one-pass", 64, 64, true, false, true, 128},
    {"recurrent", 16, 1, true, true, false},
}};

constexpr std::int32_t most_resident = 4;
constexpr std::size_t least_rows = 6;
/// A second block a multiprocessor must explain the rows better by this much to be believed.
constexpr double better = 0.98;

/// What `auto` sets of a row's options: nothing where they hold anything else.
std::optional<std::int32_t> value_tile_of(const std::string& options) {
  constexpr std::array<std::string_view, 2> prefixes{"fused_prefill:value_tile=",
                                                     "one_pass:value_tile="};
  const auto* const prefix =
      std::find_if(prefixes.begin(), prefixes.end(),
                   [&](std::string_view text) { return options.starts_with(text); });
  if (prefix == prefixes.end()) return std::nullopt;
  const char* const end = options.data() + options.size();
  std::int32_t tile = 0;
  const auto parsed = std::from_chars(options.data() + prefix->size(), end, tile);
  if (parsed.ec != std::errc{} || parsed.ptr != end || tile <= 0) return std::nullopt;
  return tile;
}

struct Group {
  CostForm form;
  bool spread = false;
  std::vector<const CostRow*> rows;  ///< with equal lengths, which the model stands for
  std::vector<const CostRow*> all;
};

/// Rows by form, in the order in which the forms appear.
std::vector<Group> groups_of(const std::vector<CostRow>& rows) {
  std::set<std::string> tiled;
  for (const CostRow& row : rows) {
    if (value_tile_of(row.options)) tiled.insert(row.pipeline);
  }
  std::vector<Group> groups;
  for (const CostRow& row : rows) {
    const std::optional<std::int32_t> tile = value_tile_of(row.options);
    if (!tile && (!row.options.empty() || tiled.contains(row.pipeline))) continue;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.form.pipeline == row.pipeline && g.form.options == row.options;
    });
    if (group == groups.end()) {
      Group fresh;
      fresh.form.pipeline = row.pipeline;
      fresh.form.options = row.options;
      const auto* const layout = std::find_if(layouts.begin(), layouts.end(), [&](const Layout& l) {
        return l.pipeline == row.pipeline;
      });
      if (layout != layouts.end()) {
        fresh.form.columns = layout->columns;
        fresh.form.step_tokens = layout->step_tokens;
        fresh.form.whole = layout->whole;
        fresh.form.cut = layout->cut;
        fresh.spread = layout->spread;
      }
      if (tile) fresh.form.columns = *tile;
      if (layout != layouts.end() && fresh.form.columns == layout->shares) {
        fresh.form.cut = false;
        fresh.form.shares = true;
      }
      groups.push_back(std::move(fresh));
      group = groups.end() - 1;
    }
    if (!group->form.whole && !row.core_ms) continue;
    group->all.push_back(&row);
    if (row.equal_lengths()) group->rows.push_back(&row);
  }
  std::erase_if(groups, [](const Group& group) { return group.rows.size() < least_rows; });
  return groups;
}

struct Fit {
  CostFactors us{};
  double rms = 0;
  double worst = 0;
};

/// Least squares of sum / measured - 1 with factors of at least 0: the best of all subsets of the
/// terms whose own solution is not negative. `terms` holds a row of terms a measurement, `ms` the
/// measurements.
Fit fit(const std::vector<CostFactors>& terms, const std::vector<double>& ms, const Terms& used) {
  const auto rows = static_cast<Eigen::Index>(terms.size());
  std::optional<Fit> best;
  for (unsigned subset = 1; subset < (1U << used.size()); ++subset) {
    Terms chosen;
    for (std::size_t i = 0; i < used.size(); ++i) {
      if ((subset >> i & 1U) != 0) chosen.push_back(used[i]);
    }
    Eigen::MatrixXd a(rows, static_cast<Eigen::Index>(chosen.size()));
    for (Eigen::Index r = 0; r < rows; ++r) {
      const auto i = static_cast<std::size_t>(r);
      for (Eigen::Index c = 0; c < a.cols(); ++c) {
        a(r, c) = terms[i][chosen[static_cast<std::size_t>(c)]] / (1e3 * ms[i]);
      }
    }
    // Columns of one size, so that the rank does not hang on units.
    const Eigen::VectorXd size = a.colwise().norm();
    if (size.minCoeff() <= 0) continue;
    const Eigen::MatrixXd scaled = a * size.cwiseInverse().asDiagonal();
    Eigen::ColPivHouseholderQR<Eigen::MatrixXd> qr(scaled);
    qr.setThreshold(1e-9);
    if (qr.rank() < a.cols()) continue;
    const Eigen::VectorXd solved = qr.solve(Eigen::VectorXd::Ones(rows)).cwiseQuotient(size);
    if (solved.minCoeff() < 0) continue;
    const Eigen::VectorXd residual = a * solved - Eigen::VectorXd::Ones(rows);
    Fit found;
    for (Eigen::Index c = 0; c < a.cols(); ++c) {
      found.us[chosen[static_cast<std::size_t>(c)]] = solved(c);
    }
    found.rms = std::sqrt(residual.squaredNorm() / static_cast<double>(rows));
    found.worst = residual.cwiseAbs().maxCoeff();
    // Of two that are as good, the one found first, so that nothing hangs on the last digit.
    if (!best || found.rms < best->rms * (1 - 1e-6)) best = found;
  }
  if (!best) {
    throw Error(ErrorCode::invalid_argument, "costs: no factors of at least 0 fit the rows");
  }
  return *best;
}

void take(CostForm& form, const Fit& found, std::size_t rows) {
  form.us = found.us;
  form.rms = found.rms;
  form.worst = found.worst;
  form.rows = static_cast<std::int32_t>(rows);
}

/// The part of a GPU that a row was measured on.
DeviceInfo device_of(const CostRow& row) {
  DeviceInfo device;
  device.device = {DeviceType::cuda, 0};
  device.name = row.gpu;
  device.multiprocessors = row.multiprocessors;
  return device;
}

/// Whether a form cuts the sequences of a row.
bool is_cut(const CostForm& form, const CostRow& row) {
  return form.cut &&
         useful_segments(row.problem(), row.multiprocessors) > row.capacity().max_sequences;
}

/// What of a row's forward time is the form's own, in ms. Not the time of its core: where sequences
/// are cut, a part of the core runs beside the front.
double own_ms(const CostForm& form, const CostTable& table, const CostRow& row) {
  if (form.whole) return row.forward_ms;
  // A form that takes no time leaves the front's.
  const double us = predicted_us(table, {}, row.problem(), row.capacity(), device_of(row));
  constexpr double least_share = 0.2;
  return std::max(row.forward_ms - us / 1e3, least_share * row.forward_ms);
}

void fit_group(Group& group, const CostTable& table) {
  CostForm& form = group.form;
  std::int64_t least = group.rows.front()->lengths.front();
  for (const CostRow* row : group.rows) least = std::min(least, row->lengths.front());
  std::vector<double> ms;
  for (const CostRow* row : group.rows) {
    ms.push_back(own_ms(form, table, *row));
  }
  std::optional<Fit> best;
  CostForm trial = form;
  for (trial.resident = 1; trial.resident <= most_resident; ++trial.resident) {
    std::vector<CostFactors> terms;
    for (const CostRow* row : group.rows) {
      terms.push_back(terms_of(trial, row->problem(), row->capacity(), row->multiprocessors));
    }
    // `round` before `launch`: where every row has one round, what is fixed is paid a round.
    Terms used{round, launch, step};
    if (trial.resident > 1) used.push_back(crowded_step);
    used.push_back(group.spread ? work : traffic);
    if (trial.cut) used.push_back(segments);
    const Fit found = fit(terms, ms, used);
    if (!best || found.rms < best->rms * better) {
      best = found;
      form.resident = trial.resident;
    }
  }
  take(form, *best, group.rows.size());
  form.least_tokens = least;
}

/// What stands before the core: the difference of the two times.
CostForm fit_front(const std::vector<Group>& groups) {
  CostForm front;
  std::vector<CostFactors> terms;
  std::vector<double> ms;
  for (const Group& group : groups) {
    for (const CostRow* row : group.rows) {
      if (group.form.whole || row->forward_ms <= *row->core_ms) continue;
      if (is_cut(group.form, *row)) continue;
      terms.push_back(terms_of(front, row->problem(), row->capacity(), row->multiprocessors));
      ms.push_back(row->forward_ms - *row->core_ms);
    }
  }
  if (ms.size() < least_rows) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("costs: expected at least {} rows with a core, got {}", least_rows, ms.size()));
  }
  take(front, fit(terms, ms, {launch, work}), ms.size());
  return front;
}

/// The rows beside the fit; repeated measurements by their geometric mean. Other lengths within a
/// capacity, which a choice cannot tell from equal ones, count together half as much as these,
/// which it assumes.
std::vector<CostPoint> points_of(const Group& group, const CostTable& table) {
  struct Logs {
    double sum = 0;
    int count = 0;
  };
  struct Entry {
    Logs equal;
    Logs unequal;
  };
  using Key = std::tuple<std::int64_t, std::int64_t, std::int32_t, std::int32_t, std::int32_t>;
  std::map<Key, Entry> entries;
  for (const CostRow* row : group.all) {
    const Problem problem = row->problem();
    const Capacity capacity = row->capacity();
    const double us = predicted_us(table, group.form, problem, capacity, device_of(*row));
    const std::int64_t tokens =
        (capacity.max_tokens + capacity.max_sequences - 1) / capacity.max_sequences;
    Entry& entry = entries[{tokens, capacity.max_sequences, problem.qk_heads, problem.v_heads,
                            row->multiprocessors}];
    Logs& logs = row->equal_lengths() ? entry.equal : entry.unequal;
    logs.sum += std::log(1e3 * row->forward_ms / us);
    ++logs.count;
  }
  std::vector<CostPoint> points;
  for (const auto& [key, entry] : entries) {
    const auto& [tokens, sequences, qk_heads, v_heads, multiprocessors] = key;
    double sum = 0;
    double weights = 0;
    for (const auto& [logs, weight] :
         {std::pair{entry.equal, 2.0}, std::pair{entry.unequal, 1.0}}) {
      if (logs.count == 0) continue;
      sum += weight * logs.sum / logs.count;
      weights += weight;
    }
    points.push_back(
        {tokens, sequences, qk_heads, v_heads, multiprocessors, std::exp(sum / weights)});
  }
  return points;
}

/// How far choices among the forms measured are from the best one, over some cases, and how often a
/// form that was not measured would be chosen.
struct Regret {
  int cases = 0;
  int within = 0;  ///< 5 %
  int unmeasured = 0;
  double worst = 0;
  std::string where = "none";

  void add(double excess, bool measured, const std::string& what) {
    ++cases;
    if (excess <= 0.05) ++within;
    if (!measured) ++unmeasured;
    if (excess > worst) {
      worst = excess;
      where = what;
    }
  }
  std::string text(std::string_view lengths) const {
    return fmt::format(
        "{} lengths: {} cases, the choice among the forms measured within 5 % of the best on {}, "
        "at "
        "worst {:.1f} % ({}); on {} the choice among all forms is one that was not measured\n",
        lengths, cases, within, 100 * worst, where, unmeasured);
  }
};

/// The times of a form on a case; repeated measurements count by their mean.
struct Measured {
  double sum = 0;
  int count = 0;

  double mean() const { return sum / count; }
};

struct MeasuredCase {
  const CostRow* row = nullptr;  ///< any of them
  std::map<std::string, Measured> forms;
};

std::string describe_choices(const CostTable& table, const std::vector<CostRow>& rows) {
  std::map<std::string, MeasuredCase> cases;
  for (const CostRow& row : rows) {
    if (table.find(row.pipeline, row.options) == nullptr) continue;
    MeasuredCase& measured =
        cases[fmt::format("{} on {} multiprocessors", row.case_name(), row.multiprocessors)];
    measured.row = &row;
    Measured& times = measured.forms[variation_label(row.pipeline, row.options)];
    times.sum += row.forward_ms;
    ++times.count;
  }
  Regret equal;
  Regret unequal;
  for (const auto& [name, measured] : cases) {
    if (measured.forms.size() < 2) continue;
    const CostRow& row = *measured.row;
    const DeviceInfo device = device_of(row);
    constexpr double never = std::numeric_limits<double>::infinity();
    double best = never;    // ms, measured
    double chosen = never;  // ms, measured
    double least = never;   // us, predicted, of those measured
    double least_of_all = never;
    for (const CostForm& form : table.forms) {
      const double us = predicted_us(table, form, row.problem(), row.capacity(), device);
      least_of_all = std::min(least_of_all, us);
      const auto times = measured.forms.find(variation_label(form.pipeline, form.options));
      if (times == measured.forms.end()) continue;
      best = std::min(best, times->second.mean());
      if (us < least) {
        least = us;
        chosen = times->second.mean();
      }
    }
    (row.equal_lengths() ? equal : unequal).add(chosen / best - 1, least <= least_of_all, name);
  }
  return equal.text("equal") + unequal.text("unequal");
}

}  // namespace

CostTable fit_costs(const std::vector<CostRow>& rows) {
  if (rows.empty()) throw Error(ErrorCode::invalid_argument, "costs: expected rows, got none");
  CostTable table;
  table.gpu = rows.front().gpu;
  table.capability = rows.front().capability;
  for (const CostRow& row : rows) {
    if (row.gpu != table.gpu || row.capability != table.capability) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("costs: expected rows of one GPU, got '{}' and '{}'", table.gpu, row.gpu));
    }
    table.multiprocessors = std::max(table.multiprocessors, row.multiprocessors);
  }
  std::vector<Group> groups = groups_of(rows);
  table.front = fit_front(groups);
  for (Group& group : groups) {
    fit_group(group, table);
    group.form.points = points_of(group, table);
    table.forms.push_back(group.form);
  }
  return table;
}

std::string describe_fit(const CostTable& table, const std::vector<CostRow>& rows) {
  std::vector<std::string> header{"form", "rows", "rms %", "worst %", "blocks"};
  for (const std::string_view term : cost_terms) header.push_back(fmt::format("{} us", term));
  Table lines(header, 1);
  const auto add = [&](const CostForm& form, const std::string& name) {
    std::vector<std::string> cells{
        name, fmt::to_string(form.rows), fmt::format("{:.1f}", 100 * form.rms),
        fmt::format("{:.1f}", 100 * form.worst), fmt::to_string(form.resident)};
    for (const double us : form.us) cells.push_back(us > 0 ? fmt::format("{:.4g}", us) : "-");
    lines.add(std::move(cells));
  };
  for (const CostForm& form : table.forms) add(form, variation_label(form.pipeline, form.options));
  add(table.front, "front of the others");
  return fmt::format("{}, sm_{}, {} multiprocessors\n{}\n{}", table.gpu, table.capability,
                     table.multiprocessors, lines.str(), describe_choices(table, rows));
}

}  // namespace gdnflow::apps
