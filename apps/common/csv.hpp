#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow::apps {

/// A table read from comma-separated text with a header line. Plain fields: no quotes. Empty lines
/// and lines that begin with # are skipped.
struct Csv {
  struct Row {
    int line = 0;  ///< in the file, from 1
    std::vector<std::string> fields;
  };

  std::string name;  ///< of the file, for messages
  std::vector<std::string> columns;
  std::vector<Row> rows;

  /// Errors: gdnflow::Error (format), "NAME:LINE: ...", for a missing header or a row with another
  /// number of fields.
  static Csv parse(std::string name, std::string_view text);

  /// Index of a column, or -1.
  int column(std::string_view column_name) const;
  /// A field of a column that must be there. Errors: format.
  const std::string& at(const Row& row, std::string_view column_name) const;
  /// A field as a whole number of at least `least`. Errors: format.
  std::int64_t integer(const Row& row, std::string_view column_name, std::int64_t least) const;
  /// A field as a finite number of at least `least`. Errors: format.
  double number(const Row& row, std::string_view column_name, double least) const;
  /// Refuses a row. Errors: format, "NAME:LINE: WHAT".
  [[noreturn]] void refuse(const Row& row, const std::string& what) const;
};

/// Text cut at a separator; one empty piece for empty text.
std::vector<std::string> split(std::string_view text, char separator);

}  // namespace gdnflow::apps
