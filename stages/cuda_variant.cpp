#include "cuda_variant.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace gdnflow::stages {
namespace {

constexpr std::int64_t most_blocks = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t vector_bytes = 16;

Support suits_vectors(std::string_view port, const TensorView& view) {
  if (view.data == nullptr) return Support::yes();
  const auto beyond = reinterpret_cast<std::uintptr_t>(view.data) % vector_bytes;
  if (beyond != 0) {
    return Support::no(std::string(port) + ": expected an address that is a multiple of 16, got " +
                       std::to_string(beyond) + " bytes past one");
  }
  const std::int64_t step = vector_bytes / static_cast<std::int64_t>(size_of(view.dtype));
  for (std::int32_t i = 0; i + 1 < view.rank; ++i) {
    if (view.extents[i] > 1 && view.strides[i] % step != 0) {
      return Support::no(std::string(port) + ": expected strides that are multiples of " +
                         std::to_string(step) + " elements, got " + to_string(view));
    }
  }
  return Support::yes();
}

}  // namespace

Support supports_cuda(const VariantQuery& query, std::int64_t blocks) {
  if (query.device.capability < 80) {
    return Support::no("device: expected sm_80 or newer, got sm_" +
                       std::to_string(query.device.capability));
  }
  if (blocks > most_blocks) {
    return Support::no("grid: expected at most " + std::to_string(most_blocks) +
                       " blocks for the capacity, got " + std::to_string(blocks));
  }
  return Support::yes();
}

Support supports_tiles(const VariantQuery& query, std::int64_t blocks) {
  const Problem& p = query.problem;
  if (p.qk_dim != p.v_dim || (p.qk_dim != 64 && p.qk_dim != 128)) {
    return Support::no("head dims: expected d_k = d_v = 64 or 128, got d_k " +
                       std::to_string(p.qk_dim) + ", d_v " + std::to_string(p.v_dim));
  }
  if (p.activation != DType::bf16 && p.activation != DType::f16) {
    return Support::no("activation: expected bf16 or f16, got " +
                       std::string(to_string(p.activation)));
  }
  return supports_cuda(query, blocks);
}

DType activation_type(const Problem& problem, std::string_view /*port*/) {
  return problem.activation;
}

Support accepts_vectors(const StageCall& call, std::initializer_list<std::string_view> ports) {
  for (const std::string_view port : ports) {
    if (Support support = suits_vectors(port, call[port]); !support) return support;
  }
  if (call.stage.port_index("chunk_table") < 0) return Support::yes();
  const TensorView& table = call["chunk_table"];
  if (!table.is_dense()) {
    return Support::no("chunk_table: expected a dense tensor, got " + to_string(table));
  }
  return suits_vectors("chunk_table", table);
}

Dim3 grid_of(std::int64_t blocks) {
  return {static_cast<std::uint32_t>(std::clamp<std::int64_t>(blocks, 1, most_blocks)), 1, 1};
}

}  // namespace gdnflow::stages
