#pragma once

#include <gdnflow/export.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace gdnflow {

/// Element types of tensors. `u8` carries flags (one byte, zero is false).
enum class DType : std::uint8_t { f32, bf16, f16, i32, i64, u8 };

/// Bytes of one element.
constexpr std::size_t size_of(DType type) noexcept {
  switch (type) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i64:
      return 8;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr bool is_float(DType type) noexcept {
  return type == DType::f32 || type == DType::bf16 || type == DType::f16;
}

/// "f32", "bf16", "f16", "i32", "i64", "u8".
GDNFLOW_API std::string_view to_string(DType type) noexcept;

/// The inverse of `to_string`; also takes "fp32", "fp16", "int32", "int64", "bool".
GDNFLOW_API std::optional<DType> parse_dtype(std::string_view text) noexcept;

}  // namespace gdnflow
