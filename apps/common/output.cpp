#include "common/output.hpp"

#include <gdnflow/error.hpp>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <system_error>

#include <fmt/format.h>
#include <unistd.h>

namespace gdnflow::apps {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, std::string_view what, int error) {
  throw Error(ErrorCode::io, fmt::format("{}: {}: {}", path.string(), what, std::strerror(error)));
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// Removes the temporary file unless it has been renamed.
struct Temporary {
  fs::path path;
  bool renamed = false;

  ~Temporary() {
    std::error_code ignored;
    if (!renamed) fs::remove(path, ignored);
  }
};

// A device or a pipe: renaming a file onto /dev/null would end it for the whole machine.
bool is_special(const fs::path& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

void write_text(const fs::path& path, const fs::path& target, std::string_view text) {
  File file(std::fopen(target.c_str(), "wb"));
  if (!file || std::fwrite(text.data(), 1, text.size(), file.get()) != text.size() ||
      std::fflush(file.get()) != 0) {
    fail(path, "cannot be written", errno);
  }
}

fs::path folder_of(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

}  // namespace

fs::path temporary_beside(const fs::path& path) {
  fs::path temporary = path;
  temporary += fmt::format(".{}.tmp", ::getpid());
  return temporary;
}

fs::path behind_links(const fs::path& path) {
  constexpr int most_links = 40;  // as in the kernel: links may lead in a circle
  std::error_code error;
  fs::path target = path;
  for (int i = 0; i < most_links && fs::is_symlink(target, error); ++i) {
    target = target.parent_path() / fs::read_symlink(target, error);
  }
  return target;
}

void check_writable(const fs::path& path) {
  if (is_special(path)) {
    if (::access(path.c_str(), W_OK) != 0) fail(path, "cannot be written", errno);
    return;
  }
  const fs::path folder = folder_of(behind_links(path));
  std::error_code error;
  if (path.empty() || fs::is_directory(path, error)) {
    throw Error(ErrorCode::io,
                fmt::format("{}: expected the name of a file to write", path.string()));
  }
  if (!fs::is_directory(folder, error)) {
    throw Error(ErrorCode::io,
                fmt::format("{}: cannot be written: no folder {}", path.string(), folder.string()));
  }
  if (::access(folder.c_str(), W_OK) != 0) fail(path, "cannot be written", errno);
}

void check_replaceable(const fs::path& path) {
  if (is_special(path)) {
    throw Error(ErrorCode::io, fmt::format("{}: expected a regular file or a new name, got a "
                                           "device or a pipe",
                                           path.string()));
  }
  check_writable(path);
}

void write_file(const fs::path& path, std::string_view text) {
  if (is_special(path)) {
    write_text(path, path, text);
    return;
  }
  const fs::path target = behind_links(path);
  Temporary temporary{temporary_beside(target)};
  write_text(path, temporary.path, text);
  if (std::rename(temporary.path.c_str(), target.c_str()) != 0) {
    fail(path, "cannot be replaced", errno);
  }
  temporary.renamed = true;
}

std::string read_file(const fs::path& path) {
  File file(std::fopen(path.c_str(), "rb"));
  if (!file) fail(path, "cannot be read", errno);
  std::string text;
  char block[65536];
  std::size_t got = 0;
  while ((got = std::fread(block, 1, sizeof(block), file.get())) > 0) text.append(block, got);
  if (std::ferror(file.get()) != 0) fail(path, "cannot be read", errno);
  return text;
}

void OutputTarget::write(std::string text) const {
  text += '\n';
  if (is_stdout()) {
    std::fwrite(text.data(), 1, text.size(), stdout);
  } else {
    write_file(path, text);
  }
}

}  // namespace gdnflow::apps
