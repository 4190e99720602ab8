#include <gdnflow/compare.hpp>

#include "host/convert.hpp"
#include "host/cuda_build.hpp"
#include "host/difference.hpp"

#if GDNFLOW_WITH_CUDA
#include "device/compare.hpp"
#endif

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, "compare: " + message);
}

void check_tensor(std::string_view which, const TensorView& view) {
  if (!is_float(view.dtype)) {
    refuse(fmt::format("{}: expected f32, bf16 or f16, got {}", which, to_string(view)));
  }
  if (view.data == nullptr && view.elements() != 0) refuse(fmt::format("{}: has no data", which));
}

void check_same_extents(const TensorView& got, const TensorView& expected) {
  const auto extents = [](const TensorView& view) {
    return std::span(view.extents.data(), static_cast<std::size_t>(view.rank));
  };
  if (!std::ranges::equal(extents(got), extents(expected))) {
    refuse(fmt::format("expected two tensors of equal extents, got {} and {}", to_string(got),
                       to_string(expected)));
  }
}

void check_on(std::string_view which, const TensorView& view, DeviceType type) {
  if (view.device.type != type) {
    refuse(fmt::format("{}: expected a tensor on {}, got {}", which, to_string(type),
                       to_string(view)));
  }
}

std::int64_t row_length(const TensorView& view) {
  return view.rank == 0 ? 1 : view.extents[view.rank - 1];
}

// Row `row` of the tensor seen as a matrix of its last dimension, as double.
void load_row(const TensorView& view, std::int64_t row, std::vector<double>& out) {
  std::int64_t offset = 0;
  for (int i = view.rank - 2; i >= 0; --i) {
    offset += row % view.extents[i] * view.strides[i];
    row /= view.extents[i];
  }
  const std::int64_t stride = view.rank == 0 ? 1 : view.strides[view.rank - 1];
  const auto count = static_cast<std::int64_t>(out.size());
  if (stride == 1 || count == 1) {
    host::load(view, offset, count, out.data());
  } else {
    for (std::int64_t i = 0; i < count; ++i) host::load(view, offset + i * stride, 1, &out[i]);
  }
}

// Measures rows in blocks of a fixed size and adds the blocks up in order, so that the result does
// not depend on the number of threads.
template <class ExpectedRow>
Difference compare_rows(const TensorView& got, Tolerance tolerance, ExpectedRow expected_row) {
  constexpr std::int64_t block_rows = 256;
  const std::int64_t length = row_length(got);
  const std::int64_t rows = got.elements() / length;
  std::vector<Difference> blocks(static_cast<std::size_t>((rows + block_rows - 1) / block_rows));
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) if (rows > block_rows)
#endif
  for (std::int64_t block = 0; block < std::ssize(blocks); ++block) {
    std::vector<double> got_row(static_cast<std::size_t>(length));
    std::vector<double> buffer(static_cast<std::size_t>(length));
    Difference sum;
    const std::int64_t end = std::min(rows, (block + 1) * block_rows);
    for (std::int64_t row = block * block_rows; row < end; ++row) {
      load_row(got, row, got_row);
      const double* expected = expected_row(row, buffer);
      for (std::int64_t i = 0; i < length; ++i) {
        sum = merge(sum, difference_of(got_row[i], expected[i], tolerance.absolute,
                                       tolerance.relative, row * length + i));
      }
    }
    blocks[block] = sum;
  }
  Difference total;
  for (const Difference& block : blocks) total = merge(total, block);
  return total;
}

Comparison finish(const TensorView& got, const Difference& d) {
  Comparison out;
  out.elements = got.elements();
  const double norm = std::sqrt(d.squared_expected);
  out.relative_rms = std::sqrt(d.squared_difference) / (norm > 0 ? norm : 1.0);
  out.max_abs = d.max_abs;
  out.over_tolerance = d.over_tolerance;
  out.nonfinite_mismatches = d.nonfinite_mismatches;
  if (d.worst_index < 0) return out;
  out.worst.got = d.worst_got;
  out.worst.expected = d.worst_expected;
  out.worst.index.resize(static_cast<std::size_t>(got.rank));
  std::int64_t rest = d.worst_index;
  for (int i = got.rank - 1; i >= 0; --i) {
    out.worst.index[i] = rest % got.extents[i];
    rest /= got.extents[i];
  }
  return out;
}

void check_on_device(std::string_view which, const TensorView& view, Device device) {
  check_tensor(which, view);
  check_on(which, view, DeviceType::cuda);
  if (view.device != device) {
    refuse(fmt::format("{}: expected a tensor on {}, got {}", which, to_string(device),
                       to_string(view)));
  }
  if (!view.is_dense()) {
    refuse(fmt::format("{}: expected a dense tensor, got {}", which, to_string(view)));
  }
}

Comparison run_on_device([[maybe_unused]] const TensorView& got,
                         [[maybe_unused]] const TensorView* expected,
                         [[maybe_unused]] const double* expected_double,
                         [[maybe_unused]] Tolerance tolerance) {
#if GDNFLOW_WITH_CUDA
  if (got.elements() == 0) return finish(got, {});
  return finish(got, device::compare(got, expected, expected_double, tolerance));
#else
  refuse_without_cuda("compare_on_device");
#endif
}

// "sequence 2 token 17" for a row of a packed tensor.
std::string token_text(std::int64_t row, std::span<const std::int64_t> cu_seqlens) {
  const auto after = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), row);
  if (after == cu_seqlens.begin() || after == cu_seqlens.end()) {
    return fmt::format("token {}, which no sequence owns,", row);
  }
  return fmt::format("sequence {} token {}", after - cu_seqlens.begin() - 1, row - *(after - 1));
}

std::string place_text(const std::vector<std::int64_t>& index,
                       std::span<const std::int64_t> cu_seqlens) {
  if (index.size() == 4) {
    return fmt::format("sequence {} head {} row {} column {}", index[0], index[1], index[2],
                       index[3]);
  }
  if (index.size() != 2 && index.size() != 3) return fmt::format("[{}]", fmt::join(index, ","));
  std::string text =
      cu_seqlens.empty() ? fmt::format("token {}", index[0]) : token_text(index[0], cu_seqlens);
  text += fmt::format(" head {}", index[1]);
  return index.size() == 3 ? text + fmt::format(" column {}", index[2]) : text;
}

}  // namespace

Comparison compare(const TensorView& got, const TensorView& expected, Tolerance tolerance) {
  check_tensor("got", got);
  check_tensor("expected", expected);
  check_same_extents(got, expected);
  check_on("got", got, DeviceType::host);
  check_on("expected", expected, DeviceType::host);
  if (got.elements() == 0) return finish(got, {});
  return finish(got,
                compare_rows(got, tolerance, [&](std::int64_t row, std::vector<double>& buffer) {
                  load_row(expected, row, buffer);
                  return static_cast<const double*>(buffer.data());
                }));
}

Comparison compare(const TensorView& got, std::span<const double> expected, Tolerance tolerance) {
  check_tensor("got", got);
  check_on("got", got, DeviceType::host);
  if (std::ssize(expected) != got.elements()) {
    refuse(fmt::format("expected {} values for {}, got {}", got.elements(), to_string(got),
                       expected.size()));
  }
  if (got.elements() == 0) return finish(got, {});
  return finish(got, compare_rows(got, tolerance, [&](std::int64_t row, std::vector<double>&) {
                  return expected.data() + row * row_length(got);
                }));
}

Comparison compare_on_device(const TensorView& got, const TensorView& expected,
                             Tolerance tolerance) {
  check_on_device("got", got, got.device);
  check_on_device("expected", expected, got.device);
  check_same_extents(got, expected);
  return run_on_device(got, &expected, nullptr, tolerance);
}

Comparison compare_on_device(const TensorView& got, const double* expected, Tolerance tolerance) {
  check_on_device("got", got, got.device);
  if (expected == nullptr && got.elements() != 0) refuse("expected: has no data");
  return run_on_device(got, nullptr, expected, tolerance);
}

std::string to_string(const Comparison& c, std::span<const std::int64_t> cu_seqlens) {
  std::string text = fmt::format("rel_rms {:.1e}, max_abs {:.1e}", c.relative_rms, c.max_abs);
  if (c.over_tolerance != 0) {
    text += fmt::format(", {} of {} over tolerance", c.over_tolerance, c.elements);
  }
  if (c.nonfinite_mismatches != 0) {
    text += fmt::format(", {} non-finite mismatches", c.nonfinite_mismatches);
  }
  if (c.elements == 0) return text + ", no elements";
  return text + fmt::format(", worst at {}: got {:.6g}, expected {:.6g}",
                            place_text(c.worst.index, cu_seqlens), c.worst.got, c.worst.expected);
}

}  // namespace gdnflow
