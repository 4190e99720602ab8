#include "common/csv.hpp"

#include <gdnflow/error.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

[[noreturn]] void fail(const std::string& name, int line, const std::string& what) {
  throw Error(ErrorCode::format, fmt::format("{}:{}: {}", name, line, what));
}

}  // namespace

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> pieces;
  while (true) {
    const std::size_t end = text.find(separator);
    pieces.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return pieces;
    text.remove_prefix(end + 1);
  }
}

Csv Csv::parse(std::string name, std::string_view text) {
  Csv csv;
  csv.name = std::move(name);
  int number = 0;
  for (std::string& line : split(text, '\n')) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.front() == '#') continue;
    std::vector<std::string> fields = split(line, ',');
    if (csv.columns.empty()) {
      csv.columns = std::move(fields);
      continue;
    }
    if (fields.size() != csv.columns.size()) {
      fail(csv.name, number,
           fmt::format("expected {} fields, got {}", csv.columns.size(), fields.size()));
    }
    csv.rows.push_back({number, std::move(fields)});
  }
  if (csv.columns.empty()) fail(csv.name, 1, "expected a line of column names, got none");
  return csv;
}

int Csv::column(std::string_view column_name) const {
  const auto found = std::find(columns.begin(), columns.end(), column_name);
  return found == columns.end() ? -1 : static_cast<int>(found - columns.begin());
}

const std::string& Csv::at(const Row& row, std::string_view column_name) const {
  const int index = column(column_name);
  if (index < 0) {
    fail(name, 1,
         fmt::format("expected a column '{}', got {}", column_name, fmt::join(columns, ",")));
  }
  return row.fields[static_cast<std::size_t>(index)];
}

std::int64_t Csv::integer(const Row& row, std::string_view column_name, std::int64_t least) const {
  const std::string& field = at(row, column_name);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (error != std::errc{} || end != field.data() + field.size() || value < least) {
    fail(name, row.line,
         fmt::format("{}: expected a whole number of at least {}, got '{}'", column_name, least,
                     field));
  }
  return value;
}

double Csv::number(const Row& row, std::string_view column_name, double least) const {
  const std::string& field = at(row, column_name);
  double value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (error != std::errc{} || end != field.data() + field.size() || !std::isfinite(value) ||
      value < least) {
    fail(name, row.line,
         fmt::format("{}: expected a number of at least {}, got '{}'", column_name, least, field));
  }
  return value;
}

void Csv::refuse(const Row& row, const std::string& what) const { fail(name, row.line, what); }

}  // namespace gdnflow::apps
