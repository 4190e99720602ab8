#pragma once

#include <gdnflow/dtype.hpp>

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

// The format: 8 bytes, the header's length n, little-endian; n bytes of JSON, an object of
// name -> {dtype, shape, data_offsets}, with strings by strings under "__metadata__"; then the
// tensors' bytes, without gaps.

namespace gdnflow::safetensors {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

inline constexpr std::uint64_t length_bytes = 8;
inline constexpr std::uint64_t most_header_bytes = 100'000'000;  // the format's own limit
inline constexpr std::string_view metadata_key = "__metadata__";

// Of two names for one type, the first is the one that is written.
inline constexpr std::array<std::pair<std::string_view, DType>, 7> type_names{{
    {"F32", DType::f32},
    {"BF16", DType::bf16},
    {"F16", DType::f16},
    {"I32", DType::i32},
    {"I64", DType::i64},
    {"U8", DType::u8},
    {"BOOL", DType::u8},
}};

// A name as a JSON string, so that control characters of a hostile file stay on the message's line.
inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t most = 200;
  const std::string shown(text.substr(0, most));
  return nlohmann::json(shown).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
         (text.size() > most ? "..." : "");
}

}  // namespace gdnflow::safetensors
