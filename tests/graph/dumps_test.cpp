#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>

#include "graph/tiny_stages.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <doctest/doctest.h>

// What pipelines and plans print, against files in tests/golden/dumps. After a change that is
// meant, GDNFLOW_UPDATE_DUMPS=1 writes them anew; read the difference before you commit it.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

void check_dump(const std::string& name, const std::string& text) {
  const std::filesystem::path path =
      std::filesystem::path(GDNFLOW_TEST_DATA) / "golden" / "dumps" / name;
  if (std::getenv("GDNFLOW_UPDATE_DUMPS") != nullptr) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  std::ifstream file(path, std::ios::binary);
  REQUIRE_MESSAGE(file.is_open(), path.string());
  const std::string expected{std::istreambuf_iterator<char>(file), {}};
  CHECK_MESSAGE(text == expected, name, " differs; now it is\n", text);
}

Problem full_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  p.qk_norm = true;
  p.gate = GateForm::raw;
  p.initial_state = true;
  p.state_indices = true;
  p.zero_padding = true;
  return p;
}

Problem plain_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  return p;
}

}  // namespace

TEST_CASE("pipelines print themselves")
{
  check_dump("naive.txt",
             to_string(make_pipeline("naive", plain_problem(), {1000, 3}, plain_host())));
  check_dump("naive.dot", to_dot(make_pipeline("naive", plain_problem(), {1000, 3}, plain_host())));
  check_dump("residual.txt",
             to_string(make_pipeline("residual", full_problem(), {1000, 3}, plain_host())));
  check_dump("residual.dot",
             to_dot(make_pipeline("residual", full_problem(), {1000, 3}, plain_host())));
}

TEST_CASE("plans print themselves")
{
  const Pipeline naive = make_pipeline("naive", plain_problem(), {1000, 3}, plain_host());
  check_dump("naive_plan.txt", to_string(Plan(naive)));
  check_dump("naive_plan_apart.txt", to_string(Plan(naive, {.reuse = false})));
  check_dump("naive_plan.dot", to_dot(Plan(naive)));
}

TEST_CASE("names with quotes stay one label")
{
  const Registry registry({tiny_stage("say \"hi\"", {writes("back\\slash")})});
  const std::string dot = to_dot(PipelineBuilder("p\"q", registry, {}, {1, 1}, plain_host())
                                     .outputs({"back\\slash"})
                                     .add("say \"hi\"")
                                     .build());
  CHECK(dot.find("digraph \"p\\\"q\"") != std::string::npos);
  CHECK(dot.find("label=\"say \\\"hi\\\"\\nhost\"") != std::string::npos);
  CHECK(dot.find("label=\"back\\\\slash\\nf32[1]\"") != std::string::npos);
}
