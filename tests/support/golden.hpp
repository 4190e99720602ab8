#pragma once

#include <gdnflow/oracle.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/safetensors.hpp>

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

/// The reference tensors of another implementation; tests/golden/README.md says what they hold.
namespace gdnflow::test {

inline constexpr std::array<std::string_view, 4> golden_names{
    "packed_gva", "no_decay_equal", "correlated_keys", "qwen3_next_layer"};

inline std::filesystem::path golden_path(std::string_view name) {
  return std::filesystem::path(GDNFLOW_TEST_DATA) / "golden" / (std::string(name) + ".safetensors");
}

struct Golden {
  SafetensorsFile file;
  Problem problem;
  OracleInputs inputs;

  static Golden open(std::string_view name) {
    Golden g{SafetensorsFile::open(golden_path(name)), {}, {}};
    g.inputs.q = g.file.find("q");
    g.inputs.k = g.file.find("k");
    g.inputs.v = g.file.find("v");
    g.inputs.g = g.file.find("g");
    g.inputs.beta = g.file.find("beta");
    if (g.file.contains("initial_state")) g.inputs.initial_state = g.file.find("initial_state");
    const TensorView& offsets = g.file.find("cu_seqlens");
    g.inputs.cu_seqlens.assign(offsets.as<const std::int32_t>(),
                               offsets.as<const std::int32_t>() + offsets.elements());
    g.problem.qk_heads = static_cast<std::int32_t>(g.inputs.q.extents[1]);
    g.problem.v_heads = static_cast<std::int32_t>(g.inputs.v.extents[1]);
    g.problem.initial_state = g.inputs.initial_state.data != nullptr;
    g.problem.qk_norm = g.file.metadata().at("qk_l2norm_in_kernel") == "true";
    return g;
  }

  const TensorView& o() const { return file.find("o"); }
  const TensorView& final_state() const { return file.find("final_state"); }
};

}  // namespace gdnflow::test
