#include "apps/process.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using gdnflow::test::Outcome;
using gdnflow::test::read_text;
using gdnflow::test::run;
using gdnflow::test::TemporaryFolder;
using gdnflow::test::write_text;
using Json = nlohmann::json;

namespace {

std::vector<std::string> host(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--device", "host", "--seconds", "0"});
  return arguments;
}

long lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

const Json& find(const Json& list, const std::string& key, const std::string& value) {
  for (const Json& item : list) {
    if (item.at(key) == value) return item;
  }
  throw std::runtime_error("no " + key + " " + value);
}

}  // namespace

TEST_CASE("the standard cases run scaled down on the host, all right against the oracle" *
          doctest::test_suite("long"))
{
  const TemporaryFolder folder;
  const std::string json = folder / "report.json";
  const std::string results = folder / "results.csv";
  const Outcome outcome =
      run("ablate", host({"--json", json, "--results", results, "--commit", "abc123"}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.out.find("scaled down") != std::string::npos);
  CHECK(outcome.out.find("WRONG") == std::string::npos);
  const Json report = Json::parse(read_text(json));
  CHECK(report.at("cases").size() == 8);
  long pipelines = 0;
  for (const Json& result : report.at("cases")) {
    CAPTURE(result.at("name"));
    CHECK(result.at("scaled_down_from").is_string());
    CHECK(result.at("v_heads").get<int>() <= 8);
    CHECK(result.at("floor_ms").is_null());
    for (const char* id : {"naive", "residual"}) {
      const Json pipeline = find(result.at("pipelines"), "id", id);
      CHECK(pipeline.at("core_ms").get<double>() > 0);
    }
    for (const Json& pipeline : result.at("pipelines")) {
      ++pipelines;
      CAPTURE(pipeline.at("id"));
      CHECK(pipeline.at("right") == true);
      CHECK(pipeline.at("o").at("rel_rms").get<double>() < 1e-5);
      CHECK(pipeline.at("final_state").at("rel_rms").get<double>() < 1e-5);
      CHECK(pipeline.at("forward_ms").get<double>() > 0);
      CHECK(pipeline.at("ratio_to_baseline").get<double>() > 0);
      CHECK(!pipeline.at("stages").empty());
    }
    CHECK(find(result.at("pipelines"), "id", "naive").at("ratio_to_baseline") == 1.0);
  }
  // Proportions: whole chunks scaled to 256 tokens, the tail and the ratio of heads kept.
  const Json tail = find(report.at("cases"), "name", "short_tail_state");
  CHECK(tail.at("lengths") == Json::array({3 * 64 + 1}));
  CHECK(tail.at("initial_state") == true);
  CHECK(find(report.at("cases"), "name", "batch_split_gva").at("lengths") ==
        Json::array({64, 64, 64, 64}));
  CHECK(find(report.at("cases"), "name", "wide_gva_state").at("qk_heads") == 2);
  CHECK(find(report.at("cases"), "name", "parallel_gva").at("gate") == "mixed");

  const std::string csv = read_text(results);
  CHECK(csv.rfind("commit,case,pipeline,core_ms,forward_ms,o_rel_rms,state_rel_rms\n", 0) == 0);
  CHECK(csv.find("\nabc123,chain_equal,naive,") != std::string::npos);
  CHECK(lines(csv) == 1 + pipelines);
}

TEST_CASE("cases come from the command line and from files in both formats")
{
  const TemporaryFolder folder;
  const std::string csv = folder / "out.csv";
  Outcome outcome =
      run("ablate", host({"--case", "2,65,1,2,state", "--lengths", "70,0,3", "--heads", "2,4",
                          "--pipelines", "residual", "--csv", csv, "--full"}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const std::string text = read_text(csv);
  CHECK(text.find("\n2x65_1_2_state,65+65,1,2,1,random_decay,residual,") != std::string::npos);
  CHECK(text.find("\n70+0+3_2_4,70+0+3,2,4,0,random_decay,residual,") != std::string::npos);
  CHECK(lines(text) == 3);
  CHECK(outcome.out.find("scaled down") == std::string::npos);

  const std::string cases = folder / "cases.csv";
  write_text(cases,
             "model,tp,lengths,qk_heads,v_heads,best_ms\r\n# a comment\n"
             "some,8,64+32,1,2,0.25\nsome,4,32,2,4,0.25\n");
  outcome = run("ablate", host({"--cases", cases, "--only", "64+32_1_2", "--distribution",
                                "no_decay", "--pipelines", "naive", "--csv", csv}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(read_text(csv).find("\n64+32_1_2,64+32,1,2,0,no_decay,naive,") != std::string::npos);
  CHECK(lines(read_text(csv)) == 2);
}

TEST_CASE("raw gates in place of log decay and beta are right in every pipeline")
{
  for (const char* const distribution : {"model", "quarter_frozen"}) {
    const Outcome outcome =
        run("ablate", host({"--case", "1,130,2,4", "--raw-gates", "--distribution", distribution,
                            "--json", "--pipelines", "naive,residual,auto"}));
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    const Json report = Json::parse(outcome.out);
    for (const Json& pipeline : report.at("cases").at(0).at("pipelines")) {
      CHECK(pipeline.at("right") == true);
      CHECK(find(pipeline.at("stages"), "node", "gate").at("ms").get<double>() >= 0);
    }
  }
}

TEST_CASE("a report is read back to the same table, CSV and JSON, and is plotted")
{
  const TemporaryFolder folder;
  const std::string first = folder / "first.json";
  const std::string second = folder / "second.json";
  const std::string first_csv = folder / "first.csv";
  const std::string second_csv = folder / "second.csv";
  const Outcome measured =
      run("ablate",
          host({"--case", "1,64,1,2", "--case", "1,100,2,2", "--json", first, "--csv", first_csv}));
  CAPTURE(measured.err);
  REQUIRE(measured.status == 0);
  const Outcome read = run("ablate", {"--from", first, "--json", second, "--csv", second_csv});
  CAPTURE(read.err);
  REQUIRE(read.status == 0);
  CHECK(read.out == measured.out);
  CHECK(read_text(second) == read_text(first));
  CHECK(read_text(second_csv) == read_text(first_csv));

  const std::string svg = folder / "plot.svg";
  const int before = folder.count();
  const Outcome plotted = run("ablate", {"--from", first, "--svg", svg});
  CHECK(plotted.status == 0);
  if (plotted.err.empty()) {
    const std::string plot = read_text(svg);
    CHECK(plot.find("<svg") != std::string::npos);
    CHECK(plot.find("</svg>") != std::string::npos);
    CHECK(plot.find("residual") != std::string::npos);
    CHECK(folder.count() == before + 1);
  } else {
    CHECK(plotted.err.find("gnuplot was not found") != std::string::npos);
    CHECK(folder.count() == before);
  }
}

TEST_CASE("without gnuplot one line says so and the other outputs are written")
{
  const TemporaryFolder folder;
  const std::string json = folder / "report.json";
  const std::string svg = folder / "plot.svg";
  const std::string csv = folder / "out.csv";
  REQUIRE(run("ablate", host({"--case", "1,64,1,2", "--json", json})).status == 0);
  const Outcome outcome =
      run("ablate", {"--from", json, "--svg", svg, "--csv", csv}, "/no/such/folder");
  CHECK(outcome.status == 0);
  CHECK(outcome.err ==
        "gdnflow-ablate: no plot: gnuplot was not found on PATH; the other outputs are written\n");
  CHECK(!read_text(csv).empty());
  CHECK(folder.count() == 2);
}

TEST_CASE("a wrong result in a report is status 1")
{
  const TemporaryFolder folder;
  const std::string path = folder / "report.json";
  REQUIRE(run("ablate", host({"--case", "1,64,1,2", "--json", path})).status == 0);
  Json report = Json::parse(read_text(path));
  report["cases"][0]["pipelines"][0]["right"] = false;
  report["cases"][0]["pipelines"][0]["o"]["rel_rms"] = nullptr;
  write_text(path, report.dump());
  const Outcome outcome = run("ablate", {"--from", path});
  CHECK(outcome.status == 1);
  CHECK(outcome.error_lines() == 1);
  CHECK(outcome.out.find("WRONG") != std::string::npos);
}

TEST_CASE("JSON on standard output stands alone")
{
  const Outcome outcome = run("ablate", host({"--case", "1,64,1,2", "--json"}));
  REQUIRE(outcome.status == 0);
  CHECK(Json::parse(outcome.out).at("cases").size() == 1);
}
