#include "common/tensors.hpp"

#include <gdnflow/error.hpp>

#include "common/raw_gates.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include <Eigen/Core>
#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

// Calls `f` with a null pointer of the element's C++ type.
template <class F>
void with_float_type(DType type, F&& f) {
  if (type == DType::f32) f(static_cast<float*>(nullptr));
  if (type == DType::bf16) f(static_cast<Eigen::bfloat16*>(nullptr));
  if (type == DType::f16) f(static_cast<Eigen::half*>(nullptr));
}

void convert_floats(const TensorView& from, void* to, DType type) {
  const std::int64_t elements = from.elements();
  with_float_type(from.dtype, [&](auto* source_type) {
    using Source = std::remove_pointer_t<decltype(source_type)>;
    with_float_type(type, [&](auto* target_type) {
      using Target = std::remove_pointer_t<decltype(target_type)>;
      const Source* source = from.as<const Source>();
      std::transform(source, source + elements, static_cast<Target*>(to),
                     [](Source value) { return static_cast<Target>(static_cast<float>(value)); });
    });
  });
}

std::int64_t integer_at(const TensorView& tensor, std::int64_t i) {
  return tensor.dtype == DType::i32 ? tensor.as<const std::int32_t>()[i]
                                    : tensor.as<const std::int64_t>()[i];
}

void convert_integers(const TensorView& from, void* to, DType type) {
  for (std::int64_t i = 0; i < from.elements(); ++i) {
    const std::int64_t value = integer_at(from, i);
    if (type == DType::i64) {
      static_cast<std::int64_t*>(to)[i] = value;
    } else if (std::in_range<std::int32_t>(value)) {
      static_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(value);
    } else {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("expected integers that fit in i32, got {}", value));
    }
  }
}

bool is_integer(DType type) { return type == DType::i32 || type == DType::i64; }

}  // namespace

OwnedTensor make_tensor(Device device, DType type, std::span<const std::int64_t> extents) {
  const TensorView shape = TensorView::dense(nullptr, type, extents, device);
  OwnedTensor tensor{Memory(device, shape.bytes()), shape};
  tensor.view.data = tensor.memory.data();
  return tensor;
}

OwnedTensor copy_to(Device device, const TensorView& host, DType type) {
  const std::span extents(host.extents.data(), static_cast<std::size_t>(host.rank));
  OwnedTensor result = make_tensor(device, type, extents);
  if (host.dtype == type) {
    upload(result.view.data, device, host.data, host.bytes());
    return result;
  }
  Memory converted;
  void* target = result.view.data;
  if (device.type != DeviceType::host) {
    converted = Memory({}, result.view.bytes());
    target = converted.data();
  }
  if (is_float(host.dtype) && is_float(type)) {
    convert_floats(host, target, type);
  } else if (is_integer(host.dtype) && is_integer(type)) {
    convert_integers(host, target, type);
  } else {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("expected a tensor of type {} or one that converts to it, got {}",
                            to_string(type), to_string(host)));
  }
  if (device.type != DeviceType::host) {
    upload(result.view.data, device, target, result.view.bytes());
  }
  return result;
}

OwnedTensor copy_to_host(const TensorView& tensor) {
  OwnedTensor result = make_tensor(
      {}, tensor.dtype, std::span(tensor.extents.data(), static_cast<std::size_t>(tensor.rank)));
  download(result.view.data, tensor.data, tensor.device, tensor.bytes());
  return result;
}

TensorView first_rows(TensorView tensor, std::int64_t rows) {
  tensor.extents[0] = rows;
  return tensor;
}

TensorView rows_of(TensorView tensor, std::int64_t first, std::int64_t rows) {
  tensor.data = tensor.as<std::byte>() +
                first * tensor.strides[0] * static_cast<std::int64_t>(size_of(tensor.dtype));
  return first_rows(tensor, rows);
}

void copy_tensor(const TensorView& from, const TensorView& to, Stream stream) {
  if (from.device.type == DeviceType::host) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes()));
  } else {
    copy_within(to.data, from.data, from.bytes(), stream);
  }
}

TensorView reshaped(const TensorView& tensor, std::span<const std::int64_t> extents) {
  return TensorView::dense(tensor.data, tensor.dtype, extents, tensor.device);
}

std::vector<std::int64_t> offsets_of(std::span<const std::int64_t> lengths) {
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

std::vector<std::int64_t> state_extents(const Problem& problem, std::int64_t rows) {
  const std::int64_t dk = problem.qk_dim;
  const std::int64_t dv = problem.v_dim;
  if (problem.state_layout == StateLayout::kv) return {rows, problem.v_heads, dk, dv};
  return {rows, problem.v_heads, dv, dk};
}

Bindings Workload::bindings() const {
  Bindings bound;
  for (const auto& [name, tensor] : tensors) bound.emplace_back(name, tensor.view);
  return bound;
}

void Workload::set_lengths(std::span<const std::int64_t> lengths) {
  cu_seqlens = offsets_of(lengths);
  const TensorView host = TensorView::dense(cu_seqlens.data(), DType::i64,
                                            {static_cast<std::int64_t>(cu_seqlens.size())});
  const TensorView& target = view("cu_seqlens");
  const OwnedTensor converted = copy_to({}, host, target.dtype);
  upload(target.data, target.device, converted.view.data, target.bytes());
}

OracleInputs Workload::oracle_inputs() const {
  OracleInputs inputs;
  inputs.q = first_rows(view("q"), tokens());
  inputs.k = first_rows(view("k"), tokens());
  inputs.v = first_rows(view("v"), tokens());
  const auto gates = [&](const char* name) {
    const auto found = ready.find(name);
    return first_rows(found == ready.end() ? view(name) : found->second.view, tokens());
  };
  inputs.g = gates("g");
  inputs.beta = gates("beta");
  if (problem.initial_state) inputs.initial_state = view("initial_state");
  inputs.cu_seqlens = cu_seqlens;
  return inputs;
}

void Workload::poison_outputs() const {
  for (const char* name : {"o", "final_state"}) {
    if (const auto found = tensors.find(name); found != tensors.end()) {
      const TensorView& output = found->second.view;
      fill_bytes(output.data, output.device, 0xff, output.bytes());
    }
  }
}

void add_outputs(Workload& workload) {
  const Problem& p = workload.problem;
  const std::array<std::int64_t, 3> o{workload.capacity.max_tokens, p.v_heads, p.v_dim};
  workload.tensors["o"] = make_tensor(workload.device, p.activation, o);
  if (p.final_state) {
    workload.tensors["final_state"] =
        make_tensor(workload.device, p.state, state_extents(p, workload.capacity.max_sequences));
  }
}

Workload make_workload(const Problem& problem, const Capacity& capacity,
                       std::span<const std::int64_t> lengths, Distribution distribution,
                       std::uint64_t seed, Device device) {
  validate(problem, capacity);
  Workload workload{problem, capacity, device, {}, {}, {}};
  const auto add = [&](const char* name, InputKind kind, DType type,
                       const std::vector<std::int64_t>& extents) {
    OwnedTensor tensor = make_tensor(device, type, extents);
    fill_input(kind, distribution, seed, tensor.view);
    workload.tensors[name] = std::move(tensor);
  };
  const std::int64_t rows = capacity.max_tokens;
  add("q", query_input(problem), problem.activation, {rows, problem.qk_heads, problem.qk_dim});
  add("k", key_input(problem), problem.activation, {rows, problem.qk_heads, problem.qk_dim});
  add("v", InputKind::v, problem.activation, {rows, problem.v_heads, problem.v_dim});
  add("g", InputKind::g, DType::f32, {rows, problem.v_heads});
  add("beta", InputKind::beta, DType::f32, {rows, problem.v_heads});
  if (problem.initial_state) {
    add("initial_state", InputKind::initial_state, problem.state,
        state_extents(problem, capacity.max_sequences));
  }
  const std::array<std::int64_t, 1> offsets{capacity.max_sequences + 1};
  workload.tensors["cu_seqlens"] = make_tensor(device, problem.index, offsets);
  workload.set_lengths(lengths);
  hand_over_raw_gates(workload);
  add_outputs(workload);
  return workload;
}

}  // namespace gdnflow::apps
