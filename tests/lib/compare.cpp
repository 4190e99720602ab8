#include <gdnflow/compare.hpp>

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

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

HostTensor tensor(std::vector<std::int64_t> extents, const std::vector<float>& values,
                  DType type = DType::f32) {
  HostTensor t(type, std::move(extents));
  host::store(t, 0, static_cast<std::int64_t>(values.size()), values.data());
  return t;
}

}  // namespace

TEST_CASE("equal tensors differ by nothing")
{
  const HostTensor a = tensor({2, 3}, {1, -2, 3, 0, inf, not_a_number});
  const Comparison c = compare(a, a);
  CHECK(c.relative_rms == 0);
  CHECK(c.max_abs == 0);
  CHECK(c.elements == 6);
  CHECK(c.over_tolerance == 0);
  CHECK(c.nonfinite_mismatches == 0);
  CHECK(c.within(0));
}

TEST_CASE("the measures are those of their definitions")
{
  const HostTensor got = tensor({4}, {1, 2, 3.5F, 4});
  const HostTensor expected = tensor({4}, {1, 2, 3, 5});
  const Comparison c = compare(got, expected, {0.1, 0.1});
  CHECK(c.relative_rms == doctest::Approx(std::sqrt(1.25 / 39.0)).epsilon(1e-14));
  CHECK(c.max_abs == 1);
  CHECK(c.over_tolerance == 2);
  CHECK(c.worst.index == std::vector<std::int64_t>{3});  // 1 / 0.6 against 0.5 / 0.4
  CHECK(c.worst.got == 4);
  CHECK(c.worst.expected == 5);
  CHECK(c.within(0.18));
  CHECK_FALSE(c.within(0.17));
}

TEST_CASE(
    "the worst element is the first that exceeds its tolerance most, not the largest difference")
{
  const HostTensor expected = tensor({4}, {1000, 1, 1, 1});
  const HostTensor got = tensor({4}, {1002, 1, 1.5F, 1.5F});
  const Comparison c = compare(got, expected);  // 2 within 5.005 at the first
  CHECK(c.over_tolerance == 2);
  CHECK(c.max_abs == 2);
  CHECK(c.worst.index == std::vector<std::int64_t>{2});
}

TEST_CASE("against zeros the measure is the norm of the difference")
{
  CHECK(compare(tensor({2}, {3, 4}), tensor({2}, {0, 0})).relative_rms == 5);
  CHECK(compare(tensor({2}, {0, 0}), tensor({2}, {0, 0})).relative_rms == 0);
}

TEST_CASE("NaN and infinity agree with their like alone and come first as the worst")
{
  const HostTensor expected = tensor({6}, {not_a_number, inf, -inf, 1, not_a_number, 2});
  const HostTensor got = tensor({6}, {not_a_number, inf, inf, not_a_number, 1, 200});
  const Comparison c = compare(got, expected);
  CHECK(c.nonfinite_mismatches == 3);
  CHECK(c.over_tolerance == 4);
  CHECK(c.worst.index == std::vector<std::int64_t>{2});
  CHECK(c.max_abs == 198);
  CHECK(c.relative_rms == 99);  // over the finite pair
  CHECK_FALSE(c.within(1e9));
}

TEST_CASE("within is false for a measure that is not a number")
{
  Comparison c;
  c.relative_rms = std::numeric_limits<double>::quiet_NaN();
  CHECK_FALSE(c.within(1));
}

TEST_CASE("types and strides do not matter, values do")
{
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  const HostTensor row_major = tensor({2, 3}, values);
  const HostTensor columns = tensor({3, 2}, {1, 4, 2, 5, 3, 6}, DType::bf16);
  TensorView transposed = columns;
  std::swap(transposed.extents[0], transposed.extents[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  CHECK(compare(row_major, transposed).max_abs == 0);
  CHECK(compare(tensor({2, 3}, values, DType::f16), row_major).max_abs == 0);
  const std::vector<double> wide(values.begin(), values.end());
  CHECK(compare(transposed, wide).max_abs == 0);
  transposed.strides[1] = 0;  // 1 1 1 / 4 4 4
  const Comparison c = compare(transposed, row_major);
  CHECK(c.max_abs == 2);
  CHECK(c.over_tolerance == 4);
}

TEST_CASE("many rows are summed alike whatever the number of threads")
{
  const std::int64_t rows = 1500;
  HostTensor a(DType::f32, {rows, 3});
  HostTensor b(DType::f32, {rows, 3});
  double difference = 0, norm = 0;
  for (std::int64_t i = 0; i < 3 * rows; ++i) {
    a.as<float>()[i] = static_cast<float>(i % 17);
    b.as<float>()[i] = static_cast<float>(i % 19) + 1;
    difference += std::pow(static_cast<double>(i % 17) - static_cast<double>(i % 19) - 1.0, 2);
    norm += std::pow(static_cast<double>(i % 19) + 1.0, 2);
  }
  a.as<float>()[3 * 1403 + 2] = 1e6F;
  difference += std::pow(1e6 - (3 * 1403 + 2) % 19 - 1.0, 2) -
                std::pow((3 * 1403 + 2) % 17 - (3 * 1403 + 2) % 19 - 1.0, 2);
  const Comparison c = compare(a, b);
  CHECK(c.relative_rms == doctest::Approx(std::sqrt(difference / norm)).epsilon(1e-13));
  CHECK(c.worst.index == std::vector<std::int64_t>{1403, 2});
}

TEST_CASE("tensors without elements and scalars can be compared")
{
  const HostTensor empty(DType::f32, {0, 4});
  const Comparison c = compare(empty, empty);
  CHECK(c.elements == 0);
  CHECK(c.within(0));
  CHECK(to_string(c).find("no elements") != std::string::npos);
  CHECK(compare(tensor({}, {2}), tensor({}, {1})).max_abs == 1);
}

TEST_CASE("what cannot be compared is refused")
{
  const HostTensor a(DType::f32, {2, 3});
  const HostTensor b(DType::f32, {3, 2});
  const HostTensor integers(DType::i32, {2, 3});
  TensorView on_device = a;
  on_device.device = {DeviceType::cuda, 0};
  TensorView missing = a;
  missing.data = nullptr;
  const auto refused = [](std::initializer_list<std::string_view> parts, auto body) {
    expect_error(ErrorCode::invalid_argument, parts, body);
  };
  refused({"[2,3]", "[3,2]"}, [&] { compare(a, b); });
  refused({"i32"}, [&] { compare(a, integers); });
  refused({"host", "cuda:0"}, [&] { compare(on_device, a); });
  refused({"host", "cuda:0"}, [&] { compare(a, on_device); });
  refused({"expected", "no data"}, [&] { compare(a, missing); });
  refused({"6 values", "5"}, [&] { compare(a, std::vector<double>(5)); });
  refused({"cuda", "host"}, [&] { compare_on_device(a, a); });
}

TEST_CASE("a report names the worst element by sequence, token, head and column")
{
  HostTensor expected(DType::f32, {9, 4, 6});
  const HostTensor got = expected;
  expected.as<float>()[(7 * 4 + 3) * 6 + 5] = 0.25F;
  got.as<float>()[(7 * 4 + 3) * 6 + 5] = 0.125F;
  const Comparison c = compare(got, expected);
  const std::vector<std::int64_t> offsets{0, 2, 2, 5, 8};
  CHECK(to_string(c, offsets) ==
        "rel_rms 5.0e-01, max_abs 1.2e-01, 1 of 216 over tolerance, worst at sequence 3 token 2 "
        "head 3 column 5: got 0.125, expected 0.25");
  CHECK(to_string(c).find("worst at token 7 head 3 column 5:") != std::string::npos);
  CHECK(to_string(c, std::vector<std::int64_t>{0, 7}).find("token 7, which no sequence owns") !=
        std::string::npos);
  const HostTensor state = tensor({1, 1, 2, 2}, {0, 0, 1, 0});
  CHECK(to_string(compare(state, HostTensor(DType::f32, {1, 1, 2, 2})))
            .find("sequence 0 head 0 row 1 column 0") != std::string::npos);
}
