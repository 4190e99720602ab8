#include <gdnflow/cache.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/gdnflow.h>
#include <gdnflow/prefill.hpp>
#include <gdnflow/version.hpp>

#include "prefill_tensors.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <variant>

#include <fmt/format.h>

// The C interface: handles are C++ objects, tensors are views of DLPack's, and every exception ends
// here, as a status and a line of text a thread.

struct gdnflow_problem {
  gdnflow::Problem value;
};
struct gdnflow_prefill {
  gdnflow::Problem problem;
  gdnflow::PrefillTensors tensors;
  gdnflow::PrefillOptions options;
  std::int64_t sequences = 1;
};
struct gdnflow_graphs {
  gdnflow::GraphCache value;
};

namespace gdnflow {
namespace {

/// This thread's last error. Of a fixed size, so that saying that memory is out takes none.
thread_local std::array<char, 1024> last_error{};

/// One line: what would begin another, or be none that can be read, becomes a space.
gdnflow_status fail(gdnflow_status status, const char* what) noexcept {
  constexpr std::string_view cut = "...";
  std::size_t length = std::strlen(what);
  const bool whole = length < last_error.size();
  if (!whole) {
    length = last_error.size() - 1 - cut.size();
    // Not within a character of several bytes.
    while (length > 0 && (static_cast<unsigned char>(what[length]) & 0xc0U) == 0x80U) --length;
  }
  std::transform(what, what + length, last_error.begin(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20U || byte == 0x7fU ? ' ' : c;
  });
  if (!whole)
    length = static_cast<std::size_t>(
        std::copy(cut.begin(), cut.end(),
                  last_error.begin() + static_cast<std::ptrdiff_t>(length)) -
        last_error.begin());
  last_error[length] = '\0';
  return status;
}

gdnflow_status status_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return GDNFLOW_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return GDNFLOW_UNSUPPORTED;
    case ErrorCode::invalid_pipeline:
      return GDNFLOW_INVALID_PIPELINE;
    case ErrorCode::format:
      return GDNFLOW_FORMAT;
    case ErrorCode::io:
      return GDNFLOW_IO;
    case ErrorCode::cuda:
      return GDNFLOW_CUDA;
    case ErrorCode::internal:
      return GDNFLOW_INTERNAL;
  }
  return GDNFLOW_INTERNAL;
}

/// Runs f() and turns what it throws into a status.
template <class F>
gdnflow_status guarded(F&& f) noexcept {
  try {
    f();
    return GDNFLOW_OK;
  } catch (const Error& error) {
    return fail(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(GDNFLOW_OUT_OF_MEMORY, "expected memory of the host, found none left");
  } catch (const std::exception& error) {
    return fail(GDNFLOW_INTERNAL, error.what());
  } catch (...) {
    return fail(GDNFLOW_INTERNAL, "expected a standard exception, got something else");
  }
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

template <class T>
T& expect(T* pointer, std::string_view name) {
  if (pointer == nullptr) refuse(fmt::format("{}: expected a pointer, got NULL", name));
  return *pointer;
}

std::string_view expect_text(const char* text, std::string_view name) {
  return &expect(text, name);
}

/// The element of `all` that is called `text`; `what` is said of it where there is none.
template <class T, std::size_t N>
const T& find_named(const std::array<T, N>& all, std::string_view T::*name, std::string_view what,
                    std::string_view text) {
  std::string names;
  for (const T& known : all) {
    if (known.*name == text) return known;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", known.*name);
  }
  refuse(fmt::format("{}: expected one of {}, got '{}'", what, names, text));
}

// ---------------------------------------------------------------------------------------------
// Problems.

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

// ---------------------------------------------------------------------------------------------
// Tensors.

DType type_of(const DLDataType& type, std::string_view name) {
  constexpr int boolean = 6;  // kDLBool, which older headers lack
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 32) return DType::f32;
    if (type.code == kDLFloat && type.bits == 16) return DType::f16;
    if (type.code == kDLBfloat && type.bits == 16) return DType::bf16;
    if (type.code == kDLInt && type.bits == 32) return DType::i32;
    if (type.code == kDLInt && type.bits == 64) return DType::i64;
    if ((type.code == kDLUInt || type.code == boolean) && type.bits == 8) return DType::u8;
  }
  refuse(
      fmt::format("{}: expected float 32 or 16, bfloat 16, int 32 or 64, or uint 8, of 1 lane, got "
                  "DLPack's code {} "
                  "with {} bits and {} lanes",
                  name, type.code, type.bits, type.lanes));
}

Device device_of(const DLTensor& tensor, std::string_view name) {
  int type = 0;  // as a number: it may be none of the enumeration's
  static_assert(sizeof type == sizeof tensor.device.device_type);
  std::memcpy(&type, &tensor.device.device_type, sizeof type);
  if (type == kDLCPU) return {DeviceType::host, 0};
  if (type == kDLCUDA) return {DeviceType::cuda, tensor.device.device_id};
  refuse(fmt::format("{}: expected kDLCPU or kDLCUDA, got DLPack's device type {}", name, type));
}

TensorView view_of(const DLTensor& tensor, std::string_view name) {
  if (tensor.ndim < 1 || tensor.ndim > TensorView::max_rank) {
    refuse(fmt::format("{}: expected 1 to {} dimensions, got {}", name, TensorView::max_rank,
                       tensor.ndim));
  }
  expect(tensor.shape, fmt::format("{}: shape", name));
  const std::span<const std::int64_t> extents(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  for (const std::int64_t extent : extents) {
    if (extent < 0) refuse(fmt::format("{}: expected extents of at least 0, got {}", name, extent));
  }
  void* const data =
      tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  TensorView view =
      TensorView::dense(data, type_of(tensor.dtype, name), extents, device_of(tensor, name));
  if (tensor.strides != nullptr) std::copy_n(tensor.strides, tensor.ndim, view.strides.begin());
  return view;
}

Bindings bindings_of(const PrefillTensors& tensors) {
  Bindings bindings;
  for (const TensorName& name : tensor_names) {
    const TensorView& view = tensors.*name.member;
    if (view.rank > 0) bindings.emplace_back(name.edge, view);
  }
  return bindings;
}

}  // namespace
}  // namespace gdnflow

using namespace gdnflow;

extern "C" {

const char* gdnflow_error(void) { return last_error.data(); }

const char* gdnflow_version(void) { return GDNFLOW_VERSION; }

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

gdnflow_status gdnflow_prefill_create(const gdnflow_problem* problem, gdnflow_prefill** prefill) {
  return guarded([&] {
    gdnflow_prefill*& to = expect(prefill, "prefill");
    const Problem& p = expect(problem, "problem").value;
    validate(p);
    to = new gdnflow_prefill{p, {}, {}, 1};
  });
}

void gdnflow_prefill_destroy(gdnflow_prefill* prefill) { delete prefill; }

gdnflow_status gdnflow_prefill_bind(gdnflow_prefill* prefill, const char* name,
                                    const DLTensor* tensor) {
  return guarded([&] {
    gdnflow_prefill& to = expect(prefill, "prefill");
    const std::string_view text = expect_text(name, "name");
    const TensorName& known = find_named(tensor_names, &TensorName::edge, "name", text);
    to.tensors.*known.member = tensor == nullptr ? TensorView{} : view_of(*tensor, text);
  });
}

gdnflow_status gdnflow_prefill_recipe(gdnflow_prefill* prefill, const char* recipe) {
  return guarded([&] {
    gdnflow_prefill& to = expect(prefill, "prefill");
    const std::string_view id = expect_text(recipe, "recipe");
    if (!is_recipe(id)) {
      refuse(fmt::format("recipe: expected one of {}, got '{}'", recipe_ids(), id));
    }
    to.options.recipe = id;
  });
}

gdnflow_status gdnflow_prefill_variant(gdnflow_prefill* prefill, const char* stage,
                                       const char* choice) {
  return guarded([&] {
    gdnflow_prefill& to = expect(prefill, "prefill");
    const std::string name(expect_text(stage, "stage"));
    if (!builtin_stages().contains(name)) {
      refuse(fmt::format("stage: expected one of the library's, got '{}'", name));
    }
    if (choice == nullptr) {
      to.options.overrides.erase(name);
    } else {
      to.options.overrides.insert_or_assign(name, parse_variant_choice(choice));
    }
  });
}

gdnflow_status gdnflow_prefill_sequences(gdnflow_prefill* prefill, int64_t sequences) {
  return guarded([&] {
    gdnflow_prefill& to = expect(prefill, "prefill");
    if (sequences < 1) refuse(fmt::format("sequences: expected at least 1, got {}", sequences));
    to.sequences = sequences;
  });
}

gdnflow_status gdnflow_prefill_workspace_bytes(const gdnflow_prefill* prefill, int64_t* bytes) {
  return guarded([&] {
    std::int64_t& to = expect(bytes, "bytes");
    const gdnflow_prefill& from = expect(prefill, "prefill");
    const Capacity capacity = prefill_capacity(from.problem, from.tensors, from.sequences);
    to = prefill_workspace_bytes(from.problem, capacity, from.tensors.q.device, from.options);
  });
}

gdnflow_status gdnflow_prefill_run(const gdnflow_prefill* prefill, void* workspace,
                                   int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const gdnflow_prefill& from = expect(prefill, "prefill");
    gdnflow::prefill(from.problem, from.tensors, workspace, workspace_bytes,
                     static_cast<Stream>(stream), from.options, from.sequences);
  });
}

gdnflow_status gdnflow_graphs_create(size_t most, gdnflow_graphs** graphs) {
  return guarded([&] {
    gdnflow_graphs*& to = expect(graphs, "graphs");
    to = new gdnflow_graphs{GraphCache(most)};
  });
}

void gdnflow_graphs_destroy(gdnflow_graphs* graphs) { delete graphs; }

gdnflow_status gdnflow_graphs_run(gdnflow_graphs* graphs, const gdnflow_prefill* prefill,
                                  void* stream) {
  return guarded([&] {
    GraphCache& cache = expect(graphs, "graphs").value;
    const gdnflow_prefill& from = expect(prefill, "prefill");
    const GraphKey key{from.options.recipe, from.problem,
                       prefill_capacity(from.problem, from.tensors, from.sequences),
                       from.options.overrides, from.tensors.q.device};
    cache.get(key, bindings_of(from.tensors))->run(static_cast<Stream>(stream));
  });
}

gdnflow_status gdnflow_graphs_count(const gdnflow_graphs* graphs, gdnflow_graphs_stats* stats) {
  return guarded([&] {
    gdnflow_graphs_stats& to = expect(stats, "stats");
    const GraphCacheStats from = expect(graphs, "graphs").value.stats();
    to = {from.hits, from.misses, from.evictions, static_cast<std::uint64_t>(from.entries),
          from.arena_bytes};
  });
}

}  // extern "C"
