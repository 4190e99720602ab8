#include <gdnflow/stage.hpp>

#include <algorithm>
#include <charconv>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

std::int64_t parse_integer(std::string_view text, std::string_view whole) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}': expected an integer, got '{}'", whole, text));
  }
  return value;
}

}  // namespace

Extent::Extent(std::string_view text) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  if (text.empty()) throw Error(ErrorCode::invalid_argument, "extent: expected text, got none");
  if (!is_letter(text.front())) {
    offset = parse_integer(text, text);
    return;
  }
  const std::size_t plus = text.find('+');
  symbol = text.substr(0, plus);
  if (!std::all_of(symbol.begin(), symbol.end(), is_letter)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("extent: expected a symbol like 'T' or 'N+1', got '{}'", text));
  }
  if (plus != std::string_view::npos) offset = parse_integer(text.substr(plus + 1), text);
}

std::string to_string(const Extent& extent) {
  if (extent.symbol.empty()) return fmt::to_string(extent.offset);
  return extent.offset == 0 ? extent.symbol : fmt::format("{}+{}", extent.symbol, extent.offset);
}

std::optional<std::int64_t> evaluate(const Extent& extent, const Problem& p, const Capacity& c) {
  const std::string& s = extent.symbol;
  if (s.empty()) return extent.offset;
  const bool kv = p.state_layout == StateLayout::kv;
  std::int64_t value = 0;
  if (s == "T") {
    value = c.max_tokens;
  } else if (s == "N") {
    value = c.max_sequences;
  } else if (s == "NC") {
    value = max_chunks(p, c);
  } else if (s == "NS") {
    value = c.max_sequences + most_cuts;
  } else if (s == "C") {
    value = chunk_tokens;
  } else if (s == "Hqk") {
    value = p.qk_heads;
  } else if (s == "Hv") {
    value = p.v_heads;
  } else if (s == "Dk") {
    value = p.qk_dim;
  } else if (s == "Dv") {
    value = p.v_dim;
  } else if (s == "Sr") {
    value = kv ? p.qk_dim : p.v_dim;
  } else if (s == "Sc") {
    value = kv ? p.v_dim : p.qk_dim;
  } else if ((s == "PI" && !p.state_indices) ||
             (s == "PO" && !p.state_indices && !p.output_state_indices)) {
    value = c.max_sequences;
  } else {
    return std::nullopt;
  }
  return value + extent.offset;
}

std::int64_t option_or(const Options& options, std::string_view name,
                       std::int64_t fallback) noexcept {
  for (const auto& [key, value] : options) {
    if (key == name) return value;
  }
  return fallback;
}

const TensorView& StageCall::operator[](std::string_view port) const {
  const int index = stage.port_index(port);
  if (index < 0) {
    throw Error(ErrorCode::internal, fmt::format("stage {} has no port '{}'", stage.name, port));
  }
  return tensors[index];
}

int Stage::port_index(std::string_view port) const noexcept {
  for (std::size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].name == port) return static_cast<int>(i);
  }
  return -1;
}

const Variant* Stage::find(std::string_view id, DeviceType target) const noexcept {
  for (const Variant& variant : variants) {
    if (variant.id == id && variant.target == target) return &variant;
  }
  return nullptr;
}

DType resolve_type(const Port& port, const Problem& problem, const Variant& variant) {
  switch (port.type) {
    case TypeRule::activation:
      return problem.activation;
    case TypeRule::state:
      return problem.state;
    case TypeRule::index:
      return problem.index;
    case TypeRule::working:
      return variant.working_type == nullptr ? DType::f32
                                             : variant.working_type(problem, port.name);
    case TypeRule::f32:
      return DType::f32;
    case TypeRule::i32:
      return DType::i32;
    case TypeRule::u8:
      return DType::u8;
  }
  throw Error(ErrorCode::internal, fmt::format("port {} has no type rule", port.name));
}

VariantChoice parse_variant_choice(std::string_view text) {
  VariantChoice choice;
  const std::size_t colon = text.find(':');
  choice.id = text.substr(0, colon);
  const auto refuse = [&] {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("variant: expected 'id' or 'id:option=integer,...', got '{}'", text));
  };
  if (choice.id.empty()) refuse();
  if (colon == std::string_view::npos) return choice;
  std::string_view rest = text.substr(colon + 1);
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0) refuse();
    choice.options.emplace_back(std::string(item.substr(0, equals)),
                                parse_integer(item.substr(equals + 1), text));
    if (comma == std::string_view::npos) return choice;
    rest = rest.substr(comma + 1);
  }
}

std::string to_string(const VariantChoice& choice) {
  std::string text = choice.id;
  char separator = ':';
  for (const auto& [name, value] : choice.options) {
    text += fmt::format("{}{}={}", separator, name, value);
    separator = ',';
  }
  return text;
}

Support supports(const Variant& variant, const VariantQuery& query) {
  if (variant.target != query.device.device.type) {
    return Support::no(fmt::format("runs on {}, the device is {}", to_string(variant.target),
                                   to_string(query.device.device)));
  }
  for (const auto& [name, value] : query.options) {
    const auto spec = std::find_if(variant.options.begin(), variant.options.end(),
                                   [&name = name](const OptionSpec& s) { return s.name == name; });
    if (spec == variant.options.end()) {
      std::vector<std::string> known;
      for (const OptionSpec& s : variant.options) known.push_back(s.name);
      return Support::no(
          fmt::format("option '{}': expected one of [{}]", name, fmt::join(known, ", ")));
    }
    if (std::find(spec->allowed.begin(), spec->allowed.end(), value) == spec->allowed.end()) {
      return Support::no(fmt::format("option '{}': expected one of [{}], got {}", name,
                                     fmt::join(spec->allowed, ", "), value));
    }
  }
  return variant.supports == nullptr ? Support::yes() : variant.supports(query);
}

}  // namespace gdnflow
