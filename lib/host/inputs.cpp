#include <gdnflow/inputs.hpp>

#include "host/convert.hpp"
#include "host/cuda_build.hpp"
#include "random/input_values.hpp"

#if GDNFLOW_WITH_CUDA
#include "device/inputs.hpp"
#endif

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

namespace gdnflow {
namespace {

// Elements below which waking other threads costs more than they save.
[[maybe_unused]] constexpr std::int64_t least_parallel = 1 << 14;

constexpr std::array<std::pair<Distribution, std::string_view>, 10> names{{
    {Distribution::random_decay, "random_decay"},
    {Distribution::mixed, "mixed"},
    {Distribution::no_decay, "no_decay"},
    {Distribution::quarter_frozen, "quarter_frozen"},
    {Distribution::correlated, "correlated"},
    {Distribution::model, "model"},
    {Distribution::strong, "strong"},
    {Distribution::hard_reset, "hard_reset"},
    {Distribution::huge, "huge"},
    {Distribution::unnormalized, "unnormalized"},
}};

[[noreturn]] void refuse(std::string_view what, std::string_view expected, const TensorView& got) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: expected {}, got {}", what, expected, to_string(got)));
}

// Whether there is anything to write, after checks that every fill has in common.
bool check_dense(std::string_view what, const TensorView& out) {
  if (!is_float(out.dtype)) refuse(what, "f32, bf16 or f16", out);
  if (!out.is_dense()) refuse(what, "a dense tensor", out);
  if (out.elements() == 0) return false;
  if (out.data == nullptr) refuse(what, "a tensor with data", out);
  return true;
}

random::InputSpec spec_of(InputKind kind, Distribution distribution, std::uint64_t seed,
                          const TensorView& out) {
  const auto expect = [&](std::string_view name, int rank, std::string_view shape, bool f32) {
    if (out.rank != rank) refuse(name, shape, out);
    if (f32 && out.dtype != DType::f32) refuse(name, "f32", out);
  };
  switch (kind) {
    case InputKind::q:
    case InputKind::raw_q:
      expect("q", 3, "3 dimensions [T, Hqk, Dk]", false);
      break;
    case InputKind::k:
    case InputKind::raw_k:
      expect("k", 3, "3 dimensions [T, Hqk, Dk]", false);
      break;
    case InputKind::v:
      expect("v", 3, "3 dimensions [T, Hv, Dv]", false);
      break;
    case InputKind::g:
    case InputKind::beta:
      expect(kind == InputKind::g ? "g" : "beta", 2, "2 dimensions [T, Hv]", true);
      break;
    case InputKind::initial_state:
      expect("initial_state", 4, "4 dimensions [N, Hv, rows, columns]", false);
      break;
  }
  random::InputSpec spec;
  spec.kind = kind;
  spec.distribution = distribution;
  spec.seed = seed;
  spec.elements = out.elements();
  spec.heads = out.extents[1];
  spec.row = out.extents[out.rank - 1];
  spec.normalized = random::is_query(kind) || random::is_key(kind);
  return spec;
}

void fill_on_host(const random::InputSpec& spec, const TensorView& out) {
  host::dispatch_float(out.dtype, [&]<class T>(std::type_identity<T>) {
    T* data = out.as<T>();
    const auto store = [data](std::int64_t i, float value) { data[i] = static_cast<T>(value); };
    if (spec.normalized) {
      const std::int64_t rows = spec.elements / spec.row;
#if defined(_OPENMP)
#pragma omp parallel for if (spec.elements >= least_parallel)
#endif
      for (std::int64_t row = 0; row < rows; ++row) random::make_row(spec, row, store);
    } else {
      constexpr std::int64_t run = 4096;
#if defined(_OPENMP)
#pragma omp parallel for if (spec.elements >= least_parallel)
#endif
      for (std::int64_t first = 0; first < spec.elements; first += run) {
        random::make_elements(spec, first, std::min(run, spec.elements - first), store);
      }
    }
  });
}

}  // namespace

std::string_view to_string(Distribution distribution) noexcept {
  for (const auto& [value, name] : names) {
    if (value == distribution) return name;
  }
  return "?";
}

std::optional<Distribution> parse_distribution(std::string_view text) noexcept {
  for (const auto& [value, name] : names) {
    if (name == text) return value;
  }
  return std::nullopt;
}

std::span<const Distribution> distributions() noexcept {
  static constexpr auto all = [] {
    std::array<Distribution, names.size()> values{};
    for (std::size_t i = 0; i < names.size(); ++i) values[i] = names[i].first;
    return values;
  }();
  return all;
}

void fill_input(InputKind kind, Distribution distribution, std::uint64_t seed,
                const TensorView& out) {
  const random::InputSpec spec = spec_of(kind, distribution, seed, out);
  if (!check_dense("fill_input", out)) return;
  if (out.device.type == DeviceType::host) return fill_on_host(spec, out);
#if GDNFLOW_WITH_CUDA
  device::fill_input(spec, out);
#else
  refuse_without_cuda("fill_input");
#endif
}

void fill_uniform(std::uint64_t seed, float low, float high, const TensorView& out) {
  if (!std::isfinite(low) || !std::isfinite(high) || !(low < high)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("fill_uniform: expected finite low < high, got {} and {}", low, high));
  }
  if (!check_dense("fill_uniform", out)) return;
  if (out.device.type == DeviceType::host) {
    host::dispatch_float(out.dtype, [&]<class T>(std::type_identity<T>) {
      T* data = out.as<T>();
      const std::int64_t elements = out.elements();
#if defined(_OPENMP)
#pragma omp parallel for if (elements >= least_parallel)
#endif
      for (std::int64_t i = 0; i < elements; ++i) {
        data[i] = static_cast<T>(random::uniform_value(seed, low, high, i));
      }
    });
    return;
  }
#if GDNFLOW_WITH_CUDA
  device::fill_uniform(seed, low, high, out);
#else
  refuse_without_cuda("fill_uniform");
#endif
}

}  // namespace gdnflow
