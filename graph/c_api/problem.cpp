#include "problem.hpp"

#include "border.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <variant>

#include <fmt/format.h>

// Problems, field by field and by name.

namespace gdnflow::c_api {
namespace {

/// A field of Problem by its type; those that are chosen by name have a name for each value.
struct Field {
  using Member = std::variant<std::int32_t Problem::*, bool Problem::*, float Problem::*,
                              DType Problem::*, StateLayout Problem::*, HeadMap Problem::*,
                              GateForm Problem::*, BetaForm Problem::*, Mode Problem::*>;
  std::string_view name;
  Member member;
};
const std::array<Field, 25> fields{{
    {"qk_heads", &Problem::qk_heads},
    {"v_heads", &Problem::v_heads},
    {"qk_dim", &Problem::qk_dim},
    {"v_dim", &Problem::v_dim},
    {"activation", &Problem::activation},
    {"state", &Problem::state},
    {"index", &Problem::index},
    {"state_layout", &Problem::state_layout},
    {"head_map", &Problem::head_map},
    {"gate", &Problem::gate},
    {"beta", &Problem::beta},
    {"qk_norm", &Problem::qk_norm},
    {"scale", &Problem::scale},
    {"cu_seqlens", &Problem::cu_seqlens},
    {"prefix_lens", &Problem::prefix_lens},
    {"initial_state", &Problem::initial_state},
    {"final_state", &Problem::final_state},
    {"state_indices", &Problem::state_indices},
    {"output_state_indices", &Problem::output_state_indices},
    {"has_initial_state", &Problem::has_initial_state},
    {"checkpoint_interval", &Problem::checkpoint_interval},
    {"checkpoint_state_indices", &Problem::checkpoint_state_indices},
    {"zero_padding", &Problem::zero_padding},
    {"mode", &Problem::mode},
    {"model_v_heads", &Problem::model_v_heads},
}};

template <class T>
void parse_number(std::string_view text, std::string_view name, std::string_view what, T& to) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [behind, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::result_out_of_range) {
    refuse(fmt::format("{}: expected {} within its range, got '{}'", name, what, text));
  }
  if (error != std::errc{} || behind != end) {
    refuse(fmt::format("{}: expected {}, got '{}'", name, what, text));
  }
  to = value;
}

void parse(std::string_view text, std::string_view name, std::int32_t& to) {
  parse_number(text, name, "a whole number", to);
}
void parse(std::string_view text, std::string_view name, float& to) {
  float value = 0;
  parse_number(text, name, "a number", value);
  if (!std::isfinite(value)) {
    refuse(fmt::format("{}: expected a finite number, got '{}'", name, text));
  }
  to = value;
}
void parse(std::string_view text, std::string_view name, bool& to) {
  if (text != "0" && text != "1") {
    refuse(fmt::format("{}: expected 0 or 1, got '{}'", name, text));
  }
  to = text == "1";
}
void parse(std::string_view text, std::string_view name, DType& to) {
  const std::optional<DType> type = parse_dtype(text);
  if (!type) refuse(fmt::format("{}: expected a type such as bf16, got '{}'", name, text));
  to = *type;
}
template <class T>
void parse_choice(std::string_view text, std::string_view name, std::initializer_list<T> values,
                  T& to) {
  std::string known;
  for (const T value : values) {
    if (to_string(value) == text) {
      to = value;
      return;
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", to_string(value));
  }
  refuse(fmt::format("{}: expected one of {}, got '{}'", name, known, text));
}
void parse(std::string_view text, std::string_view name, StateLayout& to) {
  parse_choice(text, name, {StateLayout::kv, StateLayout::vk}, to);
}
void parse(std::string_view text, std::string_view name, HeadMap& to) {
  parse_choice(text, name, {HeadMap::grouped, HeadMap::interleaved}, to);
}
void parse(std::string_view text, std::string_view name, GateForm& to) {
  parse_choice(text, name, {GateForm::log_decay, GateForm::alpha, GateForm::raw}, to);
}
void parse(std::string_view text, std::string_view name, BetaForm& to) {
  parse_choice(text, name, {BetaForm::ready, BetaForm::logit}, to);
}
void parse(std::string_view text, std::string_view name, Mode& to) {
  parse_choice(text, name, {Mode::fastest, Mode::batch_invariant}, to);
}

template <class T>
std::string text_of(T value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "1" : "0";
  } else if constexpr (std::is_arithmetic_v<T>) {
    return fmt::format("{}", value);
  } else {
    return std::string(to_string(value));
  }
}

}  // namespace
}  // namespace gdnflow::c_api

using namespace gdnflow;
using namespace gdnflow::c_api;

extern "C" {

gdnflow_status gdnflow_problem_create(gdnflow_problem** problem) {
  return guarded([&] {
    gdnflow_problem*& to = expect(problem, "problem");
    to = new gdnflow_problem;
  });
}

void gdnflow_problem_destroy(gdnflow_problem* problem) { delete problem; }

gdnflow_status gdnflow_problem_set(gdnflow_problem* problem, const char* field, const char* value) {
  return guarded([&] {
    Problem& p = expect(problem, "problem").value;
    const std::string_view name = expect_text(field, "field");
    const std::string_view text = expect_text(value, "value");
    const Field& known = find_named(fields, &Field::name, "field", name);
    std::visit([&](auto member) { parse(text, name, p.*member); }, known.member);
  });
}

gdnflow_status gdnflow_problem_fields(const gdnflow_problem* problem, char* text, size_t size,
                                      size_t* length) {
  return guarded([&] {
    const Problem& p = expect(problem, "problem").value;
    std::string lines;
    for (const Field& field : fields) {
      const std::string value =
          std::visit([&](auto member) { return text_of(p.*member); }, field.member);
      lines += fmt::format("{}\t{}\n", field.name, value);
    }
    give_text(lines, text, size, length);
  });
}

}  // extern "C"
