#include "common/cases.hpp"

#include <gdnflow/error.hpp>

#include "common/arguments.hpp"
#include "common/builtin_cases.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

constexpr std::int64_t most_sequences = 1 << 20;
constexpr std::int64_t most_tokens = std::numeric_limits<std::int32_t>::max() - chunk_tokens;

[[noreturn]] void refuse(const Csv& csv, const Csv::Row& row, const std::string& what) {
  throw Error(ErrorCode::format, fmt::format("{}:{}: {}", csv.name, row.line, what));
}

void check_size(const Csv& csv, const Csv::Row& row, const Case& c) {
  if (c.v_heads % c.qk_heads != 0) {
    refuse(csv, row,
           fmt::format("v_heads: expected a multiple of qk_heads ({}), got {}", c.qk_heads,
                       c.v_heads));
  }
  if (c.tokens() > most_tokens) {
    refuse(csv, row, fmt::format("expected at most {} tokens, got {}", most_tokens, c.tokens()));
  }
}

std::int32_t heads_at(const Csv& csv, const Csv::Row& row, std::string_view column) {
  constexpr std::int64_t most = 1 << 20;
  const std::int64_t heads = csv.integer(row, column, 1);
  if (heads > most) {
    refuse(csv, row, fmt::format("{}: expected at most {}, got {}", column, most, heads));
  }
  return static_cast<std::int32_t>(heads);
}

Case dense_case(const Csv& csv, const Csv::Row& row) {
  Case c;
  c.name = csv.at(row, "name");
  c.qk_heads = heads_at(csv, row, "qk_heads");
  c.v_heads = heads_at(csv, row, "v_heads");
  c.initial_state = csv.integer(row, "initial_state", 0) != 0;
  const std::string& gate = csv.at(row, "gate");
  const auto distribution = parse_distribution(gate);
  if (!distribution) refuse(csv, row, fmt::format("gate: expected a distribution, got '{}'", gate));
  c.distribution = *distribution;
  const std::int64_t batch = csv.integer(row, "batch", 1);
  const std::int64_t tokens = csv.integer(row, "tokens", 0);
  if (batch > most_sequences || tokens > most_tokens / batch) {
    refuse(csv, row,
           fmt::format("expected at most {} sequences and {} tokens, got {} x {}", most_sequences,
                       most_tokens, batch, tokens));
  }
  c.lengths.assign(static_cast<std::size_t>(batch), tokens);
  return c;
}

Case packed_case(const Csv& csv, const Csv::Row& row) {
  Csv lengths{csv.name, {"lengths"}, {}};
  std::vector<std::int64_t> values;
  for (std::string& piece : split(csv.at(row, "lengths"), '+')) {
    const Csv::Row part{row.line, {std::move(piece)}};
    values.push_back(std::min(lengths.integer(part, "lengths", 0), most_tokens + 1));
  }
  return case_of(values, heads_at(csv, row, "qk_heads"), heads_at(csv, row, "v_heads"));
}

}  // namespace

std::int64_t Case::tokens() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

bool equal_lengths(std::span<const std::int64_t> lengths) {
  return std::all_of(lengths.begin(), lengths.end(),
                     [&](std::int64_t length) { return length == lengths.front(); });
}

std::string lengths_text(std::span<const std::int64_t> lengths) {
  if (equal_lengths(lengths) && lengths.size() > 1)
    return fmt::format("{}x{}", lengths.size(), lengths.front());
  return fmt::format("{}", fmt::join(lengths, "+"));
}

Case case_of(std::span<const std::int64_t> lengths, std::int32_t qk_heads, std::int32_t v_heads) {
  Case c;
  c.lengths.assign(lengths.begin(), lengths.end());
  c.name = fmt::format("{}_{}_{}", fmt::join(lengths, "+"), qk_heads, v_heads);
  c.qk_heads = qk_heads;
  c.v_heads = v_heads;
  return c;
}

std::vector<Case> cases_from(const Csv& csv) {
  const bool packed = csv.column("lengths") >= 0;
  std::vector<Case> cases;
  std::set<std::string> names;
  for (const Csv::Row& row : csv.rows) {
    cases.push_back(packed ? packed_case(csv, row) : dense_case(csv, row));
    check_size(csv, row, cases.back());
    if (!names.insert(cases.back().name).second) {
      refuse(csv, row, fmt::format("the case '{}' stands twice", cases.back().name));
    }
  }
  if (cases.empty()) {
    throw Error(ErrorCode::format, fmt::format("{}: expected a case at least, got none", csv.name));
  }
  return cases;
}

std::vector<Case> standard_cases() { return cases_from(Csv::parse("seed.csv", seed_csv)); }

std::vector<Case> tuning_cases() { return cases_from(Csv::parse("tuning.csv", tuning_csv)); }

std::vector<ModelHeads> model_heads() {
  const Csv csv = Csv::parse("models.csv", models_csv);
  std::vector<ModelHeads> models;
  for (const Csv::Row& row : csv.rows) {
    models.push_back({csv.at(row, "model"), heads_at(csv, row, "tp"),
                      heads_at(csv, row, "qk_heads"), heads_at(csv, row, "v_heads")});
  }
  return models;
}

std::vector<std::int64_t> parse_lengths(std::string_view value) {
  std::vector<std::int64_t> lengths = parse_integers("lengths", value, 0);
  std::int64_t left = most_tokens;
  for (const std::int64_t length : lengths) {
    if (length > left) {
      throw UsageError(
          fmt::format("--lengths: expected at most {} tokens, got '{}'", most_tokens, value));
    }
    left -= length;
  }
  return lengths;
}

Case parse_case(std::string_view value) {
  const std::vector<std::string> pieces = split(value, ',');
  const bool state = pieces.size() == 5 && pieces[4] == "state";
  if (pieces.size() != 4 && !state) {
    throw UsageError(
        fmt::format("--case: expected BATCH,TOKENS,QK_HEADS,V_HEADS[,state], got '{}'", value));
  }
  const std::int64_t batch = parse_integer("case", pieces[0], 1);
  const std::int64_t tokens = parse_integer("case", pieces[1], 0);
  const Heads heads = parse_heads("case", fmt::format("{},{}", pieces[2], pieces[3]));
  if (batch > most_sequences || tokens > most_tokens / batch) {
    throw UsageError(fmt::format("--case: expected at most {} sequences and {} tokens, got '{}'",
                                 most_sequences, most_tokens, value));
  }
  Case c;
  c.lengths.assign(static_cast<std::size_t>(batch), tokens);
  c.name =
      fmt::format("{}_{}_{}{}", lengths_text(c.lengths), heads.qk, heads.v, state ? "_state" : "");
  c.qk_heads = heads.qk;
  c.v_heads = heads.v;
  c.initial_state = state;
  return c;
}

Case scaled_down(const Case& original, std::int64_t token_limit, std::int32_t most_v_heads) {
  Case c = original;
  const std::int64_t total = original.tokens();
  if (total > token_limit) {
    for (std::int64_t& length : c.lengths) {
      const std::int64_t chunks = length / chunk_tokens;
      const std::int64_t kept =
          std::max(chunks * token_limit / total, std::min<std::int64_t>(chunks, 1));
      length = kept * chunk_tokens + length % chunk_tokens;
    }
  }
  const std::int32_t ratio = c.v_heads / c.qk_heads;
  c.qk_heads = std::clamp(most_v_heads / ratio, 1, c.qk_heads);
  c.v_heads = c.qk_heads * ratio;
  return c;
}

}  // namespace gdnflow::apps
