#pragma once

#include <gdnflow/export.hpp>
#include <gdnflow/tensor.hpp>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gdnflow {

/// A safetensors file, memory-mapped read-only. Views point into the mapping and live as long as
/// this object. Immutable, so safe to share between threads.
class GDNFLOW_API SafetensorsFile {
 public:
  /// Errors: io when the file cannot be opened or mapped; format, one line that names the file
  /// and the tensor, for a truncated file, a header that is no JSON object of the format, an
  /// unknown dtype, sizes that overflow, offsets that are out of range, overlap, leave a gap or do
  /// not match the shape, or a name that stands twice.
  static SafetensorsFile open(const std::filesystem::path& path);
  /// The same from memory, which must outlive the object; `name` stands in messages.
  static SafetensorsFile parse(std::string_view bytes, std::string name);

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::map<std::string, TensorView, std::less<>>& tensors() const noexcept;
  const std::map<std::string, std::string, std::less<>>& metadata() const noexcept;
  bool contains(std::string_view name) const noexcept;
  /// Errors: invalid_argument, naming the tensors there are.
  const TensorView& find(std::string_view name) const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

/// Writes host tensors (strides allowed) through a temporary file that replaces `path` when whole,
/// so no half-written file is ever seen under that name. Errors: invalid_argument for a tensor
/// not on the host or a name that stands twice; io.
GDNFLOW_API void write_safetensors(const std::filesystem::path& path,
                                   const std::vector<std::pair<std::string, TensorView>>& tensors,
                                   const std::map<std::string, std::string>& metadata = {});

}  // namespace gdnflow
