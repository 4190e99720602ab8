// Options, L2 and multiprocessors in gdnflow-ablate. No variant of the host has options, so there
// values are refused, and reports with rows of options are made from others; the rest needs a GPU.

#include "apps/process.hpp"
#include "support/gpu.hpp"

#include <algorithm>
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

Outcome ablate(const std::string& device, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--device", device});
  return run("ablate", std::move(arguments));
}

Outcome on_host(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--seconds", "0", "--case", "1,65,1,2"});
  return ablate("host", std::move(arguments));
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The line of a table that holds all of the words.
std::string line_with(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& line : lines_of(text)) {
    if (std::all_of(words.begin(), words.end(), [&](const std::string& word) {
          return line.find(word) != std::string::npos;
        })) {
      return line;
    }
  }
  return "";
}

// A report with a pipeline as given and with options, hot and cold times, and a refused value.
Json report_with_options(const std::string& path) {
  REQUIRE(on_host({"--pipelines", "naive,residual", "--json", path}).status == 0);
  Json report = Json::parse(read_text(path));
  Json& result = report["cases"][0];
  Json& rows = result["pipelines"];
  rows[0]["forward_ms"] = 4.0;
  rows[1]["forward_ms"] = 2.0;
  Json changed = rows[1];
  changed["options"] = "chunk_output:tile=64";
  changed["as_given"] = false;
  changed["forward_ms"] = 1.0;
  changed["core_ms"] = 0.5;
  rows.push_back(changed);
  for (Json& row : rows) {
    row["forward_cold_ms"] = row["forward_ms"].get<double>() + 8;
    row["core_cold_ms"] = nullptr;
  }
  result["refused"].push_back(
      {{"id", "residual"}, {"options", "chunk_output:tile=3"}, {"reason", "one of [1, 2]"}});
  report["limit"] = "limited to 16 of 132 multiprocessors (asked for 14)";
  write_text(path, report.dump());
  return report;
}

}  // namespace

TEST_CASE(
    "a refused value of a sweep is a row with the reason, and pipelines without the stage run")
{
  const TemporaryFolder folder;
  const std::string csv = folder / "out.csv";
  const std::string json = folder / "out.json";
  const Outcome outcome =
      on_host({"--pipelines", "naive,residual", "--sweep", "chunk_state=host:tile=1,2,depth=3",
               "--csv", csv, "--json", json});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(line_with(outcome.out, {"residual", "as given", "right"}) != "");
  for (const char* options :
       {"chunk_state:tile=1 chunk_state:depth=3", "chunk_state:tile=2 chunk_state:depth=3"}) {
    CHECK(line_with(outcome.out, {"naive", options, "refused:", "option 'tile'"}) != "");
  }
  CHECK(outcome.out.find("not run") == std::string::npos);

  const std::vector<std::string> rows = lines_of(read_text(csv));
  REQUIRE(rows.size() == 4);
  for (const std::string& row : rows) {
    CHECK(std::count(row.begin(), row.end(), ',') ==
          std::count(rows[0].begin(), rows[0].end(), ','));
  }
  CHECK(rows[0].find(",pipeline,options,core_ms,forward_ms,core_cold_ms,forward_cold_ms,") !=
        std::string::npos);
  CHECK(rows[2].find(",naive,chunk_state:tile=1 chunk_state:depth=3,,") != std::string::npos);

  const Json result = Json::parse(read_text(json)).at("cases").at(0);
  CHECK(result.at("pipelines").size() == 1);
  REQUIRE(result.at("refused").size() == 2);
  CHECK(result.at("refused")[1].at("options") == "chunk_state:tile=2 chunk_state:depth=3");
}

TEST_CASE("a report with options and a cold L2 is read back the same in every form")
{
  const TemporaryFolder folder;
  const std::string first = folder / "first.json";
  const Json report = report_with_options(first);
  const std::string json = folder / "second.json";
  const std::string csv = folder / "out.csv";
  const std::string markdown = folder / "out.md";
  const std::string results = folder / "results.csv";
  const Outcome outcome =
      run("ablate", {"--from", first, "--json", json, "--csv", csv, "--markdown", markdown,
                     "--results", results, "--commit", "abc"});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const Json again = Json::parse(read_text(json));
  Json expected = report;
  // What a report computes from its numbers follows the changed ones.
  expected["cases"][0]["pipelines"][0]["ratio_to_baseline"] = 1.0;
  expected["cases"][0]["pipelines"][0]["ratio_as_given"] = 1.0;
  expected["cases"][0]["pipelines"][1]["ratio_to_baseline"] = 2.0;
  expected["cases"][0]["pipelines"][1]["ratio_as_given"] = 1.0;
  expected["cases"][0]["pipelines"][2]["ratio_to_baseline"] = 4.0;
  expected["cases"][0]["pipelines"][2]["ratio_as_given"] = 2.0;
  CHECK(again == expected);

  CHECK(outcome.out.find("\nlimited to 16 of 132 multiprocessors (asked for 14)\n") !=
        std::string::npos);
  CHECK(line_with(outcome.out, {"options", "core ms", "forward ms", "core cold ms",
                                "forward cold ms", "x naive", "x as given"}) != "");
  CHECK(line_with(outcome.out,
                  {"chunk_output:tile=64", "0.5000", "1.0000", "9.0000", "4.00", "2.00"}) != "");
  CHECK(line_with(outcome.out, {"chunk_output:tile=3", "refused: one of [1, 2]"}) != "");

  const std::string md = read_text(markdown);
  CHECK(line_with(md, {"- limited to 16 of 132"}) != "");
  CHECK(line_with(md, {"| case | lengths heads | pipeline | options | core ms | forward ms |"}) !=
        "");
  CHECK(line_with(md, {"|---|---|---|---|---:|---:|", "---|"}) != "");
  CHECK(line_with(md, {"| residual | chunk_output:tile=64 | 0.5000 | 1.0000 | - | 9.0000 |"}) !=
        "");
  CHECK(run("ablate", {"--from", first, "--markdown"}).out == md);

  CHECK(line_with(read_text(csv), {",residual,chunk_output:tile=64,0.5,1,,9,4,2,"}) != "");
  CHECK(line_with(read_text(csv), {",residual,chunk_output:tile=3,", ",one of [1; 2]"}) != "");
  CHECK(line_with(read_text(results), {"abc,", ",residual chunk_output:tile=64,0.5000,1.0000,"}) !=
        "");
}

TEST_CASE("a plot has a series for each set of options and a panel for each state of L2")
{
  const TemporaryFolder folder;
  const std::string json = folder / "report.json";
  const std::string svg = folder / "plot.svg";
  (void)report_with_options(json);
  const Outcome outcome = run("ablate", {"--from", json, "--svg", svg});
  CHECK(outcome.status == 0);
  if (!outcome.err.empty()) {
    CHECK(outcome.err.find("gnuplot was not found") != std::string::npos);
    return;
  }
  const std::string plot = read_text(svg);
  CHECK(plot.find("residual chunk_output:tile=64") != std::string::npos);
  CHECK(plot.find("forward with a cold L2, ms") != std::string::npos);
  CHECK(plot.find("limited to 16 of 132") != std::string::npos);
}

TEST_CASE("a report of cold times alone has no hot columns and no line for the results")
{
  const TemporaryFolder folder;
  const std::string path = folder / "report.json";
  Json report = report_with_options(path);
  for (Json& row : report["cases"][0]["pipelines"]) row["forward_ms"] = row["core_ms"] = nullptr;
  write_text(path, report.dump());
  const Outcome outcome = run("ablate", {"--from", path});
  REQUIRE(outcome.status == 0);
  CHECK(outcome.out.find("forward cold ms") != std::string::npos);
  CHECK(outcome.out.find("forward ms") == std::string::npos);
  // 12 ms of the baseline over 9 ms.
  CHECK(line_with(outcome.out, {"chunk_output:tile=64", "9.0000", "1.33"}) != "");
  const std::string results = folder / "results.csv";
  const Outcome refused = run("ablate", {"--from", path, "--results", results, "--commit", "abc"});
  CHECK(refused.status == 2);
  CHECK(refused.err.find("hot L2") != std::string::npos);
  CHECK(folder.count() == 1);
}

TEST_CASE("variants without options have nothing to break down, and marks change nothing")
{
  const Outcome outcome = on_host({"--pipelines", "naive,residual", "--options", "--trace"});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.out.find("as given") == std::string::npos);
  CHECK(line_with(outcome.out, {"naive", "right"}) != "");
  CHECK(line_with(outcome.out, {"residual", "right"}) != "");
}

TEST_CASE("on a GPU a sweep runs every combination, and a breakdown every other value of an option")
{
  GDNFLOW_REQUIRE_GPU();
  const TemporaryFolder folder;
  const std::string json = folder / "report.json";
  const std::vector<std::string> common{
      "--seconds", "0",    "--case",      "1,130,2,4,state", "--json", json,
      "--l2",      "both", "--pipelines", "naive,fused-128", "--trace"};
  std::vector<std::string> arguments = common;
  arguments.insert(arguments.end(), {"--sweep", "fused_prefill:value_tile=64,128,48"});
  const Outcome swept = ablate("cuda", arguments);
  CAPTURE(swept.err);
  REQUIRE(swept.status == 0);
  const Json sweep = Json::parse(read_text(json)).at("cases").at(0);
  REQUIRE(sweep.at("pipelines").size() == 3);
  CHECK(sweep.at("pipelines")[0].at("id") == "naive");
  CHECK(sweep.at("pipelines")[1].at("options") == "fused_prefill:value_tile=64");
  CHECK(sweep.at("pipelines")[1].at("as_given") == false);
  CHECK(sweep.at("pipelines")[2].at("options") == "fused_prefill:value_tile=128");
  for (const Json& row : sweep.at("pipelines")) {
    CHECK(row.at("right") == true);
    CHECK(row.at("forward_ms").get<double>() > 0);
    // All of this fits in L2, so that it is faster there.
    CHECK(row.at("forward_cold_ms").get<double>() > row.at("forward_ms").get<double>());
    CHECK(row.at("core_cold_ms").get<double>() > row.at("core_ms").get<double>());
  }
  const Json refused = sweep.at("refused");
  CHECK(std::count_if(refused.begin(), refused.end(), [](const Json& refusal) {
          return refusal.at("options") == "fused_prefill:value_tile=48";
        }) == 1);

  arguments = common;
  arguments.emplace_back("--options");
  const Outcome broken_down = ablate("cuda", arguments);
  CAPTURE(broken_down.err);
  REQUIRE(broken_down.status == 0);
  std::vector<std::string> options;
  const Json breakdown = Json::parse(read_text(json));  // outlives the loop over a part of it
  for (const Json& row : breakdown.at("cases").at(0).at("pipelines")) {
    CHECK(row.at("right") == true);
    CHECK(row.at("ratio_as_given").get<double>() > 0);
    CHECK(row.at("as_given").get<bool>() == row.at("options").get<std::string>().empty());
    if (row.at("id") == "fused-128") options.push_back(row.at("options"));
  }
  REQUIRE(!options.empty());
  CHECK(options.front() == "");
  for (const char* value : {"64", "128"}) {
    const std::string text = std::string("fused_prefill:value_tile=") + value;
    CHECK(std::find(options.begin(), options.end(), text) != options.end());
  }
}

TEST_CASE("a limit on multiprocessors holds for replays, and results stay right")
{
  GDNFLOW_REQUIRE_GPU();
  const TemporaryFolder folder;
  const std::string path = folder / "report.json";
  const auto measure = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"--seconds",   "0.05",           "--case", "1,2048,16,64",
                                       "--pipelines", "naive,residual", "--json", path};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = ablate("cuda", arguments);
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    return Json::parse(read_text(path));
  };
  const int all = gdnflow::device_info({gdnflow::DeviceType::cuda, 0}).multiprocessors;
  const Json whole = measure({});
  const Json part = measure({"--sms", "8"});
  CHECK(whole.at("limit") == "");
  const std::string limit = part.at("limit");
  CHECK(limit.rfind("limited to ", 0) == 0);
  const int got = std::stoi(limit.substr(std::string("limited to ").size()));
  CHECK(got >= 8);
  CHECK(got <= 16);
  CHECK(limit.find(" of " + std::to_string(all) + " multiprocessors") != std::string::npos);
  CHECK(part.at("machine").get<std::string>().find(", " + std::to_string(got) +
                                                   " multiprocessors") != std::string::npos);
  CHECK(part.at("tensor_macs_per_second").get<double>() <
        whole.at("tensor_macs_per_second").get<double>());
  // Many blocks: half of the loss that the count of multiprocessors says is asked for, of replays
  // as of launches.
  const double least = 0.5 * all / got;
  for (std::size_t i = 0; i < 2; ++i) {
    const Json& slow = part.at("cases")[0].at("pipelines")[i];
    const Json& fast = whole.at("cases")[0].at("pipelines")[i];
    CAPTURE(slow.at("id"));
    CHECK(slow.at("right") == true);
    CHECK(slow.at("forward_ms").get<double>() > least * fast.at("forward_ms").get<double>());
    CHECK(slow.at("core_ms").get<double>() > least * fast.at("core_ms").get<double>());
  }
  const Outcome info = run("info", {"--device", "cuda", "--sms", "8", "--json"});
  CAPTURE(info.err);
  REQUIRE(info.status == 0);
  CHECK(Json::parse(info.out).at("limit") == limit);

  const Outcome refused = ablate("cuda", {"--sms", std::to_string(all + 1)});
  CHECK(refused.status == 2);
  CHECK(refused.error_lines() == 1);
  CHECK(refused.err.find("at most the " + std::to_string(all)) != std::string::npos);
}
