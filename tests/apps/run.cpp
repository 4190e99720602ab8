#include <gdnflow/gdnflow.hpp>

#include "apps/process.hpp"

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace gdnflow;
using gdnflow::test::golden;
using gdnflow::test::Outcome;
using gdnflow::test::TemporaryFolder;
using Json = nlohmann::json;

namespace {

using NamedTensors = std::vector<std::pair<std::string, TensorView>>;

std::vector<std::string> host(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--device", "host"});
  return arguments;
}

NamedTensors tensors_of(const SafetensorsFile& file) {
  NamedTensors tensors;
  for (const auto& [name, view] : file.tensors()) tensors.emplace_back(name, view);
  return tensors;
}

/// A small set of inputs in f32 with memory of its own.
struct Small {
  static constexpr std::int64_t tokens = 70, qk_heads = 2, v_heads = 4, dim = 16;
  std::vector<float> q, k, v, a, b, a_log{-1.0F, 0.0F, 0.5F, 1.0F},
      dt_bias{0.1F, 0.0F, -0.2F, 0.3F};

  Small() {
    const auto fill = [](InputKind kind, std::vector<float>& values,
                         std::vector<std::int64_t> extents) {
      std::int64_t elements = 1;
      for (const std::int64_t extent : extents) elements *= extent;
      values.resize(static_cast<std::size_t>(elements));
      fill_input(kind, Distribution::random_decay, 7,
                 TensorView::dense(values.data(), DType::f32, extents));
    };
    fill(InputKind::q, q, {tokens, qk_heads, dim});
    fill(InputKind::k, k, {tokens, qk_heads, dim});
    fill(InputKind::v, v, {tokens, v_heads, dim});
    fill(InputKind::g, a, {tokens, v_heads});
    fill(InputKind::beta, b, {tokens, v_heads});
  }

  static TensorView view(std::vector<float>& values, std::vector<std::int64_t> extents) {
    return TensorView::dense(values.data(), DType::f32, extents);
  }
};

}  // namespace

TEST_CASE("every reference file runs right on the host, to fp32 rounding")
{
  for (const char* name : {"packed_gva", "no_decay_equal", "correlated_keys", "qwen3_next_layer"}) {
    CAPTURE(name);
    const Outcome outcome = test::run("run", host({"--input", golden(name), "--json"}));
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    const Json result = Json::parse(outcome.out);
    CHECK(result.size() == 6);
    CHECK(result.at("device") == "host");
    CHECK(result.at("pipeline").is_string());
    CHECK(result.at("ms").get<double>() > 0);
    CHECK(result.at("tokens").get<int>() > 0);
    for (const char* tensor : {"o", "final_state"}) {
      CHECK(result.at(tensor).at("rel_rms").get<double>() < 1e-5);
      CHECK(result.at(tensor).at("rel_rms").get<double>() > 0);
      CHECK(result.at(tensor).at("max_abs").get<double>() < 1e-3);
    }
  }
}

TEST_CASE("a result that differs from the file ends in status 1 and names the element")
{
  const TemporaryFolder folder;
  const std::string path = folder / "wrong.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(golden("packed_gva"));
  NamedTensors tensors = tensors_of(file);
  const TensorView& o = file.find("o");
  std::vector<float> changed(o.as<const float>(), o.as<const float>() + o.elements());
  // Sequence 2 begins at token 15: its token 3, head 1, column 5.
  changed[static_cast<std::size_t>((18 * o.extents[1] + 1) * o.extents[2] + 5)] += 1.0F;
  for (auto& [name, view] : tensors) {
    if (name == "o") view.data = changed.data();
  }
  write_safetensors(path, tensors, {});
  const Outcome outcome = test::run("run", host({"--input", path}));
  CHECK(outcome.status == 1);
  CHECK(outcome.out.find("WRONG") != std::string::npos);
  CHECK(outcome.error_lines() == 1);
  CHECK(outcome.err.find("sequence 2 token 3 head 1 column 5") != std::string::npos);
  // A tolerance wide enough takes it.
  CHECK(test::run("run", host({"--input", path, "--tolerance", "10"})).status == 0);
}

TEST_CASE("outputs are written whole, under the file's own shape, and agree with the file's")
{
  const TemporaryFolder folder;
  const std::string path = folder / "out.safetensors";
  const Outcome outcome =
      test::run("run", host({"--input", golden("packed_gva"), "--output", path}));
  REQUIRE(outcome.status == 0);
  CHECK(folder.count() == 1);
  const SafetensorsFile expected = SafetensorsFile::open(golden("packed_gva"));
  const SafetensorsFile got = SafetensorsFile::open(path);
  CHECK(got.metadata().at("device") == "host");
  CHECK(compare(got.find("o"), expected.find("o")).within(1e-5));
  CHECK(compare(got.find("final_state"), expected.find("final_state")).within(1e-5));
}

TEST_CASE("a pipe stays a pipe and a link stays a link where results go")
{
  const TemporaryFolder folder;
  const std::string pipe = folder / "pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = open(pipe.c_str(), O_RDWR | O_NONBLOCK);
  REQUIRE(reader >= 0);
  CHECK(test::run("run", host({"--input", golden("no_decay_equal"), "--json=" + pipe})).status ==
        0);
  CHECK(std::filesystem::is_fifo(pipe));
  char first = 0;
  CHECK(read(reader, &first, 1) == 1);
  CHECK(first == '{');
  close(reader);

  // A file of tensors is only ever replaced as a whole.
  const Outcome refused =
      test::run("run", host({"--input", golden("no_decay_equal"), "--output", pipe}));
  CHECK(refused.status == 2);
  CHECK(refused.err.find("expected a regular file or a new name") != std::string::npos);
  CHECK(std::filesystem::is_fifo(pipe));

  const std::string link = folder / "link";
  std::filesystem::create_symlink("target", link);
  for (const char* option : {"--json", "--output"}) {
    CHECK(test::run("run", host({"--input", golden("no_decay_equal"), option, link})).status == 0);
    CHECK(std::filesystem::is_symlink(link));
    CHECK(std::filesystem::is_regular_file(folder / "target"));
  }
}

TEST_CASE("standard output that cannot be written is status 2, however much is written")
{
  if (!std::filesystem::exists("/dev/full")) return;
  for (const char* form : {"--json=/dev/full", "--json=-"}) {
    const std::string command = std::string(GDNFLOW_BIN_DIR) + "/gdnflow-info --device host " +
                                form + " > /dev/full 2> /dev/null";
    CHECK(WEXITSTATUS(std::system(command.c_str())) == 2);
  }
}

TEST_CASE("a result of NaN has no measures, rather than measures of 0")
{
  const TemporaryFolder folder;
  const std::string path = folder / "nan.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(golden("packed_gva"));
  NamedTensors tensors = tensors_of(file);
  std::vector<float> g(static_cast<std::size_t>(file.find("g").elements()), NAN);
  for (auto& [name, view] : tensors) {
    if (name == "g") view.data = g.data();
  }
  write_safetensors(path, tensors, {});
  const Outcome outcome = test::run("run", host({"--input", path, "--json"}));
  CHECK(outcome.status == 1);
  const Json result = Json::parse(outcome.out);
  CHECK(result.at("o").at("rel_rms").is_null());
  CHECK(result.at("o").at("max_abs").is_null());
}

TEST_CASE("a tolerance that makes no sense is refused before anything is written")
{
  const TemporaryFolder folder;
  const std::string path = folder / "out.safetensors";
  for (const char* tolerance : {"-1", "nan"}) {
    CHECK(test::run("run", host({"--input", golden("packed_gva"), "--output", path, "--tolerance",
                                 tolerance}))
              .status == 2);
  }
  CHECK(folder.count() == 0);
}

TEST_CASE("half-precision outputs are held to half-precision bounds")
{
  const Outcome outcome =
      test::run("run", host({"--input", golden("qwen3_next_layer"), "--type", "bf16", "--json"}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const double error = Json::parse(outcome.out).at("o").at("rel_rms").get<double>();
  CHECK(error > 1e-4);  // rounding o alone costs 1.66e-3
  CHECK(error < 5e-3);
}

TEST_CASE("names are mapped, and --check compares with the oracle what the file lacks")
{
  const TemporaryFolder folder;
  const std::string path = folder / "renamed.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(golden("packed_gva"));
  NamedTensors tensors;
  for (const auto& [name, view] : tensors_of(file)) {
    if (name != "o" && name != "final_state") tensors.emplace_back("model." + name, view);
  }
  write_safetensors(path, tensors, {});
  std::vector<std::string> arguments{"--input", path};
  for (const char* name : {"q", "k", "v", "g", "beta", "cu_seqlens", "initial_state"}) {
    arguments.insert(arguments.end(), {"--map", std::string(name) + "=model." + name});
  }
  const Outcome unchecked = test::run("run", host(arguments));
  CHECK(unchecked.status == 0);
  CHECK(unchecked.out.find("not compared") != std::string::npos);
  arguments.insert(arguments.end(), {"--check", "--json"});
  const Outcome checked = test::run("run", host(arguments));
  CAPTURE(checked.err);
  REQUIRE(checked.status == 0);
  const Json result = Json::parse(checked.out);
  CHECK(result.at("o").at("rel_rms").get<double>() < 1e-5);
  CHECK(result.at("final_state").at("rel_rms").get<double>() < 1e-5);
}

TEST_CASE("q and k are normalised where the option or the file's metadata says so")
{
  const TemporaryFolder folder;
  const std::string path = folder / "plain.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(golden("qwen3_next_layer"));
  write_safetensors(path, tensors_of(file), {});  // without the metadata
  CHECK(test::run("run", host({"--input", path})).status == 1);
  CHECK(test::run("run", host({"--input", path, "--qk-norm"})).status == 0);
  write_safetensors(path, tensors_of(file), {{"qk_l2norm_in_kernel", "True"}});
  const Outcome misspelt = test::run("run", host({"--input", path}));
  CHECK(misspelt.status == 2);
  CHECK(misspelt.err.find("expected true or false, got 'True'") != std::string::npos);
}

TEST_CASE("raw gates, alpha and logits give the oracle's result")
{
  const TemporaryFolder folder;
  const std::string path = folder / "gates.safetensors";
  Small small;
  using S = Small;
  const TensorView q = S::view(small.q, {S::tokens, S::qk_heads, S::dim});
  const TensorView k = S::view(small.k, {S::tokens, S::qk_heads, S::dim});
  const TensorView v = S::view(small.v, {S::tokens, S::v_heads, S::dim});
  const TensorView b = S::view(small.b, {S::tokens, S::v_heads});
  std::vector<float> alpha(small.a);
  for (float& value : alpha) value = std::exp(value);
  const NamedTensors forms[] = {{{"q", q},
                                 {"k", k},
                                 {"v", v},
                                 {"b", b},
                                 {"a", S::view(small.a, {S::tokens, S::v_heads})},
                                 {"a_log", S::view(small.a_log, {S::v_heads})},
                                 {"dt_bias", S::view(small.dt_bias, {S::v_heads})}},
                                {{"q", q},
                                 {"k", k},
                                 {"v", v},
                                 {"beta", b},
                                 {"alpha", S::view(alpha, {S::tokens, S::v_heads})}}};
  for (const NamedTensors& tensors : forms) {
    write_safetensors(path, tensors, {});
    const Outcome outcome = test::run("run", host({"--input", path, "--check", "--json"}));
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    const Json result = Json::parse(outcome.out);
    CHECK(result.at("tokens") == S::tokens);
    CHECK(result.at("o").at("rel_rms").get<double>() < 1e-5);
    CHECK(result.at("final_state").at("rel_rms").get<double>() < 1e-5);
  }
}

TEST_CASE("dense batches keep their shape, and rows behind the last sequence are zero")
{
  const TemporaryFolder folder;
  const std::string path = folder / "dense.safetensors";
  const std::string out = folder / "out.safetensors";
  Small small;
  using S = Small;
  constexpr std::int64_t batch = 2, each = S::tokens / batch;
  const NamedTensors dense{{"q", S::view(small.q, {batch, each, S::qk_heads, S::dim})},
                           {"k", S::view(small.k, {batch, each, S::qk_heads, S::dim})},
                           {"v", S::view(small.v, {batch, each, S::v_heads, S::dim})},
                           {"g", S::view(small.a, {batch, each, S::v_heads})},
                           {"beta", S::view(small.b, {batch, each, S::v_heads})}};
  write_safetensors(path, dense, {});
  const Outcome outcome = test::run("run", host({"--input", path, "--check", "--output", out}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const TensorView shape = SafetensorsFile::open(out).find("o");
  CHECK(shape.rank == 4);
  CHECK(shape.extents[0] == batch);
  CHECK(shape.extents[1] == each);

  std::int32_t offsets[] = {0, 20, 50};
  NamedTensors packed = dense;
  for (auto& [name, view] : packed) {
    std::vector<std::int64_t> extents{S::tokens};
    extents.insert(extents.end(), view.extents.begin() + 2, view.extents.begin() + view.rank);
    view = TensorView::dense(view.data, view.dtype, extents);
  }
  packed.emplace_back("cu_seqlens", TensorView::dense(offsets, DType::i32, {3}));
  write_safetensors(path, packed, {});
  const Outcome padded =
      test::run("run", host({"--input", path, "--check", "--output", out, "--json"}));
  CAPTURE(padded.err);
  REQUIRE(padded.status == 0);
  CHECK(Json::parse(padded.out).at("tokens") == 50);
  const SafetensorsFile written = SafetensorsFile::open(out);
  const TensorView& o = written.find("o");
  bool zero = true;
  for (std::int64_t i = 50 * S::v_heads * S::dim; i < o.elements(); ++i) {
    zero = zero && o.as<const float>()[i] == 0.0F;
  }
  CHECK(zero);
}

TEST_CASE("lengths that fall or reach past the tokens are refused")
{
  const TemporaryFolder folder;
  const std::string path = folder / "lengths.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(golden("no_decay_equal"));
  for (const auto& [first, second, last] :
       {std::array{0, 100, 99}, std::array{0, 100, 194}, std::array{1, 100, 193}}) {
    std::int32_t offsets[] = {first, second, last};
    NamedTensors tensors;
    for (const auto& [name, view] : tensors_of(file)) {
      if (name != "cu_seqlens" && name != "o" && name != "final_state") {
        tensors.emplace_back(name, view);
      }
    }
    tensors.emplace_back("cu_seqlens", TensorView::dense(offsets, DType::i32, {3}));
    write_safetensors(path, tensors, {});
    const Outcome outcome = test::run("run", host({"--input", path}));
    CHECK(outcome.status == 2);
    CHECK(outcome.error_lines() == 1);
    CHECK(outcome.err.find("cu_seqlens") != std::string::npos);
  }
}

TEST_CASE("states in the other layout are read and written in it")
{
  const TemporaryFolder folder;
  const std::string path = folder / "vk.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(golden("packed_gva"));
  NamedTensors tensors = tensors_of(file);
  std::vector<std::vector<float>> memory;
  for (auto& [name, view] : tensors) {
    if (name != "initial_state" && name != "final_state") continue;
    const std::int64_t d = view.extents[3];
    std::vector<float> turned(static_cast<std::size_t>(view.elements()));
    for (std::int64_t i = 0; i < view.elements(); ++i) {
      const std::int64_t matrix = i / (d * d) * d * d, row = i / d % d, column = i % d;
      turned[static_cast<std::size_t>(matrix + column * d + row)] = view.as<const float>()[i];
    }
    memory.push_back(std::move(turned));
    view.data = memory.back().data();
  }
  write_safetensors(path, tensors, {});
  CHECK(test::run("run", host({"--input", path})).status == 1);
  CHECK(test::run("run", host({"--input", path, "--state-layout", "vk"})).status == 0);
  // The file's metadata says it too.
  write_safetensors(path, tensors, {{"state_layout", "vk"}});
  CHECK(test::run("run", host({"--input", path})).status == 0);
}
