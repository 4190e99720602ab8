#include <gdnflow/dtype.hpp>

#include <array>
#include <utility>

namespace gdnflow {
namespace {

// The first name of a type is the one that is printed.
constexpr std::array<std::pair<std::string_view, DType>, 11> names{{
    {"f32", DType::f32},
    {"bf16", DType::bf16},
    {"f16", DType::f16},
    {"i32", DType::i32},
    {"i64", DType::i64},
    {"u8", DType::u8},
    {"fp32", DType::f32},
    {"fp16", DType::f16},
    {"int32", DType::i32},
    {"int64", DType::i64},
    {"bool", DType::u8},
}};

}  // namespace

std::string_view to_string(DType type) noexcept {
  for (const auto& [name, value] : names) {
    if (value == type) return name;
  }
  return "?";
}

std::optional<DType> parse_dtype(std::string_view text) noexcept {
  for (const auto& [name, value] : names) {
    if (name == text) return value;
  }
  return std::nullopt;
}

}  // namespace gdnflow
