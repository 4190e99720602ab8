#pragma once

#include <array>
#include <string_view>

namespace gdnflow {

/// The files of graph/costs, compiled in.
extern const std::array<std::string_view, 1> builtin_cost_texts;

}  // namespace gdnflow
