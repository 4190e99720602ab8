// The figures that recipe auto chooses by: fitted to rows, and measured on a GPU.

#include "apps/process.hpp"
#include "support/gpu.hpp"

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

const std::string root = std::string(GDNFLOW_TEST_DATA) + "/..";
const std::string header =
    "commit,gpu,capability,multiprocessors,case,pipeline,options,core_ms,forward_ms\n";

/// Whether two figures or texts are the same, the last digits of a fit apart.
void check_same(const Json& got, const Json& expected, const std::string& where) {
  CAPTURE(where);
  REQUIRE(got.type_name() == std::string(expected.type_name()));
  if (got.is_number()) {
    CHECK(got.get<double>() == doctest::Approx(expected.get<double>()).epsilon(2e-3));
  } else if (got.is_structured()) {
    REQUIRE(got.size() == expected.size());
    for (const auto& [key, value] : expected.items()) {
      const Json::json_pointer at("/" + key);
      REQUIRE(got.contains(at));
      check_same(got.at(at), value, std::string(where).append("/").append(key));
    }
  } else {
    CHECK(got == expected);
  }
}

}  // namespace

TEST_CASE("the figures compiled in are those that the rows of docs/results give")
{
  const TemporaryFolder folder;
  const std::string table = folder / "costs.json";
  const Outcome outcome =
      run("ablate", {"--fit", root + "/docs/results/h200_cost_rows.csv", "--tune", table});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  check_same(Json::parse(read_text(table)), Json::parse(read_text(root + "/graph/costs/h200.json")),
             "");
  for (const char* part :
       {"NVIDIA H200", "one-pass one_pass:value_tile=128",
        "equal lengths: 116 cases, the choice among the forms measured within 5 % of the best on "
        "116,",
        "unequal lengths: 72 cases"}) {
    CAPTURE(part);
    CHECK(outcome.out.find(part) != std::string::npos);
  }
}

TEST_CASE("a fit finds the factors that rows were made with, and how many blocks fit")
{
  // 20 + 3 rounds + 2 (alone) or 3 (with another block) a step, two blocks on 10 multiprocessors;
  // the front takes 5.
  std::string rows = header;
  for (const int heads : {2, 4, 10, 16, 24, 40, 90}) {
    for (const int chunks : {1, 8, 50}) {
      const int rounds = (heads + 19) / 20;
      const int core = 20 + rounds * (3 + chunks * (heads > 10 ? 3 : 2));
      rows += "x,G,90,10," + std::to_string(chunks * 64) + "_1_" + std::to_string(heads) +
              ",fused-128,," + std::to_string(core * 1e-3) + "," +
              std::to_string((core + 5) * 1e-3) + "\n";
    }
  }
  const TemporaryFolder folder;
  write_text(folder / "rows.csv", rows);
  const Outcome outcome =
      run("ablate", {"--fit", folder / "rows.csv", "--tune", folder / "costs.json"});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const Json table = Json::parse(read_text(folder / "costs.json"));
  CHECK(table.at("gpu") == "G");
  CHECK(table.at("multiprocessors") == 10);
  CHECK(table.at("front").at("us").at("launch") == doctest::Approx(5).epsilon(1e-3));
  REQUIRE(table.at("forms").size() == 1);
  const Json& form = table.at("forms")[0];
  CHECK(form.at("pipeline") == "fused-128");
  CHECK(form.at("resident") == 2);
  CHECK(form.at("least_tokens") == 64);
  CHECK(form.at("rms").get<double>() < 1e-3);
  CHECK(form.at("us").at("launch") == doctest::Approx(20).epsilon(1e-2));
  CHECK(form.at("us").at("round") == doctest::Approx(3).epsilon(1e-2));
  CHECK(form.at("us").at("step") == doctest::Approx(2).epsilon(1e-2));
  CHECK(form.at("us").at("crowded_step") == doctest::Approx(3).epsilon(1e-2));
}

TEST_CASE("tuning refuses what it cannot be done with, in one line")
{
  const TemporaryFolder folder;
  const std::string table = folder / "costs.json";
  const std::string rows = folder / "rows.csv";
  const auto refuse = [&](std::vector<std::string> arguments, const char* part) {
    const Outcome outcome = run("ablate", std::move(arguments));
    CAPTURE(part);
    CAPTURE(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.error_lines() == 1);
    CHECK(outcome.err.find(part) != std::string::npos);
  };
  const auto refuse_row = [&](const std::string& row, const char* part) {
    write_text(rows, header + row + "\n");
    refuse({"--fit", rows, "--tune", table}, part);
  };
  refuse({"--device", "host", "--tune", table}, "--tune: expected a GPU");
  refuse({"--fit", rows}, "--fit: expected --tune FILE");
  refuse({"--rows", rows, "--commit", "x"}, "--rows: expected --tune FILE");
  refuse({"--tune", table, "--rows", rows}, "--rows: expected --commit SHA");
  refuse({"--tune", table, "--json"}, "--tune: expected --json");
  refuse({"--fit", folder / "none.csv", "--tune", table}, "none.csv");
  refuse({"--fit", "/dev/zero", "--tune", table}, "/dev/zero: expected a file of rows");
  refuse({"--fit", rows, "--tune", table, "--seconds", "1"}, "--seconds: expected without --fit");
  refuse({"--fit", rows, "--tune", folder / "./rows.csv"}, "which --fit reads");
  refuse_row("x,G,90,10,64_1_2,fused-128,,0.1", "rows.csv:2: expected 9 fields");
  refuse_row("x,G,90,10,64_1_2,mine,,0.1,0.2", "rows.csv:2: pipeline: expected one of naive,");
  refuse_row("x,G,90,10,64_1_2,naive,,0.1,1e300",
             "rows.csv:2: forward_ms: expected a number above");
  refuse_row("x,G,90,10,short,fused-128,,0.1,0.2", "rows.csv:2: case:");
  refuse_row("x,G,90,10,64_3_2,fused-128,,0.1,0.2", "rows.csv:2: case:");
  refuse_row("x,G,90,10,64_1_2,fused-128,,0.1,-1", "rows.csv:2: forward_ms:");
  refuse_row("x,G,90,0,64_1_2,fused-128,,0.1,0.2", "multiprocessors");
  refuse_row("x,G,90,10,64_1_2,fused-128,,0.1,0.2", "expected at least 6 rows");
  refuse({"--fit", rows, "--fit", rows, "--tune", table}, "expected each file once");
  refuse_row("x,G,90,10,64_1_2,fused-128,,0.1,0.2\nx,H,90,10,64_1_2,fused-128,,0.1,0.2",
             "'G' and 'H'");
  CHECK(read_text(table).empty());
}

TEST_CASE("info explains the choice, as text and as JSON, by figures of one's own where given")
{
  const std::vector<std::string> arguments{"--device", "host", "--explain"};
  const Outcome text = run("info", arguments);
  CAPTURE(text.err);
  REQUIRE(text.status == 0);
  for (const char* part : {"auto: fused\n", "spread evenly", "residual", "refused: "}) {
    CAPTURE(part);
    CHECK(text.out.find(part) != std::string::npos);
  }
  CHECK(text.out.find("Machine") == std::string::npos);
  const Outcome json = run("info", {"--device", "host", "--explain", "--json"});
  REQUIRE(json.status == 0);
  const Json choice = Json::parse(json.out);
  CHECK(choice.at("chosen") == "fused");
  CHECK(choice.at("candidates")[0].at("predicted_ms").is_null());
  CHECK(Json::parse(run("info", {"--device", "host", "--json"}).out).at("auto") == choice);

  const Outcome dot = run("info", {"--device", "host", "--explain", "--dot"});
  CHECK(dot.status == 2);
  CHECK(dot.err.find("--dot, --explain: expected one") != std::string::npos);

  const std::string costs = root + "/graph/costs/h200.json";
  CHECK(run("info", {"--device", "host", "--explain", "--costs", costs}).status == 0);
  const Outcome missing = run("info", {"--device", "host", "--costs", "none.json"});
  CHECK(missing.status == 2);
  CHECK(missing.err.find("none.json") != std::string::npos);
  const Outcome both = run("info", {"--device", "host", "--pipeline", "naive", "--costs", costs});
  CHECK(both.status == 2);
  CHECK(both.err.find("--costs: expected --pipeline auto") != std::string::npos);
}

TEST_CASE("a table that is measured here is what the programs then choose by")
{
  GDNFLOW_REQUIRE_GPU();
  const TemporaryFolder folder;
  std::vector<std::string> arguments{"--device",    "cuda",
                                     "--seconds",   "0",
                                     "--tune",      folder / "costs.json",
                                     "--rows",      folder / "rows.csv",
                                     "--commit",    "x",
                                     "--pipelines", "fused-64,fused-128",
                                     "--heads",     "1,2"};
  for (const char* length : {"64", "128", "256", "512", "640", "1024"}) {
    arguments.insert(arguments.end(), {"--lengths", length});
  }
  const Outcome outcome = run("ablate", arguments);
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const Json table = Json::parse(read_text(folder / "costs.json"));
  CHECK(table.at("forms").size() == 3);  // fused-128 with either tile
  CHECK(read_text(folder / "rows.csv").find("fused-128,fused_prefill:value_tile=128") !=
        std::string::npos);
  const Outcome again =
      run("ablate", {"--fit", folder / "rows.csv", "--tune", folder / "again.json"});
  REQUIRE(again.status == 0);
  const Outcome choice = run("info", {"--device", "cuda", "--explain", "--heads", "1,2", "--costs",
                                      folder / "costs.json"});
  REQUIRE(choice.status == 0);
  CHECK(choice.out.find("the same GPU") != std::string::npos);
  CHECK(choice.out.find("no measured times") != std::string::npos);
}
