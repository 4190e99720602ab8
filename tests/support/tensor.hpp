#pragma once

#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/tensor.hpp>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <utility>
#include <vector>

/// Host tensors that own their memory, and a problem's inputs made of them.
namespace gdnflow::test {

/// A dense host tensor, zeroed when made.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, std::vector<std::int64_t> extents) {
    view_ = TensorView::dense(nullptr, dtype, extents);
    // As 64-bit words, so that every element type is aligned; one more keeps `data` non-null.
    storage_.assign(static_cast<std::size_t>(view_.bytes()) / 8 + 1, 0);
    view_.data = storage_.data();
  }
  HostTensor(const HostTensor& other) : storage_(other.storage_), view_(other.view_) {
    if (view_.data != nullptr) view_.data = storage_.data();
  }
  HostTensor(HostTensor&& other) noexcept : HostTensor() { swap(other); }
  HostTensor& operator=(HostTensor other) noexcept {
    swap(other);
    return *this;
  }
  ~HostTensor() = default;

  const TensorView& view() const noexcept { return view_; }
  operator const TensorView&() const noexcept { return view_; }  // NOLINT
  template <class T>
  T* as() const noexcept {
    return view_.as<T>();
  }

 private:
  void swap(HostTensor& other) noexcept {
    storage_.swap(other.storage_);
    std::swap(view_, other.view_);
  }

  std::vector<std::uint64_t> storage_;
  TensorView view_{};
};

/// [0, l0, l0 + l1, ...].
inline std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> offsets(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), offsets.begin() + 1);
  return offsets;
}

/// Inputs of a problem for packed sequences of the given lengths.
struct Inputs {
  HostTensor q, k, v, g, beta, initial_state;
  std::vector<std::int64_t> cu_seqlens;

  /// Draws all of them; the initial state only where the problem has one.
  static Inputs draw(const Problem& p, const std::vector<std::int64_t>& lengths,
                     Distribution distribution, std::uint64_t seed) {
    Inputs in;
    in.cu_seqlens = offsets_of(lengths);
    const std::int64_t tokens = in.cu_seqlens.back();
    const auto make = [&](InputKind kind, DType type, std::vector<std::int64_t> extents) {
      HostTensor tensor(type, std::move(extents));
      fill_input(kind, distribution, seed, tensor);
      return tensor;
    };
    in.q = make(query_input(p), p.activation, {tokens, p.qk_heads, p.qk_dim});
    in.k = make(key_input(p), p.activation, {tokens, p.qk_heads, p.qk_dim});
    in.v = make(InputKind::v, p.activation, {tokens, p.v_heads, p.v_dim});
    in.g = make(InputKind::g, DType::f32, {tokens, p.v_heads});
    in.beta = make(InputKind::beta, DType::f32, {tokens, p.v_heads});
    if (p.initial_state) {
      const bool kv = p.state_layout == StateLayout::kv;
      in.initial_state = make(InputKind::initial_state, p.state,
                              {static_cast<std::int64_t>(lengths.size()), p.v_heads,
                               kv ? p.qk_dim : p.v_dim, kv ? p.v_dim : p.qk_dim});
    }
    return in;
  }

  OracleInputs views() const {
    return {q.view(), k.view(), v.view(), g.view(), beta.view(), initial_state.view(), cu_seqlens};
  }
};

}  // namespace gdnflow::test
