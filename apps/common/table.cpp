#include "common/table.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace gdnflow::apps {

Table::Table(std::vector<std::string> header, std::size_t left, bool last_left)
    : left_(left), last_left_(last_left) {
  rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(rows_.front().size());
  rows_.push_back(std::move(cells));
}

std::string Table::str() const {
  std::vector<std::size_t> widths(rows_.front().size());
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& row) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      line += fmt::format(fmt::runtime(is_left(c) ? "{:<{}}" : "{:>{}}"), row[c], widths[c]);
      if (c + 1 < row.size()) line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  };
  add_line(rows_.front());
  std::vector<std::string> rule;
  for (const std::size_t width : widths) rule.emplace_back(width, '-');
  add_line(rule);
  for (std::size_t r = 1; r < rows_.size(); ++r) add_line(rows_[r]);
  return text;
}

std::string Table::markdown() const {
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& row) {
    text += '|';
    for (const std::string& cell : row) {
      text += ' ';
      for (const char c : cell) text += c == '|' ? std::string("\\|") : std::string(1, c);
      text += " |";
    }
    text += '\n';
  };
  add_line(rows_.front());
  text += '|';
  for (std::size_t c = 0; c < rows_.front().size(); ++c) text += is_left(c) ? "---|" : "---:|";
  text += '\n';
  for (std::size_t r = 1; r < rows_.size(); ++r) add_line(rows_[r]);
  return text;
}

}  // namespace gdnflow::apps
