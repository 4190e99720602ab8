#pragma once

#include <gdnflow/executor.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/problem.hpp>

#include "host/convert.hpp"
#include "support/tensor.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gdnflow::test {

/// Multiplies every element.
template <class T>
void scale(HostTensor& tensor, float factor) {
  T* const elements = tensor.as<T>();
  for (std::int64_t i = 0; i < tensor.view().elements(); ++i) {
    elements[i] = static_cast<T>(factor * static_cast<float>(elements[i]));
  }
}

/// Every external tensor of a problem at a capacity, on the host and by the names of
/// gdnflow/stages.hpp. What no sequence owns, and every output, holds NaN (bytes of 0xff), so that
/// a read of it shows. Sequences past the given lengths are empty.
class Externals {
 public:
  Externals(const Problem& problem, const Capacity& capacity,
            const std::vector<std::int64_t>& lengths,
            Distribution distribution = Distribution::random_decay, std::uint64_t seed = 1)
      : problem_(problem), capacity_(capacity), offsets_(offsets_of(lengths)) {
    offsets_.resize(static_cast<std::size_t>(capacity.max_sequences) + 1, offsets_.back());
    const Problem& p = problem;
    const std::int64_t tokens = capacity.max_tokens;
    const auto draw = [&](std::string name, InputKind kind, DType type,
                          std::vector<std::int64_t> extents) {
      HostTensor tensor(type, std::move(extents));
      fill_input(kind, distribution, seed, tensor);
      tensors_[std::move(name)] = std::move(tensor);
    };
    draw("q", query_input(p), p.activation, {tokens, p.qk_heads, p.qk_dim});
    draw("k", key_input(p), p.activation, {tokens, p.qk_heads, p.qk_dim});
    draw("v", InputKind::v, p.activation, {tokens, p.v_heads, p.v_dim});
    draw("g", InputKind::g, DType::f32, {tokens, p.v_heads});
    draw("beta", InputKind::beta, DType::f32, {tokens, p.v_heads});
    oracle_g_ = tensors_["g"];
    oracle_beta_ = tensors_["beta"];
    turn_gates(seed);
    if (p.initial_state) draw("initial_state", InputKind::initial_state, p.state, state_extents());
    for (const char* name : {"q", "k", "v", "g", "beta", "a", "b"}) poison_padding(name);
    if (p.cu_seqlens) set_index("cu_seqlens", offsets_);
    make_output("o", p.activation, {tokens, p.v_heads, p.v_dim});
    if (p.final_state) make_output("final_state", p.state, state_extents());
  }

  const Problem& problem() const noexcept { return problem_; }
  const Capacity& capacity() const noexcept { return capacity_; }
  const std::vector<std::int64_t>& offsets() const noexcept { return offsets_; }
  std::int64_t tokens() const noexcept { return offsets_.back(); }
  std::map<std::string, HostTensor>& tensors() noexcept { return tensors_; }
  const std::map<std::string, HostTensor>& tensors() const noexcept { return tensors_; }
  HostTensor& operator[](const std::string& name) { return tensors_.at(name); }

  /// Of a problem that takes log decays: for the call and the oracle.
  void set_log_decay(std::int64_t token, std::int64_t head, float value) {
    const std::int64_t at = token * problem_.v_heads + head;
    tensors_.at("g").as<float>()[at] = value;
    oracle_g_.as<float>()[at] = value;
  }

  Bindings bindings() const {
    Bindings list;
    for (const auto& [name, tensor] : tensors_) list.emplace_back(name, tensor.view());
    return list;
  }

  OracleInputs oracle_inputs() const {
    OracleInputs inputs;
    inputs.q = tensors_.at("q");
    inputs.k = tensors_.at("k");
    inputs.v = tensors_.at("v");
    inputs.g = oracle_g_;
    inputs.beta = oracle_beta_;
    if (problem_.initial_state) inputs.initial_state = tensors_.at("initial_state");
    inputs.cu_seqlens = offsets_;
    return inputs;
  }

  /// The rows of `o` that sequences own.
  TensorView owned_o() const { return owned(tensors_.at("o").view()); }
  TensorView owned(TensorView o) const {
    o.extents[0] = tokens();
    return o;
  }
  /// Elements of `owned_o`.
  std::size_t owned_elements() const {
    return static_cast<std::size_t>(tokens() * problem_.v_heads * problem_.v_dim);
  }
  /// Whether every byte of `o` past the last sequence has this value.
  bool padding_of_o_is(unsigned char value) const {
    const TensorView& o = tensors_.at("o").view();
    const auto* bytes = static_cast<const unsigned char*>(o.data);
    for (std::int64_t i = owned(o).bytes(); i < o.bytes(); ++i) {
      if (bytes[i] != value) return false;
    }
    return true;
  }

 private:
  std::vector<std::int64_t> state_extents() const {
    const bool kv = problem_.state_layout == StateLayout::kv;
    return {capacity_.max_sequences, problem_.v_heads, kv ? problem_.qk_dim : problem_.v_dim,
            kv ? problem_.v_dim : problem_.qk_dim};
  }

  void make_output(const std::string& name, DType type, std::vector<std::int64_t> extents) {
    HostTensor tensor(type, std::move(extents));
    std::memset(tensor.view().data, 0xff, static_cast<std::size_t>(tensor.view().bytes()));
    tensors_[name] = std::move(tensor);
  }

  void set_index(const std::string& name, const std::vector<std::int64_t>& values) {
    HostTensor tensor(problem_.index, {static_cast<std::int64_t>(values.size())});
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (problem_.index == DType::i64) {
        tensor.as<std::int64_t>()[i] = values[i];
      } else {
        tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(values[i]);
      }
    }
    tensors_[name] = std::move(tensor);
  }

  void poison_padding(const std::string& name) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return;
    const TensorView& view = found->second.view();
    const std::int64_t kept = owned(view).bytes();
    std::memset(static_cast<char*>(view.data) + kept, 0xff,
                static_cast<std::size_t>(view.bytes() - kept));
  }

  /// Puts the gates into the form that the problem asks for; the oracle keeps log decay and beta.
  void turn_gates(std::uint64_t seed) {
    float* g = oracle_g_.as<float>();
    float* beta = oracle_beta_.as<float>();
    const auto count = static_cast<std::size_t>(oracle_g_.view().elements());
    const auto heads = static_cast<std::size_t>(problem_.v_heads);
    if (problem_.gate == GateForm::alpha) {
      float* alpha = tensors_["g"].as<float>();
      for (std::size_t i = 0; i < count; ++i) {
        alpha[i] = std::exp(g[i]);
        g[i] = std::log(alpha[i]);
      }
    } else if (problem_.gate == GateForm::raw) {
      tensors_.erase("g");
      const std::vector<float> a = draw_gate("a", seed + 1, -4.0F, 0.0F);
      HostTensor a_log(DType::f32, {problem_.v_heads});
      HostTensor dt_bias(DType::f32, {problem_.v_heads});
      fill_uniform(seed + 2, -2.0F, 1.0F, a_log);
      fill_uniform(seed + 3, -1.0F, 1.0F, dt_bias);
      for (std::size_t i = 0; i < count; ++i) {
        const double x = double{a[i]} + double{dt_bias.as<float>()[i % heads]};
        const double rate = std::exp(double{a_log.as<float>()[i % heads]});
        g[i] = static_cast<float>(-rate * std::log1p(std::exp(x)));
      }
      tensors_["a_log"] = std::move(a_log);
      tensors_["dt_bias"] = std::move(dt_bias);
    }
    if (problem_.beta == BetaForm::logit) {
      tensors_.erase("beta");
      const std::vector<float> b = draw_gate("b", seed + 4, -3.0F, 3.0F);
      for (std::size_t i = 0; i < count; ++i) {
        beta[i] = static_cast<float>(1.0 / (1.0 + std::exp(-double{b[i]})));
      }
    }
  }

  /// Draws a raw gate in the activations' type and gives the numbers that it holds.
  std::vector<float> draw_gate(const std::string& name, std::uint64_t seed, float low, float high) {
    HostTensor tensor(problem_.activation, {capacity_.max_tokens, problem_.v_heads});
    fill_uniform(seed, low, high, tensor);
    std::vector<float> values(static_cast<std::size_t>(tensor.view().elements()));
    host::load(tensor.view(), 0, tensor.view().elements(), values.data());
    tensors_[name] = std::move(tensor);
    return values;
  }

  Problem problem_;
  Capacity capacity_;
  std::vector<std::int64_t> offsets_;
  std::map<std::string, HostTensor> tensors_;
  HostTensor oracle_g_;
  HostTensor oracle_beta_;
};

}  // namespace gdnflow::test
