#pragma once

#include <cstddef>
#include <filesystem>
#include <vector>

namespace gdnflow {

/// A file that appears under its name whole or not at all: bytes go to a temporary file beside it,
/// `commit` renames that over the name, and destruction without `commit` removes it. Buffered.
/// Errors of every member: io, naming the file and the system's reason.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  void write(const char* data, std::size_t bytes);
  void commit();

 private:
  void write_through(const char* data, std::size_t bytes);
  void flush();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  std::vector<char> buffer_;
  int file_ = -1;
};

}  // namespace gdnflow
