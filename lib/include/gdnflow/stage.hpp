#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/step.hpp>
#include <gdnflow/tensor.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gdnflow {

// A stage is a contract: named ports. A variant is one implementation of it. A fused kernel is a
// variant of a bigger stage. Everything here is a value or a pure function: nothing allocates
// device memory, launches work or keeps state.

enum class Direction : std::uint8_t {
  in,
  out,
  inout,  ///< changed in place; a stage whose only outputs are inout can be switched off
};

/// How a port's element type follows from the problem and the variant.
enum class TypeRule : std::uint8_t {
  activation,  ///< Problem::activation; a host variant reads any floating type here
  state,       ///< Problem::state
  index,       ///< Problem::index
  working,     ///< an intermediate: f32 unless Variant::working_type says otherwise
  f32,
  i32,
  u8,
};

/// What becomes of the rows of an output that no sequence owns.
enum class Padding : std::uint8_t { untouched, zeroed };

/// One extent of a port: a literal, or a symbol with an offset ("T", "N+1"). Symbols with a value:
/// T, N, Hqk, Hv, Dk, Dv, C (chunk_tokens), NC (max_chunks), NS (segments: N + most_cuts), Sr and
/// Sc (rows and columns of a state in Problem::state_layout), PI and PO (states read and written: N
/// where each sequence has its own, free where indices point into a pool). Other symbols are free:
/// they take the extent of the tensor that is bound, so they may stand on external tensors only.
struct Extent {
  std::string symbol;       ///< empty: a literal
  std::int64_t offset = 0;  ///< added to the symbol's value; the value itself for a literal

  Extent(std::int64_t literal) : offset(literal) {}  // NOLINT(google-explicit-constructor)
  /// Parses "T", "N+1", "64". Errors: invalid_argument for anything else.
  GDNFLOW_API Extent(std::string_view text);  // NOLINT(google-explicit-constructor)
  Extent(const char* text)
      : Extent(std::string_view(text)) {}  // NOLINT(google-explicit-constructor)

  friend bool operator==(const Extent&, const Extent&) = default;
};

GDNFLOW_API std::string to_string(const Extent& extent);

/// The extent's value under a problem and capacity, or nothing for a free symbol.
GDNFLOW_API std::optional<std::int64_t> evaluate(const Extent& extent, const Problem& problem,
                                                 const Capacity& capacity);

struct Port {
  std::string name;
  Direction direction = Direction::in;
  TypeRule type = TypeRule::activation;
  std::vector<Extent> extents;
  bool optional = false;  ///< may stay unconnected; the problem says whether it must be there
  Padding padding = Padding::untouched;
};

/// Integer options of a variant by name, e.g. {"value_tile", 64}.
using Options = std::vector<std::pair<std::string, std::int64_t>>;

struct OptionSpec {
  std::string name;
  std::string description;
  std::int64_t default_value = 0;
  std::vector<std::int64_t> allowed;
};

/// The value of an option, or `fallback` when it is not set.
GDNFLOW_API std::int64_t option_or(const Options& options, std::string_view name,
                                   std::int64_t fallback) noexcept;

struct Stage;
struct Variant;

/// What the pure functions of a variant may look at before tensors exist.
struct VariantQuery {
  const Problem& problem;
  const Capacity& capacity;
  const DeviceInfo& device;
  const Options& options;
};

/// A named piece of temporary device or host memory that lives during one stage.
struct ScratchSpec {
  std::string name;
  std::int64_t bytes = 0;
};

/// One invocation of a stage: the problem, the machine, and the tensor on every port. Ports that
/// are not connected have null data. Scratch is 256-byte aligned, uninitialised u8.
struct StageCall {
  const Problem& problem;
  const Capacity& capacity;
  const DeviceInfo& device;
  const Options& options;
  const Stage& stage;
  std::span<const TensorView> tensors;  ///< in the order of Stage::ports
  std::span<const TensorView> scratch;  ///< in the order of Variant::scratch
  /// Rows of the bound tensors, at most the capacity's: of those that have T, and of those that
  /// have N. Grids, scratch and intermediates are of the capacity; no external row past these is
  /// read or written, and sequences past `sequences` are empty and without a slot.
  std::int64_t tokens = capacity.max_tokens;
  std::int64_t sequences = capacity.max_sequences;

  /// The tensor on a port. Errors: internal for a name that the stage does not have.
  GDNFLOW_API const TensorView& operator[](std::string_view port) const;
  /// Whether a port is connected. A connected tensor without elements may have null data.
  bool has(std::string_view port) const {
    const TensorView& tensor = (*this)[port];
    return tensor.data != nullptr || tensor.rank > 0;
  }
  std::int64_t option(std::string_view name, std::int64_t fallback) const noexcept {
    return option_or(options, name, fallback);
  }
};

/// One implementation of a stage. Function pointers, so that a variant is a printable value and
/// holds no state; null ones have the default named beside them.
struct Variant {
  std::string id;           ///< "naive", "host", "fused-128"
  std::string description;  ///< one line
  DeviceType target = DeviceType::host;
  std::vector<OptionSpec> options;

  /// Whether this variant can serve the problem on the device. Null: always.
  Support (*supports)(const VariantQuery& query) = nullptr;
  /// Element type of a `working` port. Null: f32.
  DType (*working_type)(const Problem& problem, std::string_view port) = nullptr;
  /// Temporary memory. Null: none.
  std::vector<ScratchSpec> (*scratch)(const VariantQuery& query) = nullptr;
  /// Whether bound tensors suit (alignment, strides); asked when pointers are bound. Null: yes.
  Support (*accepts)(const StageCall& call) = nullptr;
  /// Appends the work. Called when pointers are bound and again when they are rebound; the number
  /// and kinds of steps, the kernels and the cluster shapes must not depend on the pointers.
  void (*steps)(const StageCall& call, StepList& out) = nullptr;
};

struct Stage {
  std::string name;
  std::string description;
  std::vector<Port> ports;
  std::vector<Variant> variants;  ///< in order of preference; ids are unique within one target

  /// Index of a port, or -1.
  GDNFLOW_API int port_index(std::string_view port) const noexcept;
  /// The variant with this id for this target, or null.
  GDNFLOW_API const Variant* find(std::string_view id, DeviceType target) const noexcept;
};

/// Element type of a port under a problem, for a variant.
GDNFLOW_API DType resolve_type(const Port& port, const Problem& problem, const Variant& variant);

/// A variant with its options as text: "fused-128x512" or "fused-128x512:value_tile=64,stages=2".
struct VariantChoice {
  std::string id;
  Options options;

  friend bool operator==(const VariantChoice&, const VariantChoice&) = default;
};

/// Errors: invalid_argument for malformed text.
GDNFLOW_API VariantChoice parse_variant_choice(std::string_view text);
GDNFLOW_API std::string to_string(const VariantChoice& choice);

/// `supports`, after checking that the options exist and hold allowed values and that the variant's
/// target is the device's.
GDNFLOW_API Support supports(const Variant& variant, const VariantQuery& query);

}  // namespace gdnflow
