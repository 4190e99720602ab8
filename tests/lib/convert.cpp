#include "host/convert.hpp"

#include "support/expect_error.hpp"
#include "support/tensor.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::expect_error;
using gdnflow::test::HostTensor;

TEST_CASE("conversion rounds to nearest, ties to even, and keeps infinities and NaN")
{
  const float inf = std::numeric_limits<float>::infinity();
  const auto through = [](DType type, float value) {
    const HostTensor tensor(type, {1});
    host::store(tensor, 0, 1, &value);
    float back = 0;
    host::load(tensor.view(), 0, 1, &back);
    return back;
  };
  CHECK(through(DType::bf16, 1.0F + 0x1p-8F) == 1.0F);                // a tie, to even
  CHECK(through(DType::bf16, 1.0F + 3 * 0x1p-8F) == 1.0F + 0x1p-6F);  // a tie, to even, upwards
  CHECK(through(DType::bf16, 1.0F + 0x1.02p-8F) == 1.0F + 0x1p-7F);   // past the tie
  CHECK(through(DType::f16, 1.0F + 0x1p-11F) == 1.0F);
  CHECK(through(DType::f16, 1.0F + 3 * 0x1p-11F) == 1.0F + 0x1p-9F);
  CHECK(through(DType::f16, 0x1p-24F) == 0x1p-24F);  // the least subnormal
  CHECK(through(DType::f16, 65520.0F) == inf);
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    CHECK(through(type, -0.5F) == -0.5F);
    CHECK(through(type, inf) == inf);
    CHECK(through(type, -inf) == -inf);
    CHECK(std::isnan(through(type, std::numeric_limits<float>::quiet_NaN())));
  }
}

TEST_CASE("rows are found by the strides of the view")
{
  const HostTensor tensor(DType::f32, {4, 6});
  TensorView view = tensor;
  view.extents = {2, 2, 3};
  view.rank = 3;
  view.strides = {12, 3, 1};  // every second row of six, as two of three
  for (int i = 0; i < 24; ++i) tensor.as<float>()[i] = static_cast<float>(i);
  std::vector<double> row(3);
  host::load(view, host::offset_of(view, 1, 1), 3, row.data());
  CHECK(row == std::vector<double>{15, 16, 17});
}

TEST_CASE("a type that is not floating, or no index, is refused")
{
  expect_error(ErrorCode::invalid_argument, {"bf16", "i32"},
               [] { host::dispatch_float(DType::i32, [](auto) {}); });
  expect_error(ErrorCode::invalid_argument, {"i64", "f32"},
               [] { host::dispatch_index(DType::f32, [](auto) {}); });
}
