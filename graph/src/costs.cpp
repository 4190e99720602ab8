#include <gdnflow/costs.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/recipes.hpp>

#include "builtin_costs.hpp"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <system_error>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gdnflow {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t format_version = 1;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Tokens of a sequence, by the assumption that all are equally long.
std::int64_t tokens_of_sequence(const Capacity& capacity) {
  return ceil_div(capacity.max_tokens, std::max<std::int64_t>(capacity.max_sequences, 1));
}

/// What segments and shares start in front of their begin, in chunks, by the assumption that gates
/// are those that costs are fitted to.
constexpr std::int64_t assumed_lead = 8;

/// Steps of the longest segment, by the assumption that sequences, of `steps` each, are cut.
std::int64_t steps_when_cut(std::int64_t steps, std::int64_t sequences, std::int64_t segments) {
  const std::int64_t length =
      ceil_div(ceil_div(steps * sequences, segments), segment_grain) * segment_grain;
  return std::min(steps, length + assumed_lead);
}

/// Four digits are more than any fit is good for, and the same wherever it is made.
double rounded(double value) { return std::stod(fmt::format("{:.4g}", value)); }

Json form_json(const CostForm& form) {
  Json json;
  if (!form.pipeline.empty()) {
    json = {{"pipeline", form.pipeline},
            {"options", form.options},
            {"whole", form.whole},
            {"columns", form.columns},
            {"step_tokens", form.step_tokens},
            {"resident", form.resident},
            {"least_tokens", form.least_tokens}};
    if (form.cut) json["cut"] = true;
    if (form.shares) json["shares"] = true;
  }
  Json factors = Json::object();
  for (std::size_t i = 0; i < cost_terms.size(); ++i) {
    if (form.us[i] != 0) factors[std::string(cost_terms[i])] = rounded(form.us[i]);
  }
  json["us"] = std::move(factors);
  json["rows"] = form.rows;
  json["rms"] = rounded(form.rms);
  json["worst"] = rounded(form.worst);
  for (const CostPoint& p : form.points) {
    json["points"].push_back(
        {p.tokens, p.sequences, p.qk_heads, p.v_heads, p.multiprocessors, rounded(p.ratio)});
  }
  return json;
}

/// Takes fields out of a table's JSON, and says where one is not what it should be.
class Reader {
 public:
  explicit Reader(std::string_view name) : name_(name) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::format, fmt::format("cost table {}: {}{}", name_, place_, what));
  }

  /// What comes is read from form number `index`, and what is wrong with it is said to be there.
  void enter_form(std::size_t index) { place_ = fmt::format("forms[{}]: ", index); }

  const Json& at(const Json& json, const char* key) const {
    if (!json.is_object() || !json.contains(key)) {
      refuse(fmt::format("expected a field '{}', got none", key));
    }
    return json.at(key);
  }

  std::string text(const Json& json, const char* key) const {
    const Json& value = at(json, key);
    if (!value.is_string()) refuse(fmt::format("{}: expected text, got {}", key, shown(value)));
    return value.get<std::string>();
  }

  bool flag(const Json& json, const char* key) const {
    const Json& value = at(json, key);
    if (!value.is_boolean()) {
      refuse(fmt::format("{}: expected true or false, got {}", key, shown(value)));
    }
    return value.get<bool>();
  }

  template <std::integral T>
  T whole(const Json& json, const char* key, T least) const {
    const Json& value = at(json, key);
    if (!value.is_number_unsigned() ||
        value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<T>::max()) ||
        value.get<T>() < least) {
      refuse(fmt::format("{}: expected a whole number of at least {}, got {}", key, least,
                         shown(value)));
    }
    return value.get<T>();
  }

  double positive(const Json& json, const char* key) const {
    const Json& value = at(json, key);
    // An hour is more than any term of a forward; sums of such stay finite.
    constexpr double most = 3.6e9;
    if (!value.is_number() || !(value.get<double>() >= 0) || value.get<double>() > most) {
      refuse(fmt::format("{}: expected a number from 0 to {}, got {}", key, most, shown(value)));
    }
    return value.get<double>();
  }

  CostForm factors(const Json& json) const {
    CostForm form;
    const Json& us = at(json, "us");
    if (!us.is_object()) refuse(fmt::format("us: expected an object, got {}", shown(us)));
    for (const auto& [key, value] : us.items()) {
      const auto* const term = std::find(cost_terms.begin(), cost_terms.end(), key);
      if (term == cost_terms.end()) {
        refuse(fmt::format("us: expected one of {}, got '{}'", fmt::join(cost_terms, ", "), key));
      }
      form.us[static_cast<std::size_t>(term - cost_terms.begin())] = positive(us, key.c_str());
    }
    form.rows = whole<std::int32_t>(json, "rows", 0);
    form.rms = positive(json, "rms");
    form.worst = positive(json, "worst");
    return form;
  }

  CostForm form(const Json& json) const {
    CostForm form = factors(json);
    form.pipeline = text(json, "pipeline");
    if (!is_recipe(form.pipeline)) {
      refuse(fmt::format("pipeline: expected one of {}, got '{}'", recipe_ids(), form.pipeline));
    }
    form.options = text(json, "options");
    form.whole = flag(json, "whole");
    form.columns = whole<std::int32_t>(json, "columns", 1);
    form.step_tokens = whole<std::int32_t>(json, "step_tokens", 1);
    form.resident = whole<std::int32_t>(json, "resident", 1);
    form.least_tokens = whole<std::int64_t>(json, "least_tokens", 0);
    form.cut = json.contains("cut") && flag(json, "cut");
    form.shares = json.contains("shares") && flag(json, "shares");
    if (json.contains("points")) form.points = points(json.at("points"));
    return form;
  }

  std::vector<CostPoint> points(const Json& json) const {
    if (!json.is_array()) refuse(fmt::format("points: expected a list, got {}", shown(json)));
    std::vector<CostPoint> points;
    for (const Json& entry : json) {
      const auto good = [&] {
        if (!entry.is_array() || entry.size() != 6) return false;
        for (std::size_t i = 0; i < 5; ++i) {
          if (!entry[i].is_number_unsigned() || entry[i].get<std::uint64_t>() == 0 ||
              entry[i].get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max()) {
            return false;
          }
        }
        return entry[5].is_number() && std::isfinite(entry[5].get<double>()) &&
               entry[5].get<double>() > 0;
      };
      if (!good()) {
        refuse(
            fmt::format("points: expected five whole numbers above 0 and a ratio above 0, got {}",
                        shown(entry)));
      }
      points.push_back({entry[0].get<std::int64_t>(), entry[1].get<std::int64_t>(),
                        entry[2].get<std::int32_t>(), entry[3].get<std::int32_t>(),
                        entry[4].get<std::int32_t>(), entry[5].get<double>()});
    }
    return points;
  }

 private:
  static std::string shown(const Json& value) {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 40) text = text.substr(0, 40) + "...";
    return text;
  }

  std::string_view name_;
  std::string place_;
};

/// What measurements near a problem say of the sum of terms: a factor.
double correction(const CostForm& form, const Problem& problem, const Capacity& capacity,
                  std::int32_t multiprocessors) {
  const std::int64_t tokens = std::max(tokens_of_sequence(capacity), form.least_tokens);
  double sum = 0;
  double weights = 1;  // the sum of terms itself, as if measured an octave away
  for (const CostPoint& p : form.points) {
    double square = 0;
    const auto add = [&](std::int64_t a, std::int64_t b) {
      const double octaves =
          std::log2(static_cast<double>(std::max<std::int64_t>(a, 1)) / static_cast<double>(b));
      square += octaves * octaves;
    };
    add(tokens, p.tokens);
    add(capacity.max_sequences, p.sequences);
    add(problem.qk_heads, p.qk_heads);
    add(problem.v_heads, p.v_heads);
    add(multiprocessors, p.multiprocessors);
    if (square == 0) return p.ratio;
    const double weight = 1 / (square * square);
    sum += weight * std::log(p.ratio);
    weights += weight;
  }
  return std::exp(sum / weights);
}

}  // namespace

const CostForm* CostTable::find(std::string_view pipeline,
                                std::string_view options) const noexcept {
  const auto found = std::find_if(forms.begin(), forms.end(), [&](const CostForm& form) {
    return form.pipeline == pipeline && form.options == options;
  });
  return found == forms.end() ? nullptr : &*found;
}

CostFactors terms_of(const CostForm& form, const Problem& problem, const Capacity& capacity,
                     std::int32_t multiprocessors, double traffic) {
  const std::int64_t width = std::max(multiprocessors, 1);
  const std::int64_t tokens = std::max(tokens_of_sequence(capacity), form.least_tokens);
  const std::int64_t heads = capacity.max_sequences * problem.v_heads;
  const std::int64_t blocks_of_head =
      ceil_div(problem.v_dim, std::min(form.columns, problem.v_dim));
  const std::int64_t blocks = heads * blocks_of_head;
  std::int64_t rounds = ceil_div(blocks, width * form.resident);
  const std::int64_t segments =
      form.cut ? useful_segments(problem, multiprocessors, blocks_of_head) : 1;
  std::int64_t chain = ceil_div(tokens, form.step_tokens);
  if (segments > capacity.max_sequences) {
    chain = steps_when_cut(chain, capacity.max_sequences, segments);
  }
  if (form.shares) {
    chain = std::min(rounds * chain, ceil_div(blocks * chain, width) + assumed_lead);
    rounds = 1;
  }
  const auto steps = static_cast<double>(rounds * chain);
  const bool crowded = form.resident > 1 && blocks > width;
  const double work =
      static_cast<double>(heads) * static_cast<double>(ceil_div(tokens, chunk_tokens));
  return {1.0,
          static_cast<double>(rounds),
          crowded ? 0.0 : steps,
          crowded ? steps : 0.0,
          work / static_cast<double>(width),
          work * traffic,
          segments > 1 ? 1.0 : 0.0};
}

double predicted_us(const CostTable& table, const CostForm& form, const Problem& problem,
                    const Capacity& capacity, const DeviceInfo& device) {
  const double traffic = device.name == table.gpu ? 1.0
                                                  : static_cast<double>(table.multiprocessors) /
                                                        std::max(device.multiprocessors, 1);
  const auto sum = [&](const CostForm& part) {
    const CostFactors terms = terms_of(part, problem, capacity, device.multiprocessors, traffic);
    double us = 0;
    for (std::size_t i = 0; i < terms.size(); ++i) us += part.us[i] * terms[i];
    return us;
  };
  const double us = sum(form) + (form.whole ? 0.0 : sum(table.front));
  return device.name == table.gpu ? us * correction(form, problem, capacity, device.multiprocessors)
                                  : us;
}

std::span<const CostTable> builtin_cost_tables() {
  static const std::vector<CostTable> tables = [] {
    std::vector<CostTable> parsed;
    for (const std::string_view text : builtin_cost_texts) {
      parsed.push_back(parse_cost_table("of this library", text));
    }
    return parsed;
  }();
  return tables;
}

const CostTable* cost_table_for(const DeviceInfo& device, std::span<const CostTable> tables) {
  if (device.device.type == DeviceType::host) return nullptr;
  // The smaller, the nearer.
  const auto distance = [&](const CostTable& table) {
    const std::int32_t apart = table.capability - device.capability;
    return std::tuple(table.gpu != device.name, apart > 0, std::abs(apart));
  };
  const auto nearest = std::min_element(
      tables.begin(), tables.end(),
      [&](const CostTable& a, const CostTable& b) { return distance(a) < distance(b); });
  return nearest == tables.end() ? nullptr : &*nearest;
}

CostTable parse_cost_table(std::string_view name, std::string_view text) {
  Reader reader(name);
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) reader.refuse("expected JSON, got something else");
  const auto version = reader.whole<std::int64_t>(json, "format", 0);
  if (version != format_version) {
    reader.refuse(fmt::format("format: expected {}, got {}", format_version, version));
  }
  CostTable table;
  table.gpu = reader.text(json, "gpu");
  table.capability = reader.whole<std::int32_t>(json, "capability", 1);
  table.multiprocessors = reader.whole<std::int32_t>(json, "multiprocessors", 1);
  table.front = reader.factors(reader.at(json, "front"));
  const Json& forms = reader.at(json, "forms");
  if (!forms.is_array() || forms.empty()) reader.refuse("forms: expected a list of them");
  for (const Json& entry : forms) {
    reader.enter_form(table.forms.size());
    CostForm form = reader.form(entry);
    if (table.find(form.pipeline, form.options) != nullptr) {
      reader.refuse(
          fmt::format("expected each once, got {} {} again", form.pipeline, form.options));
    }
    table.forms.push_back(std::move(form));
  }
  return table;
}

CostTable read_cost_table(const std::string& path) {
  std::error_code failure;
  const std::filesystem::file_status status = std::filesystem::status(path, failure);
  if (failure || !std::filesystem::is_regular_file(status)) {
    throw Error(ErrorCode::io,
                fmt::format("cost table {}: expected a file, got {}", path,
                            std::filesystem::exists(status) ? "something else" : "nothing there"));
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw Error(ErrorCode::io, fmt::format("cost table {}: cannot be read", path));
  return parse_cost_table(path, text);
}

std::string to_json(const CostTable& table) {
  Json json = {{"format", format_version},        {"gpu", table.gpu},
               {"capability", table.capability},  {"multiprocessors", table.multiprocessors},
               {"front", form_json(table.front)}, {"forms", Json::array()}};
  for (const CostForm& form : table.forms) json["forms"].push_back(form_json(form));
  return json.dump(2) + "\n";
}

}  // namespace gdnflow
