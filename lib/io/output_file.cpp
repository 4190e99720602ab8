#include "io/output_file.hpp"

#include <gdnflow/error.hpp>

#include <atomic>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

namespace gdnflow {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{1} << 16;

[[noreturn]] void refuse(const std::filesystem::path& path, std::string_view what) {
  throw Error(ErrorCode::io,
              fmt::format("{}: cannot {} it: {}", path.string(), what, std::strerror(errno)));
}

}  // namespace

OutputFile::OutputFile(std::filesystem::path path) : path_(std::move(path)) {
  static std::atomic<unsigned> serial{0};
  if (std::filesystem::is_directory(path_)) {
    // Found here, not by the rename after all the work.
    errno = EISDIR;
    refuse(path_, "write");
  }
  if (std::filesystem::is_symlink(path_)) path_ = std::filesystem::canonical(path_);
  if (std::filesystem::exists(path_) && !std::filesystem::is_regular_file(path_)) {
    // The rename would put a file in the place of a device or pipe.
    throw Error(ErrorCode::io,
                fmt::format("{}: cannot write it: expected a regular file", path_.string()));
  }
  temporary_ = path_;
  temporary_ += fmt::format(".{}-{}.tmp", ::getpid(), serial++);
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) refuse(path_, "write");
  buffer_.reserve(buffer_bytes);
}

OutputFile::~OutputFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void OutputFile::write(const char* data, std::size_t bytes) {
  if (buffer_.size() + bytes > buffer_bytes) flush();
  if (bytes >= buffer_bytes) {
    write_through(data, bytes);
  } else {
    buffer_.insert(buffer_.end(), data, data + bytes);
  }
}

void OutputFile::flush() {
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void OutputFile::write_through(const char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = ::write(file_, data, bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      refuse(path_, "write");
    }
    data += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void OutputFile::commit() {
  flush();
  // The bytes must be down before the name points at them, or a power cut leaves an empty file.
  if (::fsync(file_) != 0) refuse(path_, "write");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) refuse(path_, "write");
  ::close(file_);
  file_ = -1;
}

}  // namespace gdnflow
