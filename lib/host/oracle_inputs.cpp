#include "host/oracle_inputs.hpp"

#include <gdnflow/error.hpp>

#include <cmath>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

void check_tensor(std::string_view name, const TensorView& view,
                  const std::vector<std::int64_t>& extents, Device device) {
  const auto got = std::span(view.extents.data(), static_cast<std::size_t>(view.rank));
  if (!std::equal(got.begin(), got.end(), extents.begin(), extents.end())) {
    refuse(
        fmt::format("{}: expected [{}], got {}", name, fmt::join(extents, ","), to_string(view)));
  }
  if (view.device != device) {
    refuse(fmt::format("{}: expected a tensor on {}, got {}", name, to_string(device),
                       to_string(view)));
  }
  if (view.elements() == 0) return;
  if (view.data == nullptr) refuse(fmt::format("{}: has no data", name));
  if (view.extents[view.rank - 1] != 1 && view.strides[view.rank - 1] != 1) {
    refuse(fmt::format("{}: expected a contiguous last dimension, got {}", name, to_string(view)));
  }
}

void check_float(std::string_view name, const TensorView& view) {
  if (!is_float(view.dtype)) {
    refuse(fmt::format("{}: expected f32, bf16 or f16, got {}", name, to_string(view.dtype)));
  }
}

void check_f32(std::string_view name, const TensorView& view) {
  if (view.dtype != DType::f32) {
    refuse(fmt::format("{}: expected f32, got {}", name, to_string(view.dtype)));
  }
}

void check_lengths(const std::vector<std::int64_t>& cu_seqlens, std::int64_t tokens) {
  if (cu_seqlens.empty()) refuse("cu_seqlens: expected N+1 entries, got none");
  std::int64_t previous = 0;
  for (const std::int64_t entry : cu_seqlens) {
    if (entry < previous || entry > tokens) {
      refuse(
          fmt::format("cu_seqlens: expected entries that rise from at least 0 to at most {}, "
                      "got {} after {}",
                      tokens, entry, previous));
    }
    previous = entry;
  }
}

}  // namespace

OracleShape check_oracle_inputs(const Problem& problem, const OracleInputs& in, DeviceType device) {
  validate(problem);
  if (in.q.device.type != device) {
    refuse(fmt::format("q: expected a tensor on {}, got {}", to_string(device), to_string(in.q)));
  }
  const std::int64_t tokens = in.q.rank == 0 ? 0 : in.q.extents[0];
  check_tensor("q", in.q, {tokens, problem.qk_heads, problem.qk_dim}, in.q.device);
  check_tensor("k", in.k, {tokens, problem.qk_heads, problem.qk_dim}, in.q.device);
  check_tensor("v", in.v, {tokens, problem.v_heads, problem.v_dim}, in.q.device);
  check_tensor("g", in.g, {tokens, problem.v_heads}, in.q.device);
  check_tensor("beta", in.beta, {tokens, problem.v_heads}, in.q.device);
  check_float("q", in.q);
  check_float("k", in.k);
  check_float("v", in.v);
  check_f32("g", in.g);
  check_f32("beta", in.beta);
  check_lengths(in.cu_seqlens, tokens);
  const auto sequences = static_cast<std::int64_t>(in.cu_seqlens.size()) - 1;
  if (in.initial_state.data != nullptr) {
    const bool kv = problem.state_layout == StateLayout::kv;
    check_tensor("initial_state", in.initial_state,
                 {sequences, problem.v_heads, kv ? problem.qk_dim : problem.v_dim,
                  kv ? problem.v_dim : problem.qk_dim},
                 in.q.device);
    check_float("initial_state", in.initial_state);
  }
  // In double where it is the usual one: a kernel's fp32 scale is part of the kernel's error.
  const double scale = problem.scale != 0.0F ? static_cast<double>(problem.scale)
                                             : 1.0 / std::sqrt(static_cast<double>(problem.qk_dim));
  return {tokens, sequences, scale};
}

}  // namespace gdnflow
