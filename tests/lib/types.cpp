#include <gdnflow/dtype.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/tensor.hpp>

#include "support/expect_error.hpp"

#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::expect_error;

TEST_CASE("every element type's name parses back and has its size")
{
  const std::vector<std::pair<DType, std::size_t>> types{{DType::f32, 4}, {DType::bf16, 2},
                                                         {DType::f16, 2}, {DType::i32, 4},
                                                         {DType::i64, 8}, {DType::u8, 1}};
  for (const auto& [type, size] : types) {
    CHECK(parse_dtype(to_string(type)) == type);
    CHECK(size_of(type) == size);
  }
  CHECK(parse_dtype("fp32") == DType::f32);
  CHECK(parse_dtype("fp16") == DType::f16);
  CHECK(parse_dtype("int32") == DType::i32);
  CHECK(parse_dtype("int64") == DType::i64);
  CHECK(parse_dtype("bool") == DType::u8);
  for (const char* wrong : {"", "F32", "f64", "bf16 "}) CHECK_FALSE(parse_dtype(wrong).has_value());
  CHECK(is_float(DType::bf16));
  CHECK_FALSE(is_float(DType::u8));
}

TEST_CASE("an error keeps its code, its message and where it was raised")
{
  const Error error(ErrorCode::format, "x: expected y, got z");
  CHECK(error.code() == ErrorCode::format);
  CHECK(std::string(error.what()) == "x: expected y, got z");
  CHECK(std::string(error.where().file).find("types.cpp") != std::string::npos);
  std::set<std::string_view> names;
  for (const ErrorCode code :
       {ErrorCode::invalid_argument, ErrorCode::unsupported, ErrorCode::invalid_pipeline,
        ErrorCode::format, ErrorCode::io, ErrorCode::cuda, ErrorCode::internal}) {
    CHECK(names.insert(to_string(code)).second);
  }
}

TEST_CASE("a refusal is false and says why")
{
  CHECK(Support::yes());
  const Support no = Support::no("needs sm_90");
  CHECK_FALSE(no);
  CHECK(no.reason == "needs sm_90");
}

TEST_CASE("a dense view is row-major")
{
  static_assert(std::is_trivially_copyable_v<TensorView>);
  float data[24] = {};
  const TensorView view = TensorView::dense(data, DType::f32, {2, 3, 4});
  CHECK(view.rank == 3);
  CHECK(view.strides[0] == 12);
  CHECK(view.strides[1] == 4);
  CHECK(view.strides[2] == 1);
  CHECK(view.elements() == 24);
  CHECK(view.bytes() == 96);
  CHECK(view.is_dense());
  CHECK(view.as<float>() == data);
  CHECK(to_string(view) == "f32[2,3,4] host");
}

TEST_CASE("a scalar has one element, an empty tensor none")
{
  CHECK(TensorView::dense(nullptr, DType::f32, std::initializer_list<std::int64_t>{}).elements() ==
        1);
  const TensorView empty = TensorView::dense(nullptr, DType::bf16, {0, 4}, {DeviceType::cuda, 1});
  CHECK(empty.elements() == 0);
  CHECK(empty.is_dense());
  CHECK(to_string(empty) == "bf16[0,4] cuda:1");
}

TEST_CASE("strides of extents of one do not make a view sparse, others do")
{
  TensorView view = TensorView::dense(nullptr, DType::f32, {4, 1, 8});
  view.strides[1] = 1000;
  CHECK(view.is_dense());
  view.strides[0] = 16;
  CHECK_FALSE(view.is_dense());
  CHECK(to_string(view) == "f32[4,1,8] strides [16,1000,1] host");
}

TEST_CASE("a view of too many dimensions or a negative extent is refused")
{
  expect_error(ErrorCode::invalid_argument, {"rank", "6", "7"}, [] {
    TensorView::dense(nullptr, DType::f32, {1, 1, 1, 1, 1, 1, 1});
  });
  expect_error(ErrorCode::invalid_argument, {"extent 1", "-2"}, [] {
    TensorView::dense(nullptr, DType::f32, {1, -2});
  });
}
