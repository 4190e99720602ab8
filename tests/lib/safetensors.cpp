#include <gdnflow/safetensors.hpp>

#include "support/expect_error.hpp"
#include "support/golden.hpp"
#include "support/temporary_directory.hpp"
#include "support/tensor.hpp"

#include <cstring>
#include <fstream>
#include <iterator>

#include <doctest/doctest.h>
#include <sys/stat.h>

using namespace gdnflow;
using gdnflow::test::expect_error;
using gdnflow::test::HostTensor;
using gdnflow::test::TemporaryDirectory;

namespace {

// A file of a header as given and `data_bytes` bytes of data, aligned as a mapping is.
class Bytes {
 public:
  Bytes(std::string_view header, std::size_t data_bytes)
      : Bytes(header, data_bytes, header.size()) {}
  Bytes(std::string_view header, std::size_t data_bytes, std::uint64_t stated_length)
      : size_(8 + header.size() + data_bytes), words_(size_ / 8 + 1) {
    auto* bytes = reinterpret_cast<char*>(words_.data());
    std::memcpy(bytes, &stated_length, 8);
    std::memcpy(bytes + 8, header.data(), header.size());
  }
  std::string_view view() const { return {reinterpret_cast<const char*>(words_.data()), size_}; }

 private:
  std::size_t size_;
  std::vector<std::uint64_t> words_;
};

// Pads a header to a multiple of 8, so that the data is aligned.
std::string padded(std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

void expect_format_error(std::string_view header, std::size_t data_bytes,
                         std::initializer_list<std::string_view> parts) {
  CAPTURE(header);
  const Bytes file(padded(std::string(header)), data_bytes);
  expect_error(ErrorCode::format, {"broken.file"},
               [&] { SafetensorsFile::parse(file.view(), "broken.file"); });
  expect_error(ErrorCode::format, parts,
               [&] { SafetensorsFile::parse(file.view(), "broken.file"); });
}

std::string tensor(std::string_view shape, std::string_view offsets,
                   std::string_view dtype = "F32") {
  return R"({"dtype":")" + std::string(dtype) + R"(","shape":)" + std::string(shape) +
         R"(,"data_offsets":)" + std::string(offsets) + "}";
}

std::string read_all(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("what is written is read again: every type, rank and the metadata")
{
  const TemporaryDirectory directory;
  const auto path = directory.path() / "round_trip.safetensors";
  std::vector<HostTensor> owned;
  std::vector<std::pair<std::string, TensorView>> tensors;
  const std::vector<std::vector<std::int64_t>> shapes{{}, {3}, {0}, {2, 0, 5}, {2, 3, 1, 2, 1, 2}};
  for (const DType type :
       {DType::u8, DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64}) {
    for (const auto& shape : shapes) {
      HostTensor& t = owned.emplace_back(type, shape);
      auto* bytes = t.as<unsigned char>();
      for (std::int64_t i = 0; i < t.view().bytes(); ++i) {
        bytes[i] = static_cast<unsigned char>(7 * i + 3 * owned.size());
      }
    }
  }
  for (std::size_t i = 0; i < owned.size(); ++i) {
    tensors.emplace_back("t" + std::to_string(i), owned[i].view());
  }
  const std::map<std::string, std::string> metadata{{"source", "a \"quoted\"\nline"}, {"", "x"}};
  write_safetensors(path, tensors, metadata);

  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(file.tensors().size() == tensors.size());
  CHECK(std::map<std::string, std::string>(file.metadata().begin(), file.metadata().end()) ==
        metadata);
  for (const auto& [name, expected] : tensors) {
    CAPTURE(name);
    const TensorView& got = file.find(name);
    CHECK(got.dtype == expected.dtype);
    REQUIRE(got.rank == expected.rank);
    CHECK(got.extents == expected.extents);
    CHECK(got.is_dense());
    CHECK(reinterpret_cast<std::uintptr_t>(got.data) % size_of(got.dtype) == 0);
    if (expected.bytes() > 0) {
      CHECK(std::memcmp(got.data, expected.data, static_cast<std::size_t>(expected.bytes())) == 0);
    }
  }
  std::uint64_t header = 0;
  std::memcpy(&header, read_all(path).data(), 8);
  CHECK(header % 8 == 0);
}

TEST_CASE("names with quotes, newlines and other scripts survive")
{
  const TemporaryDirectory directory;
  const auto path = directory.path() / "names.safetensors";
  const HostTensor t(DType::f32, {1});
  const std::vector<std::string> names{"", "a.b", "\"", "\n", "\xc3\xa9\xe6\xbc\xa2"};
  std::vector<std::pair<std::string, TensorView>> tensors;
  for (const auto& name : names) tensors.emplace_back(name, t.view());
  write_safetensors(path, tensors);
  const SafetensorsFile file = SafetensorsFile::open(path);
  for (const auto& name : names) CHECK(file.contains(name));
  CHECK(file.metadata().empty());
}

TEST_CASE("strided tensors are written in row-major order")
{
  const TemporaryDirectory directory;
  const auto path = directory.path() / "strided.safetensors";
  const HostTensor t(DType::i32, {2, 3, 4});
  for (int i = 0; i < 24; ++i) t.as<std::int32_t>()[i] = i;
  TensorView transposed = t;
  std::swap(transposed.extents[0], transposed.extents[2]);
  std::swap(transposed.strides[0], transposed.strides[2]);
  TensorView slice = t;  // [:, 1:3, :]
  slice.data = t.as<std::int32_t>() + 4;
  slice.extents[1] = 2;
  TensorView backwards = TensorView::dense(t.as<std::int32_t>() + 23, DType::i32, {24});
  backwards.strides[0] = -1;
  TensorView repeated = TensorView::dense(t.as<std::int32_t>() + 5, DType::i32, {3});
  repeated.strides[0] = 0;
  write_safetensors(path, {{"transposed", transposed},
                           {"slice", slice},
                           {"backwards", backwards},
                           {"repeated", repeated}});
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto values = [&](const char* name) {
    const TensorView& view = file.find(name);
    return std::vector<std::int32_t>(view.as<const std::int32_t>(),
                                     view.as<const std::int32_t>() + view.elements());
  };
  std::vector<std::int32_t> expected;
  for (int c = 0; c < 4; ++c) {
    for (int b = 0; b < 3; ++b) {
      for (int a = 0; a < 2; ++a) expected.push_back(12 * a + 4 * b + c);
    }
  }
  CHECK(values("transposed") == expected);
  expected.clear();
  for (int a = 0; a < 2; ++a) {
    for (int i = 4; i < 12; ++i) expected.push_back(12 * a + i);
  }
  CHECK(values("slice") == expected);
  expected.clear();
  for (int i = 23; i >= 0; --i) expected.push_back(i);
  CHECK(values("backwards") == expected);
  CHECK(values("repeated") == std::vector<std::int32_t>{5, 5, 5});
}

TEST_CASE("a tensor larger than the write buffer arrives whole")
{
  const TemporaryDirectory directory;
  const auto path = directory.path() / "large.safetensors";
  const HostTensor t(DType::i64, {50000});
  for (std::int64_t i = 0; i < 50000; ++i) t.as<std::int64_t>()[i] = i * i;
  const HostTensor small(DType::u8, {3});
  write_safetensors(path, {{"small", small}, {"t", t}});
  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(std::memcmp(file.find("t").data, t.view().data, 400000) == 0);
}

TEST_CASE("a refused or failed write leaves the old file and no other")
{
  const TemporaryDirectory directory;
  const auto path = directory.path() / "kept.safetensors";
  const HostTensor t(DType::f32, {2});
  write_safetensors(path, {{"a", t}});
  const std::string before = read_all(path);
  TensorView on_device = t;
  on_device.device = {DeviceType::cuda, 0};
  TensorView no_data = t;
  no_data.data = nullptr;
  expect_error(ErrorCode::invalid_argument, {"\"a\"", "twice"}, [&] {
    write_safetensors(path, {{"a", t}, {"a", t}});
  });
  expect_error(ErrorCode::invalid_argument, {"\"b\"", "cuda:0"}, [&] {
    write_safetensors(path, {{"b", on_device}});
  });
  expect_error(ErrorCode::invalid_argument, {"\"b\"", "no data"}, [&] {
    write_safetensors(path, {{"b", no_data}});
  });
  expect_error(ErrorCode::invalid_argument, {"__metadata__"}, [&] {
    write_safetensors(path, {{"__metadata__", t}});
  });
  expect_error(ErrorCode::invalid_argument, {"UTF-8"}, [&] {
    write_safetensors(path, {{"\xff", t}});
  });
  expect_error(ErrorCode::io, {"no_such", "No such file"}, [&] {
    write_safetensors(directory.path() / "no_such" / "f", {{"a", t}});
  });
  expect_error(ErrorCode::io, {directory.path().string(), "directory"}, [&] {
    write_safetensors(directory.path(), {{"a", t}});
  });
  CHECK(read_all(path) == before);
  CHECK(std::distance(std::filesystem::directory_iterator(directory.path()), {}) == 1);
  CHECK(std::distance(std::filesystem::directory_iterator(directory.path().parent_path()), {}) > 0);
}

TEST_CASE("a file that cannot be opened is an io error with the system's reason")
{
  const TemporaryDirectory directory;
  expect_error(ErrorCode::io, {"absent.safetensors", "No such file"},
               [&] { SafetensorsFile::open(directory.path() / "absent.safetensors"); });
  expect_error(ErrorCode::io, {"regular file"}, [&] { SafetensorsFile::open(directory.path()); });
}

TEST_CASE("a tensor that is not there is refused with the names that are")
{
  const std::string header =
      padded(R"({"a":)" + tensor("[1]", "[0,4]") + R"(,"b":)" + tensor("[]", "[4,8]") + "}");
  const Bytes bytes(header, 8);
  const SafetensorsFile file = SafetensorsFile::parse(bytes.view(), "two.file");
  CHECK(file.find("b").rank == 0);
  CHECK(file.find("b").elements() == 1);
  expect_error(ErrorCode::invalid_argument, {"two.file", "\"c\"", "\"a\", \"b\""},
               [&] { file.find("c"); });
}

TEST_CASE("truncated files are refused at every length")
{
  const TemporaryDirectory directory;
  const auto path = directory.path() / "whole.safetensors";
  const HostTensor t(DType::f32, {4});
  write_safetensors(path, {{"a", t}}, {{"m", "n"}});
  const std::string whole = read_all(path);
  std::vector<std::uint64_t> storage(whole.size() / 8 + 1);
  std::memcpy(storage.data(), whole.data(), whole.size());
  const auto* bytes = reinterpret_cast<const char*>(storage.data());
  CHECK_NOTHROW(SafetensorsFile::parse({bytes, whole.size()}, "whole"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    expect_error(ErrorCode::format, {"cut"}, [&] { SafetensorsFile::parse({bytes, size}, "cut"); });
  }
  std::filesystem::resize_file(path, 0);
  expect_error(ErrorCode::format, {"whole.safetensors", "0 bytes"},
               [&] { SafetensorsFile::open(path); });
  std::filesystem::resize_file(path, 7);
  expect_error(ErrorCode::format, {"7 bytes"}, [&] { SafetensorsFile::open(path); });
}

TEST_CASE("a header length beyond the file or the format's limit is refused before it is used")
{
  for (const std::uint64_t length :
       {std::uint64_t{9}, std::uint64_t{100'000'001}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    const Bytes file("{}      ", 0, length);
    expect_error(ErrorCode::format, {"header length", "at most 8", std::to_string(length)},
                 [&] { SafetensorsFile::parse(file.view(), "f"); });
  }
}

TEST_CASE("a header that is not the format's JSON is refused")
{
  expect_format_error("", 8, {"'{'"});
  expect_format_error("[]", 0, {"'{'"});
  expect_format_error(" {}", 0, {"'{'"});
  expect_format_error("{", 0, {"no JSON"});
  expect_format_error("{} {}", 0, {"no JSON"});
  expect_format_error("{\"a\":\xff}", 0, {"no JSON"});
  expect_format_error(R"({"\ud800":{}})", 0, {"no JSON"});
  expect_format_error(R"({"a":1})", 0, {"\"a\"", "an object", "got 1"});
  expect_format_error(R"({"a":null})", 0, {"\"a\"", "an object", "null"});
  expect_format_error(R"({"a":[]})", 0, {"\"a\"", "an object", "an array"});
  expect_format_error(R"({"a":"b"})", 0, {"\"a\"", "an object", "\"b\""});
  expect_format_error(R"({"a":true})", 0, {"\"a\"", "an object", "true"});
  expect_format_error("{\"a\":" + std::string(5000, '['), 0, {"\"a\"", "an object"});
  expect_format_error(R"({"a\nb":1})", 0, {R"("a\nb")"});
}

TEST_CASE("a tensor's entry must have the three fields, once, of the right kind, and no other")
{
  const std::string good = tensor("[1]", "[0,4]");
  CHECK_NOTHROW(SafetensorsFile::parse(Bytes(padded("{\"a\":" + good + "}"), 4).view(), "f"));
  expect_format_error(R"({"a":{}})", 0, {"\"a\"", "no dtype"});
  expect_format_error(R"({"a":{"dtype":"F32"}})", 0, {"\"a\"", "no shape"});
  expect_format_error(R"({"a":{"dtype":"F32","shape":[1]}})", 4, {"\"a\"", "no data_offsets"});
  expect_format_error(R"({"a":{"dtype":3}})", 0, {"dtype", "a string", "3"});
  expect_format_error(R"({"a":{"dtype":["F32"]}})", 0, {"dtype", "a string"});
  expect_format_error(R"({"a":{"shape":"x"}})", 0, {"shape", "an array", "\"x\""});
  expect_format_error(R"({"a":{"shape":{}}})", 0, {"shape", "an array", "an object"});
  expect_format_error(R"({"a":{"shape":[[1]]}})", 0, {"shape", "integers", "an array"});
  expect_format_error(R"({"a":{"shape":[-1]}})", 0, {"shape", "integers", "-1"});
  expect_format_error(R"({"a":{"shape":[1.5]}})", 0, {"shape", "integers", "1.5"});
  expect_format_error(R"({"a":{"shape":[1e3]}})", 0, {"shape", "integers", "1e3"});
  expect_format_error(R"({"a":{"shape":["1"]}})", 0, {"shape", "integers", "\"1\""});
  expect_format_error(R"({"a":{"shape":[18446744073709551616]}})", 0, {"shape", "2^64"});
  expect_format_error(R"({"a":{"shape":[1],"shape":[1]}})", 0, {"\"a\"", "shape", "twice"});
  expect_format_error(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0, {"dtype", "twice"});
  expect_format_error(R"({"a":{"data_offsets":[],"data_offsets":[]}})", 0,
                      {"data_offsets", "twice"});
  expect_format_error(R"({"a":{"type":"F32"}})", 0, {"\"a\"", "\"type\""});
}

TEST_CASE("names that stand twice are refused, of tensors and of metadata")
{
  const std::string empty = tensor("[0]", "[0,0]");
  expect_format_error("{\"a\":" + empty + ",\"a\":" + empty + "}", 0, {"\"a\"", "twice"});
  expect_format_error("{\"a\":" + empty + ",\"\\u0061\":" + empty + "}", 0, {"\"a\"", "twice"});
  expect_format_error(R"({"__metadata__":{"x":"1","x":"1"}})", 0, {"\"x\"", "twice"});
  expect_format_error(R"({"__metadata__":{},"__metadata__":{}})", 0, {"__metadata__", "twice"});
  expect_format_error(R"({"__metadata__":{"x":1}})", 0, {"\"x\"", "a string", "1"});
  expect_format_error(R"({"__metadata__":{"x":{}}})", 0, {"\"x\"", "a string", "an object"});
  expect_format_error(R"({"__metadata__":[]})", 0, {"__metadata__", "an object"});
}

TEST_CASE("types the library has no name for are refused with those it has")
{
  for (const char* type : {"F64", "I8", "U16", "F8_E4M3", "f32", "", "C64"}) {
    expect_format_error("{\"a\":" + tensor("[0]", "[0,0]", type) + "}", 0, {"\"a\"", "BF16", type});
  }
  const Bytes flags(padded("{\"a\":" + tensor("[3]", "[0,3]", "BOOL") + "}"), 3);
  CHECK(SafetensorsFile::parse(flags.view(), "f").find("a").dtype == DType::u8);
}

TEST_CASE("shapes whose size overflows are refused before any product is formed")
{
  for (const char* shape :
       {"[9223372036854775808]", "[18446744073709551615]", "[4611686018427387904]",
        "[4294967296,4294967296]", "[2147483648,2147483648,8]", "[0,4294967296,4294967296]",
        "[9223372036854775807,0]"}) {
    expect_format_error("{\"a\":" + tensor(shape, "[0,0]") + "}", 0, {"\"a\"", "overflows"});
  }
  expect_format_error("{\"a\":" + tensor("[1,1,1,1,1,1,1]", "[0,4]") + "}", 4,
                      {"\"a\"", "at most 6 dimensions", "7"});
  expect_format_error("{\"a\":" + tensor("[1000000000]", "[0,4000000000]") + "}", 4,
                      {"\"a\"", "4000000000", "truncated"});
}

TEST_CASE("offsets that do not cover the data exactly once are refused")
{
  const auto two = [](std::string_view first, std::string_view second) {
    return "{\"a\":" + tensor("[2]", first) + ",\"b\":" + tensor("[1]", second) + "}";
  };
  CHECK_NOTHROW(SafetensorsFile::parse(Bytes(padded(two("[0,8]", "[8,12]")), 12).view(), "f"));
  CHECK_NOTHROW(SafetensorsFile::parse(Bytes(padded(two("[4,12]", "[0,4]")), 12).view(), "f"));
  expect_format_error(two("[0,8]", "[4,8]"), 12, {"\"b\"", "overlap"});
  expect_format_error(two("[0,8]", "[0,4]"), 12, {"overlap"});
  expect_format_error(two("[0,8]", "[12,16]"), 16, {"bytes 8 to 12", "no tensor"});
  expect_format_error(two("[4,12]", "[12,16]"), 16, {"bytes 0 to 4", "no tensor"});
  expect_format_error(two("[0,8]", "[8,12]"), 16, {"bytes 12 to 16", "no tensor"});
  expect_format_error(two("[0,8]", "[8,12]"), 11, {"\"b\"", "outside"});
  expect_format_error(two("[8,0]", "[8,12]"), 12, {"\"a\"", "begin 8", "end 0"});
  expect_format_error(two("[0,8]", "[8,13]"), 13, {"\"b\"", "4 bytes", "5"});
  expect_format_error(two("[0,18446744073709551615]", "[8,12]"), 12, {"\"a\"", "outside"});
  expect_format_error(two("[0,8,8]", "[8,12]"), 12, {"\"a\"", "3 numbers"});
  expect_format_error(two("[]", "[8,12]"), 12, {"\"a\"", "0 numbers"});
  expect_format_error("{}", 1, {"bytes 0 to 1", "no tensor"});
}

TEST_CASE("elements that are not aligned in the file are refused")
{
  const std::string odd =
      "{\"a\":" + tensor("[1]", "[0,1]", "U8") + ",\"b\":" + tensor("[1]", "[1,5]") + "}";
  expect_format_error(odd, 5, {"\"b\"", "aligned"});
}

TEST_CASE("an empty file of the format has no tensors")
{
  const Bytes file("{}", 0);
  CHECK(SafetensorsFile::parse(file.view(), "f").tensors().empty());
}

TEST_CASE("the reference files are readable and hold what their page says")
{
  for (const std::string_view name : test::golden_names) {
    CAPTURE(name);
    const auto golden = test::Golden::open(name);
    CHECK(golden.inputs.q.dtype == DType::bf16);
    CHECK(golden.inputs.g.dtype == DType::f32);
    CHECK(golden.o().extents[0] == golden.inputs.cu_seqlens.back());
    CHECK(golden.final_state().extents[0] + 1 == std::ssize(golden.inputs.cu_seqlens));
    CHECK(golden.file.metadata().at("source").find("transformers") != std::string::npos);
  }
}

TEST_CASE("what is no regular file is not replaced")
{
  const TemporaryDirectory directory;
  const std::filesystem::path pipe = directory.path() / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  float x = 1;
  const TensorView t = TensorView::dense(&x, DType::f32, {1});
  expect_error(ErrorCode::io, {"pipe", "expected a regular file"}, [&] {
    write_safetensors(pipe, {{"t", t}});
  });
  CHECK(std::filesystem::is_fifo(pipe));
  // A link stays a link, and the file behind it is the one that is written.
  write_safetensors(directory.path() / "file", {{"t", t}});
  std::filesystem::create_symlink(directory.path() / "file", directory.path() / "link");
  write_safetensors(directory.path() / "link", {{"u", t}});
  CHECK(std::filesystem::is_symlink(directory.path() / "link"));
  CHECK(SafetensorsFile::open(directory.path() / "file").contains("u"));
}
