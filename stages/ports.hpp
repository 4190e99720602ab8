#pragma once

#include <gdnflow/stage.hpp>

#include <vector>

// Ports that several stages share; gdnflow/stages.hpp says what each tensor holds.

namespace gdnflow::stages {

inline Port port(std::string name, Direction direction, TypeRule type,
                 std::vector<Extent> extents) {
  return {std::move(name), direction, type, std::move(extents), false, Padding::untouched};
}
inline Port in(std::string name, TypeRule type, std::vector<Extent> extents) {
  return port(std::move(name), Direction::in, type, std::move(extents));
}
inline Port out(std::string name, TypeRule type, std::vector<Extent> extents) {
  return port(std::move(name), Direction::out, type, std::move(extents));
}
inline Port optional(Port p) {
  p.optional = true;
  return p;
}

inline Port q() { return in("q", TypeRule::activation, {"T", "Hqk", "Dk"}); }
inline Port k() { return in("k", TypeRule::activation, {"T", "Hqk", "Dk"}); }
inline Port v() { return in("v", TypeRule::activation, {"T", "Hv", "Dv"}); }
inline Port beta() { return in("beta", TypeRule::f32, {"T", "Hv"}); }
inline Port g_cumsum() { return in("g_cumsum", TypeRule::f32, {"T", "Hv"}); }
inline Port a_matrix() { return in("A", TypeRule::working, {"T", "Hv", "C"}); }
inline Port o() { return out("o", TypeRule::activation, {"T", "Hv", "Dv"}); }

/// Gates and beta as a caller hands them over; each form takes its own.
inline std::vector<Port> gate_ports() {
  return {
      optional(in("g", TypeRule::f32, {"T", "Hv"})),
      optional(in("a", TypeRule::activation, {"T", "Hv"})),
      optional(in("a_log", TypeRule::f32, {"Hv"})),
      optional(in("dt_bias", TypeRule::f32, {"Hv"})),
      optional(in("beta", TypeRule::f32, {"T", "Hv"})),
      optional(in("b", TypeRule::activation, {"T", "Hv"})),
  };
}

/// The chunk table as every stage behind chunk_index reads it.
inline std::vector<Port> chunk_ports() {
  return {in("chunk_table", TypeRule::i32, {"NC", 4}), in("chunk_offsets", TypeRule::i32, {"N+1"}),
          in("chunk_counts", TypeRule::i32, {4})};
}

/// Initial and final states, slots, flags and checkpoints. "PC" and "K" are free, "PI" and "PO"
/// where the states lie in a pool.
inline std::vector<Port> state_ports() {
  return {
      optional(in("initial_state", TypeRule::state, {"PI", "Hv", "Sr", "Sc"})),
      optional(in("state_indices", TypeRule::i32, {"N"})),
      optional(in("output_state_indices", TypeRule::i32, {"N"})),
      optional(in("has_initial_state", TypeRule::u8, {"N"})),
      optional(in("checkpoint_state_indices", TypeRule::i32, {"K"})),
      optional(out("final_state", TypeRule::state, {"PO", "Hv", "Sr", "Sc"})),
      optional(out("checkpoints", TypeRule::state, {"PC", "Hv", "Sr", "Sc"})),
  };
}

inline Port checkpoint_offsets() {
  return optional(in("checkpoint_offsets", TypeRule::i32, {"N+1"}));
}

/// Segments, for a stage that can make use of them.
inline std::vector<Port> segment_ports() {
  return {
      optional(in("segment_slots", TypeRule::i32, {"NS", 4})),
      optional(in("segment_starts", TypeRule::i32, {"NS", "Hv"})),
      optional(in("segment_bounds", TypeRule::f32, {"NS", "Hv"})),
  };
}

/// Lists of ports, one behind another.
template <class... Lists>
std::vector<Port> ports(std::vector<Port> first, const Lists&... rest) {
  (first.insert(first.end(), rest.begin(), rest.end()), ...);
  return first;
}

}  // namespace gdnflow::stages
