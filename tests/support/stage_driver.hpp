#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/registry.hpp>
#include <gdnflow/stage.hpp>

#include "support/tensor.hpp"

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

namespace gdnflow::test {

/// Runs host variants one by one on tensors known by name, without pipelines or executors: what a
/// stage computes is tested apart from what carries it.
class StageDriver {
 public:
  using Connections = std::map<std::string, std::string, std::less<>>;  ///< port -> tensor

  StageDriver(const Problem& problem, const Capacity& capacity)
      : problem_(problem), capacity_(capacity), device_(device_info(Device{})) {}

  const Problem& problem() const noexcept { return problem_; }
  const Capacity& capacity() const noexcept { return capacity_; }
  /// Of the machine that stages plan for.
  void set_multiprocessors(std::int32_t count) noexcept { device_.multiprocessors = count; }

  /// Takes over a tensor.
  TensorView add(const std::string& name, HostTensor tensor) {
    owned_[name] = std::move(tensor);
    return views_[name] = owned_[name].view();
  }
  /// Uses memory that the caller keeps.
  void add_view(const std::string& name, const TensorView& view) { views_[name] = view; }
  /// Makes a tensor whose every byte is 0xff: NaN in each floating type, -1 in the integers.
  TensorView add_poisoned(const std::string& name, DType type,
                          const std::vector<std::int64_t>& extents) {
    HostTensor tensor(type, extents);
    std::memset(tensor.view().data, 0xff, static_cast<std::size_t>(tensor.view().bytes()));
    return add(name, std::move(tensor));
  }
  /// The same for a state of `rows` slots in the problem's layout and type.
  TensorView add_poisoned_states(const std::string& name, std::int64_t rows) {
    const bool kv = problem_.state_layout == StateLayout::kv;
    return add_poisoned(name, problem_.state,
                        {rows, problem_.v_heads, kv ? problem_.qk_dim : problem_.v_dim,
                         kv ? problem_.v_dim : problem_.qk_dim});
  }
  TensorView add_index(const std::string& name, const std::vector<std::int64_t>& values) {
    return problem_.index == DType::i64 ? add_integers<std::int64_t>(name, DType::i64, values)
                                        : add_integers<std::int32_t>(name, DType::i32, values);
  }
  TensorView add_i32(const std::string& name, const std::vector<std::int64_t>& values) {
    return add_integers<std::int32_t>(name, DType::i32, values);
  }
  TensorView add_flags(const std::string& name, const std::vector<std::int64_t>& values) {
    return add_integers<std::uint8_t>(name, DType::u8, values);
  }

  bool has(std::string_view name) const { return views_.find(name) != views_.end(); }
  const TensorView& operator[](std::string_view name) const {
    const auto it = views_.find(name);
    if (it == views_.end()) throw std::out_of_range("no tensor '" + std::string(name) + "'");
    return it->second;
  }

  /// Runs a stage's host variant. A port takes the tensor of its own name unless `connect` names
  /// another; outputs that do not exist yet are made, poisoned.
  void run(std::string_view stage_name, const Connections& connect = {}) {
    const Stage& stage = builtin_stages().find(stage_name);
    const Variant* variant = stage.find("host", DeviceType::host);
    REQUIRE(variant != nullptr);
    std::vector<TensorView> tensors;
    for (const Port& port : stage.ports) tensors.push_back(tensor_on(port, *variant, connect));

    const Options options;
    const VariantQuery query{problem_, capacity_, device_, options};
    const Support supported = supports(*variant, query);
    REQUIRE_MESSAGE(supported.ok, supported.reason);
    const StageCall call{problem_, capacity_, device_, options, stage, tensors, {}};
    if (variant->accepts != nullptr) {
      const Support accepted = variant->accepts(call);
      REQUIRE_MESSAGE(accepted.ok, accepted.reason);
    }
    StepList steps;
    variant->steps(call, steps);
    REQUIRE(!steps.empty());
    for (const Step& step : steps) std::get<HostCall>(step.work).function(call);
  }

 private:
  template <class T>
  TensorView add_integers(const std::string& name, DType type,
                          const std::vector<std::int64_t>& values) {
    HostTensor tensor(type, {static_cast<std::int64_t>(values.size())});
    for (std::size_t i = 0; i < values.size(); ++i) tensor.as<T>()[i] = static_cast<T>(values[i]);
    return add(name, std::move(tensor));
  }

  TensorView tensor_on(const Port& port, const Variant& variant, const Connections& connect) {
    const auto named = connect.find(port.name);
    const std::string& name = named == connect.end() ? port.name : named->second;
    const auto it = views_.find(name);
    if (it != views_.end()) return it->second;
    if (port.optional) return {};
    REQUIRE_MESSAGE(port.direction == Direction::out, "no tensor for port ", port.name);
    std::vector<std::int64_t> extents;
    for (const Extent& extent : port.extents) {
      extents.push_back(evaluate(extent, problem_, capacity_).value());
    }
    return add_poisoned(name, resolve_type(port, problem_, variant), extents);
  }

  Problem problem_;
  Capacity capacity_;
  DeviceInfo device_;
  std::map<std::string, HostTensor, std::less<>> owned_;
  std::map<std::string, TensorView, std::less<>> views_;
};

/// The ways from the log decay to o and the final state.
enum class Form { document, residual, fused, one_pass };

inline constexpr Form forms[] = {Form::document, Form::residual, Form::fused, Form::one_pass};

inline const char* to_string(Form form) {
  switch (form) {
    case Form::document:
      return "document";
    case Form::residual:
      return "residual";
    case Form::fused:
      return "fused";
    case Form::one_pass:
      return "one_pass";
  }
  return "?";
}

/// Runs the stages of a form on q, k, v, g, beta and whatever else the driver has.
inline void run_form(StageDriver& driver, Form form) {
  if (form == Form::one_pass) {
    driver.run("one_pass");
    return;
  }
  for (const char* stage : {"chunk_index", "chunk_cumsum", "kkt_solve"}) driver.run(stage);
  if (form == Form::document) {
    driver.run("wu");
    driver.run("chunk_state");
  }
  if (form == Form::residual) driver.run("residual_state");
  driver.run(form == Form::fused ? "fused_prefill" : "chunk_output");
}

/// A driver with a problem's inputs and, where the problem has one, a poisoned final state.
inline StageDriver make_driver(const Problem& p, const Inputs& in) {
  const auto sequences = static_cast<std::int64_t>(in.cu_seqlens.size()) - 1;
  StageDriver driver(p, {in.q.view().extents[0], sequences});
  driver.add("q", in.q);
  driver.add("k", in.k);
  driver.add("v", in.v);
  driver.add("g", in.g);
  driver.add("beta", in.beta);
  if (p.cu_seqlens) driver.add_index("cu_seqlens", in.cu_seqlens);
  if (p.initial_state) driver.add("initial_state", in.initial_state);
  if (p.final_state) driver.add_poisoned_states("final_state", sequences);
  return driver;
}

}  // namespace gdnflow::test
