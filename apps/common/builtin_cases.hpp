#pragma once

#include <string_view>

namespace gdnflow::apps {

// The tables of apps/cases, compiled in.
extern const std::string_view seed_csv;
extern const std::string_view models_csv;
extern const std::string_view tuning_csv;

}  // namespace gdnflow::apps
