#pragma once

#include <string>
#include <vector>

namespace gdnflow::apps {

/// Rows of text in columns as wide as they need to be. The first `left` columns, and with
/// `last_left` the last one, are aligned to the left, the others (numbers) to the right.
class Table {
 public:
  Table(std::vector<std::string> header, std::size_t left, bool last_left = false);

  /// Adds a row. Cells that are missing at its end are empty.
  void add(std::vector<std::string> cells);
  /// The header, a rule and the rows, a line each.
  std::string str() const;
  /// The same in Markdown.
  std::string markdown() const;

 private:
  bool is_left(std::size_t column) const {
    return column < left_ || (last_left_ && column + 1 == rows_.front().size());
  }

  std::vector<std::vector<std::string>> rows_;
  std::size_t left_;
  bool last_left_;
};

}  // namespace gdnflow::apps
