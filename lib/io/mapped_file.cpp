#include "io/mapped_file.hpp"

#include <gdnflow/error.hpp>

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, std::string_view what, int reason) {
  throw Error(ErrorCode::io,
              fmt::format("{}: cannot {} it: {}", path.string(), what, std::strerror(reason)));
}

// Closes on every way out; the mapping outlives the descriptor.
struct Descriptor {
  int value;
  ~Descriptor() { ::close(value); }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const int opened = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (opened < 0) refuse(path, "open", errno);
  const Descriptor file{opened};
  struct stat status {};
  if (::fstat(file.value, &status) != 0) refuse(path, "read", errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::io, fmt::format("{}: expected a regular file", path.string()));
  }
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // the system maps no empty file
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (data == MAP_FAILED) refuse(path, "map", errno);
  data_ = data;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace gdnflow
