#include <gdnflow/error.hpp>
#include <gdnflow/safetensors.hpp>

#include "io/mapped_file.hpp"
#include "io/safetensors_format.hpp"
#include "io/safetensors_header.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

using safetensors::Entry;
using safetensors::Header;
using safetensors::in_quotes;
using safetensors::length_bytes;
using safetensors::most_header_bytes;
using safetensors::type_names;

// Where a tensor's bytes lie, from the start of the data.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  const std::string* name = nullptr;
};

class Reader {
 public:
  Reader(std::string_view bytes, std::string_view file) : bytes_(bytes), file_(file) {}

  void read(std::map<std::string, TensorView, std::less<>>& tensors,
            std::map<std::string, std::string, std::less<>>& metadata) {
    const std::string_view header = find_header();
    Header parsed = safetensors::parse_header(header, file_);
    data_ = bytes_.substr(length_bytes + header.size());
    std::vector<Range> ranges;
    ranges.reserve(parsed.entries.size());
    for (const auto& [name, entry] : parsed.entries) {
      const auto [place, inserted] = tensors.emplace(name, view_of(name, entry));
      ranges.push_back({(*entry.offsets)[0], (*entry.offsets)[1], &place->first});
    }
    check_cover(std::move(ranges));
    metadata = std::move(parsed.metadata);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::format, fmt::format("{}: {}", file_, what));
  }
  [[noreturn]] void refuse(const std::string& tensor, const std::string& what) const {
    refuse(fmt::format("tensor {}: {}", in_quotes(tensor), what));
  }

  std::string_view find_header() const {
    if (bytes_.size() < length_bytes) {
      refuse(fmt::format("expected the 8 bytes of the header's length, got a file of {} byte{}",
                         bytes_.size(), bytes_.size() == 1 ? "" : "s"));
    }
    std::uint64_t length = 0;
    std::memcpy(&length, bytes_.data(), length_bytes);
    const std::uint64_t rest = bytes_.size() - length_bytes;
    if (length > std::min(rest, most_header_bytes)) {
      refuse(fmt::format(
          "header length: expected at most {} ({}), got {}", std::min(rest, most_header_bytes),
          rest < most_header_bytes ? "the rest of the file" : "the format's limit", length));
    }
    const std::string_view header = bytes_.substr(length_bytes, length);
    if (header.empty() || header.front() != '{') {
      refuse("header: expected JSON that starts with '{', so this is no safetensors file");
    }
    return header;
  }

  TensorView view_of(const std::string& name, const Entry& entry) const {
    if (!entry.dtype) refuse(name, "has no dtype");
    if (!entry.shape) refuse(name, "has no shape");
    if (!entry.offsets) refuse(name, "has no data_offsets");
    const DType type = type_of(name, *entry.dtype);
    const std::vector<std::uint64_t>& shape = *entry.shape;
    if (shape.size() > TensorView::max_rank) {
      refuse(name, fmt::format("expected at most {} dimensions, which is what this library's views "
                               "hold, got {}",
                               +TensorView::max_rank, shape.size()));
    }
    const std::uint64_t size = bytes_of(name, shape, type);
    if (entry.offsets->size() != 2) {
      refuse(name, fmt::format("data_offsets: expected a begin and an end, got {} numbers",
                               entry.offsets->size()));
    }
    const std::uint64_t begin = (*entry.offsets)[0];
    const std::uint64_t end = (*entry.offsets)[1];
    if (begin > end) {
      refuse(name, fmt::format("data_offsets: begin {} lies behind end {}", begin, end));
    }
    if (end > data_.size()) {
      refuse(name, fmt::format("data_offsets: end {} lies outside the {} bytes of data that the "
                               "file holds; it may be truncated",
                               end, data_.size()));
    }
    if (end - begin != size) {
      refuse(name, fmt::format("{} [{}] takes {} bytes, data_offsets give it {}", *entry.dtype,
                               fmt::join(shape, ","), size, end - begin));
    }
    const char* data = data_.data() + begin;
    if (size != 0 && reinterpret_cast<std::uintptr_t>(data) % size_of(type) != 0) {
      refuse(name, fmt::format("its {}-byte elements are not aligned in the file; write it again "
                               "with a current safetensors library",
                               size_of(type)));
    }
    std::array<std::int64_t, TensorView::max_rank> extents{};
    std::copy(shape.begin(), shape.end(), extents.begin());
    return TensorView::dense(const_cast<char*>(data), type,
                             std::span(extents.data(), shape.size()));
  }

  DType type_of(const std::string& name, const std::string& text) const {
    std::string known;
    for (const auto& [type_name, type] : type_names) {
      if (type_name == text) return type;
      known += (known.empty() ? "" : ", ") + std::string(type_name);
    }
    refuse(name, fmt::format("dtype: expected one of {}, got {}", known, in_quotes(text)));
  }

  // Bytes of a shape. Extents of 0 count as 1 in the overflow check, since the strides of an empty
  // tensor are products of its other extents.
  std::uint64_t bytes_of(const std::string& name, const std::vector<std::uint64_t>& shape,
                         DType type) const {
    bool empty = false;
    std::int64_t bytes = static_cast<std::int64_t>(size_of(type));
    for (const std::uint64_t extent : shape) {
      empty = empty || extent == 0;
      const std::uint64_t factor = std::max<std::uint64_t>(extent, 1);
      if (factor > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
          __builtin_mul_overflow(bytes, static_cast<std::int64_t>(factor), &bytes)) {
        refuse(name, fmt::format("shape [{}]: its size in bytes overflows 63 bits",
                                 fmt::join(shape, ",")));
      }
    }
    return empty ? 0 : static_cast<std::uint64_t>(bytes);
  }

  // Every byte of data belongs to exactly one tensor.
  void check_cover(std::vector<Range> ranges) const {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t covered = 0;
    for (const Range& range : ranges) {
      if (range.begin < covered) {
        refuse(*range.name, fmt::format("its bytes {} to {} overlap those of another tensor, which "
                                        "end at {}",
                                        range.begin, range.end, covered));
      }
      if (range.begin > covered) {
        refuse(fmt::format("bytes {} to {} of the data belong to no tensor", covered, range.begin));
      }
      covered = range.end;
    }
    if (covered != data_.size()) {
      refuse(fmt::format("bytes {} to {} of the data belong to no tensor", covered, data_.size()));
    }
  }

  std::string_view bytes_;
  std::string_view file_;
  std::string_view data_;
};

}  // namespace

struct SafetensorsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : mapping(path), name(path.string()) {
    Reader(mapping->bytes(), name).read(tensors, metadata);
  }
  Impl(std::string_view bytes, std::string file) : name(std::move(file)) {
    Reader(bytes, name).read(tensors, metadata);
  }

  std::optional<MappedFile> mapping;  // none where the bytes are the caller's
  std::string name;
  std::map<std::string, TensorView, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  return SafetensorsFile(std::make_unique<const Impl>(path));
}

SafetensorsFile SafetensorsFile::parse(std::string_view bytes, std::string name) {
  return SafetensorsFile(std::make_unique<const Impl>(bytes, std::move(name)));
}

const std::map<std::string, TensorView, std::less<>>& SafetensorsFile::tensors() const noexcept {
  return impl_->tensors;
}

const std::map<std::string, std::string, std::less<>>& SafetensorsFile::metadata() const noexcept {
  return impl_->metadata;
}

bool SafetensorsFile::contains(std::string_view name) const noexcept {
  return impl_->tensors.contains(name);
}

const TensorView& SafetensorsFile::find(std::string_view name) const {
  const auto found = impl_->tensors.find(name);
  if (found != impl_->tensors.end()) return found->second;
  // A model's file may hold thousands; a line of a few says what kind of file it is.
  constexpr std::size_t most = 20;
  std::vector<std::string> known;
  for (const auto& [tensor, view] : impl_->tensors) {
    if (known.size() == most) break;
    known.push_back(in_quotes(tensor));
  }
  const std::size_t more = impl_->tensors.size() - known.size();
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("{}: expected a tensor {}, got [{}]{}", impl_->name, in_quotes(name),
                  fmt::join(known, ", "), more == 0 ? "" : fmt::format(" and {} more", more)));
}

}  // namespace gdnflow
