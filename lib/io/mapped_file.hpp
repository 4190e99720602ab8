#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace gdnflow {

/// A whole file mapped read-only. Errors: io when it cannot be opened or mapped or is no regular
/// file.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::string_view bytes() const noexcept { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace gdnflow
