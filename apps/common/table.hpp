#pragma once

#include <string>
#include <vector>

namespace gdnflow::apps {

/// Rows of text in columns as wide as they need to be. The first `left` columns are aligned to the
/// left, the others (numbers) to the right.
class Table {
 public:
  Table(std::vector<std::string> header, std::size_t left);

  /// Adds a row. Cells that are missing at its end are empty.
  void add(std::vector<std::string> cells);
  /// The header, a rule and the rows, a line each.
  std::string str() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::size_t left_;
};

}  // namespace gdnflow::apps
