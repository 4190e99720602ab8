#pragma once

#include <gdnflow/prefill.hpp>

#include <array>
#include <string_view>

namespace gdnflow {

/// The members of PrefillTensors and the edges that they stand for.
struct TensorName {
  std::string_view edge;
  TensorView PrefillTensors::*member;
};
inline constexpr std::array<TensorName, 19> tensor_names{{
    {"q", &PrefillTensors::q},
    {"k", &PrefillTensors::k},
    {"v", &PrefillTensors::v},
    {"g", &PrefillTensors::g},
    {"beta", &PrefillTensors::beta},
    {"a", &PrefillTensors::a},
    {"b", &PrefillTensors::b},
    {"a_log", &PrefillTensors::a_log},
    {"dt_bias", &PrefillTensors::dt_bias},
    {"cu_seqlens", &PrefillTensors::cu_seqlens},
    {"prefix_lens", &PrefillTensors::prefix_lens},
    {"initial_state", &PrefillTensors::initial_state},
    {"final_state", &PrefillTensors::final_state},
    {"state_indices", &PrefillTensors::state_indices},
    {"output_state_indices", &PrefillTensors::output_state_indices},
    {"has_initial_state", &PrefillTensors::has_initial_state},
    {"checkpoints", &PrefillTensors::checkpoints},
    {"checkpoint_state_indices", &PrefillTensors::checkpoint_state_indices},
    {"o", &PrefillTensors::o},
}};

}  // namespace gdnflow
