#pragma once

#include <gdnflow/pipeline.hpp>
#include <gdnflow/prefill.hpp>

#include <array>
#include <string>
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

/// The edge of each tensor in a pipeline; -1 where it has none.
using TensorEdges = std::array<int, tensor_names.size()>;
TensorEdges tensor_edges(const Pipeline& pipeline);

/// Which tensors the problem asks for must be there, and no others: one that is there but would be
/// ignored is a misunderstanding. Errors: invalid_argument, beginning with `who`.
void check_presence(const Pipeline& pipeline, const TensorEdges& edges,
                    const PrefillTensors& tensors, std::string_view who);

/// to_string, for a tensor whose rank may be out of range.
std::string describe(const TensorView& tensor);

}  // namespace gdnflow
