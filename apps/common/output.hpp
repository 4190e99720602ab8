#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace gdnflow::apps {

/// Refuses a path that could not be written, before any work is done. Errors: gdnflow::Error (io)
/// naming the path.
void check_writable(const std::filesystem::path& path);
/// The same for what is only ever replaced as a whole: refuses a device or a pipe, too.
void check_replaceable(const std::filesystem::path& path);

/// The file that a path means: where a symbolic link leads, else the path. Renaming onto the link
/// would replace the link.
std::filesystem::path behind_links(const std::filesystem::path& path);

/// Replaces a file as a whole: the text goes to a temporary file beside it, which is renamed. No
/// half-written file is ever seen under the name. A device or a pipe stays what it is and is
/// written to. Errors: gdnflow::Error (io).
void write_file(const std::filesystem::path& path, std::string_view text);

/// Reads a whole file. Errors: gdnflow::Error (io).
std::string read_file(const std::filesystem::path& path);

/// The target of an option that takes a file or, without one, means standard output ("-").
struct OutputTarget {
  std::string path;

  bool is_stdout() const { return path == "-"; }
  void check() const {
    if (!is_stdout()) check_writable(path);
  }
  /// Writes the text and a final newline.
  void write(std::string text) const;
};

/// A temporary name beside `path`, of this process's own.
std::filesystem::path temporary_beside(const std::filesystem::path& path);

}  // namespace gdnflow::apps
