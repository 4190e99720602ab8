#include "apps/process.hpp"

#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using gdnflow::test::Outcome;
using gdnflow::test::read_text;
using gdnflow::test::run;
using gdnflow::test::TemporaryFolder;
using Json = nlohmann::json;

TEST_CASE("info shows machine, pipelines, variants and the plan")
{
  const Outcome outcome = run("info", {"--device", "host"});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  for (const char* part : {"Machine", "host:", "Pipelines", "naive", "residual", "Stages",
                           "kkt_solve", "chunk_output", "Plan", "16/32 heads"}) {
    CAPTURE(part);
    CHECK(outcome.out.find(part) != std::string::npos);
  }
}

TEST_CASE("info as JSON holds the same, with every host variant")
{
  const TemporaryFolder folder;
  const std::string path = folder / "info.json";
  const Outcome outcome =
      run("info", {"--device", "host", "--heads", "2,8", "--head-dim", "32,48", "--tokens", "1000",
                   "--sequences", "3", "--pipeline", "residual", "--json", path});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.out == "");
  const Json info = Json::parse(read_text(path));
  CHECK(info.at("device") == "host");
  CHECK(info.at("problem").get<std::string>().find("2/8 heads, d_k 32 d_v 48") == 0);
  CHECK(info.at("capacity") == "1000 tokens, 3 sequences");
  CHECK(info.at("stages").size() == 13);
  for (const Json& stage : info.at("stages")) {
    CAPTURE(stage.at("name"));
    REQUIRE(!stage.at("variants").empty());
    CHECK(stage.at("variants")[0].at("runs") == true);
  }
  const Json& plan = info.at("plan");
  CHECK(plan.at("pipeline") == "residual");
  CHECK(plan.at("arena_bytes").get<long>() > 0);
  CHECK(plan.at("arena_bytes").get<long>() <= plan.at("unshared_bytes").get<long>());
  bool core = false;
  for (const Json& node : plan.at("nodes")) core = core || node.at("core").get<bool>();
  CHECK(core);
  CHECK(info.at("models").size() == 9);
}

TEST_CASE("info draws pipeline and plan as Graphviz")
{
  const Outcome pipeline = run("info", {"--device", "host", "--pipeline", "naive", "--dot"});
  CHECK(pipeline.status == 0);
  CHECK(pipeline.out.rfind("digraph", 0) == 0);
  CHECK(pipeline.out.find("chunk_state") != std::string::npos);
  const Outcome plan = run("info", {"--device", "host", "--pipeline", "naive", "--dot", "plan"});
  CHECK(plan.status == 0);
  CHECK(plan.out.rfind("digraph", 0) == 0);
  CHECK(plan.out != pipeline.out);
}

TEST_CASE("info says why an override cannot run")
{
  const Outcome outcome =
      run("info", {"--device", "host", "--variant", "kkt_solve=no-such-variant"});
  CHECK(outcome.status == 0);
  CHECK(outcome.out.find("refuses:") != std::string::npos);
  CHECK(outcome.out.find("no-such-variant") != std::string::npos);
}
