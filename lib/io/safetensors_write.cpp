#include <gdnflow/error.hpp>
#include <gdnflow/safetensors.hpp>

#include "io/output_file.hpp"
#include "io/safetensors_format.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include <fmt/format.h>

namespace gdnflow {
namespace {

using safetensors::in_quotes;
using safetensors::length_bytes;
using safetensors::metadata_key;
using safetensors::type_names;

// Calls `emit(pointer, bytes)` for the elements of a view in row-major order, in runs as long as
// its strides allow.
template <class Emit>
void for_each_run(const TensorView& view, Emit emit) {
  if (view.elements() == 0) return;
  int outer = view.rank;  // dimensions from `outer` on are one dense run
  std::int64_t run = 1;
  while (outer > 0 && (view.extents[outer - 1] == 1 || view.strides[outer - 1] == run)) {
    run *= view.extents[--outer];
  }
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  std::array<std::int64_t, TensorView::max_rank> index{};
  while (true) {
    std::int64_t offset = 0;
    for (int i = 0; i < outer; ++i) offset += index[i] * view.strides[i];
    emit(view.as<const char>() + offset * element, static_cast<std::size_t>(run * element));
    int i = outer - 1;
    while (i >= 0 && ++index[i] == view.extents[i]) index[i--] = 0;
    if (i < 0) return;
  }
}

using NamedTensors = std::vector<std::pair<std::string, TensorView>>;

void check_writable(const NamedTensors& tensors) {
  const auto refuse = [](const std::string& name, std::string_view what) {
    throw Error(ErrorCode::invalid_argument, fmt::format("tensor {}: {}", in_quotes(name), what));
  };
  std::set<std::string_view> names;
  for (const auto& [name, view] : tensors) {
    if (name == metadata_key) refuse(name, "the name is the format's own");
    if (!names.insert(name).second) refuse(name, "the name stands twice");
    if (view.device.type != DeviceType::host) {
      refuse(name, fmt::format("expected it on the host, got {}", to_string(view.device)));
    }
    if (view.data == nullptr && view.elements() != 0) refuse(name, "has no data");
  }
}

// The length and the JSON, padded so that the data starts at a multiple of 8. Tensors lie in the
// order given, one behind another.
std::string header_of(const std::vector<const NamedTensors::value_type*>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[std::string(metadata_key)] = metadata;
  std::int64_t offset = 0;
  for (const auto* tensor : tensors) {
    const TensorView& view = tensor->second;
    const auto type = std::find_if(type_names.begin(), type_names.end(),
                                   [&](const auto& known) { return known.second == view.dtype; });
    auto& entry = json[tensor->first];
    entry["dtype"] = type->first;
    entry["shape"] = std::vector(view.extents.begin(), view.extents.begin() + view.rank);
    entry["data_offsets"] = {offset, offset + view.bytes()};
    offset += view.bytes();
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::invalid_argument,
                "safetensors: expected names and metadata in UTF-8, got other bytes");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  std::string header(length_bytes, '\0');
  std::memcpy(header.data(), &length, length_bytes);
  return header + text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  check_writable(tensors);
  // Wide elements first: every offset is then a multiple of its tensor's element size.
  std::vector<const NamedTensors::value_type*> order;
  order.reserve(tensors.size());
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return size_of(a->second.dtype) > size_of(b->second.dtype);
  });
  const std::string header = header_of(order, metadata);

  OutputFile file(path);
  file.write(header.data(), header.size());
  for (const auto* tensor : order) {
    for_each_run(tensor->second,
                 [&](const char* data, std::size_t bytes) { file.write(data, bytes); });
  }
  file.commit();
}

}  // namespace gdnflow
