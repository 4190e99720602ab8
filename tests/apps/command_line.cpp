#include <gdnflow/version.hpp>

#include "apps/process.hpp"

#include <string>
#include <vector>

#include <doctest/doctest.h>

using gdnflow::test::golden;
using gdnflow::test::Outcome;
using gdnflow::test::read_text;
using gdnflow::test::run;
using gdnflow::test::TemporaryFolder;
using gdnflow::test::write_text;

namespace {

const std::vector<std::string> programs{"run", "ablate", "replay", "info"};

// A refusal: status 2, nothing on standard output, one line that begins with the program's name
// and holds `expected`.
void check_refusal(const std::string& program, const std::vector<std::string>& arguments,
                   const std::string& expected) {
  const Outcome outcome = run(program, arguments);
  CAPTURE(outcome.err);
  CHECK(outcome.status == 2);
  CHECK(outcome.out == "");
  CHECK(outcome.error_lines() == 1);
  CHECK(outcome.err.rfind("gdnflow-" + program + ": ", 0) == 0);
  CHECK(outcome.err.find(expected) != std::string::npos);
}

}  // namespace

TEST_CASE("every program has a help text with examples and exit statuses")
{
  for (const std::string& program : programs) {
    CAPTURE(program);
    const Outcome outcome = run(program, {"--help"});
    CHECK(outcome.status == 0);
    CHECK(outcome.err == "");
    CHECK(outcome.out.rfind("Usage: gdnflow-" + program, 0) == 0);
    CHECK(outcome.out.find("Examples:\n  gdnflow-" + program) != std::string::npos);
    CHECK(outcome.out.find("--json") != std::string::npos);
    CHECK(outcome.out.find("Exit status: 0") != std::string::npos);
  }
}

TEST_CASE("every program says the library's version")
{
  for (const std::string& program : programs) {
    const Outcome outcome = run(program, {"--version"});
    CHECK(outcome.status == 0);
    CHECK(outcome.out == "gdnflow-" + program + " " + gdnflow::version() + "\n");
  }
}

TEST_CASE("every program refuses what it does not know in one line")
{
  for (const std::string& program : programs) {
    check_refusal(program, {"--no-such-option"}, "'--no-such-option'");
    check_refusal(program, {"stray"}, "'stray'");
    check_refusal(program, {"--hel"}, "'--hel'");
  }
}

TEST_CASE("devices, pipelines, variants and choices are refused with what there is")
{
  for (const char* program : {"ablate", "replay", "info"}) {
    check_refusal(program, {"--device", "tpu"}, "expected host, cuda or cuda:N, got 'tpu'");
    check_refusal(program, {"--device", "host", "--state-layout", "kk"},
                  "expected one of kv, vk, got 'kk'");
    check_refusal(program, {"--device", "host", "--variant", "nonsense"},
                  "expected STAGE=VARIANT, got 'nonsense'");
  }
  check_refusal("replay", {"--device", "host", "--pipeline", "none"}, "naive");
  check_refusal("info", {"--device", "host", "--heads", "3,8"}, "multiple of QK_HEADS");
  check_refusal("info", {"--device", "host", "--head-dim", "1,2,3"}, "D or DK,DV");
  check_refusal("info", {"--device", "host", "--checkpoints", "65"}, "multiple of 64");
  check_refusal("info", {"--device", "host", "--dot", "graph"}, "'graph'");
  check_refusal("replay", {"--device", "host", "--batches", "0"}, "at least 1, got 0");
  // Zero stands for the default in the library, so a scale that rounds to it would be ignored.
  check_refusal("info", {"--device", "host", "--scale", "1e-50"}, "a number above 0, got 0");
  check_refusal("replay", {"--device", "host", "--batches", "many"}, "--batches");
}

TEST_CASE("ablate refuses cases that make no sense before it measures")
{
  check_refusal("ablate", {"--case", "1,2,3"}, "BATCH,TOKENS,QK_HEADS,V_HEADS[,state]");
  check_refusal("ablate", {"--case", "1,2,3,4"}, "multiple of QK_HEADS");
  check_refusal("ablate", {"--case", "0,2,4,4"}, "at least 1, got '0'");
  check_refusal("ablate", {"--case", "1,99999999999,4,4"}, "at most");
  check_refusal("ablate", {"--lengths", "1,2"}, "--heads or --model");
  check_refusal("ablate", {"--lengths", "9223372036854775807", "--heads", "1,2"}, "at most");
  check_refusal("ablate", {"--lengths", "2147483000,2147483000", "--heads", "1,2"}, "at most");
  check_refusal("ablate", {"--seconds", "inf"}, "a finite number");
  check_refusal("ablate", {"--heads", "2,8"}, "--lengths");
  check_refusal("ablate", {"--lengths", "64", "--model", "none"}, "qwen3.5-27b");
  check_refusal("ablate", {"--only", "no_such_case"}, "'no_such_case'");
  check_refusal("ablate", {"--distribution", "flat"}, "random_decay");
  check_refusal("ablate", {"--pipelines", "naive,none"}, "'none'");
  check_refusal("ablate", {"--results", "/tmp/x.csv"}, "--commit");
  check_refusal("ablate", {"--csv", "/no/such/folder/x.csv"}, "/no/such/folder");
  check_refusal("ablate", {"--cases", "/no/such/file.csv"}, "cannot be read");
  check_refusal("ablate", {"--from", "/no/such/file.json"}, "cannot be read");
}

TEST_CASE("sweeps, states of L2 and limits that make no sense are refused")
{
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& expected) {
    std::vector<std::string> all{"--device", "host", "--case", "1,64,1,2"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    check_refusal("ablate", all, expected);
  };
  for (const char* text : {"", "x", "kkt_solve=host", "kkt_solve=:tile=1", "kkt_solve:1,tile=2",
                           "kkt_solve:=1", "kkt_solve:tile"}) {
    refused({"--sweep", text}, "expected STAGE[=VARIANT]:OPTION=VALUE,VALUE,..., got '");
  }
  refused({"--sweep", "nonsense:tile=1"}, "kkt_solve");
  refused({"--sweep", "kkt_solve:tile=1,many"}, "--sweep: expected a whole number");
  refused({"--sweep", "kkt_solve:tile=1", "--sweep", "kkt_solve=host:tile=2"},
          "expected an option once, got tile of kkt_solve again");
  refused({"--sweep", "kkt_solve:tile=1"}, "of a pipeline that runs here");
  refused({"--sweep", "kkt_solve=none:tile=1"}, "of a pipeline that runs here");
  refused({"--pipelines", "naive", "--sweep", "kkt_solve=host:tile=1"},
          "naive kkt_solve:tile=1: pipeline naive: kkt_solve");
  refused({"--sweep", "kkt_solve:tile=1", "--options"}, "--options: expected without --sweep");
  refused({"--l2", "warm"}, "--l2: expected hot, cold or both, got 'warm'");
  refused({"--l2", "both"}, "--l2: expected hot on the host, got both");
  refused({"--json", "--markdown"}, "one of them on standard output");
  refused({"--markdown", "/no/such/folder/x.md"}, "/no/such/folder");
  for (const char* program : {"ablate", "info"}) {
    check_refusal(program, {"--device", "host", "--sms", "8"}, "--sms: expected a GPU to limit");
    check_refusal(program, {"--device", "host", "--sms", "0"}, "--sms: expected at least 1");
  }
}

TEST_CASE("ablate names the file and the line of a bad table of cases")
{
  const TemporaryFolder folder;
  const std::string path = folder / "cases.csv";
  const std::string header = "name,batch,tokens,qk_heads,v_heads,initial_state,gate\n";
  const auto refused = [&](const std::string& text, const std::string& expected) {
    gdnflow::test::write_text(path, text);
    check_refusal("ablate", {"--device", "host", "--cases", path}, expected);
  };
  refused("", "cases.csv:1: expected a line of column names");
  refused(header, "expected a case at least");
  refused("name,batch\na,1\n", "expected a column 'qk_heads'");
  refused(header + "a,1,64,2,8,0\n", "cases.csv:2: expected 7 fields, got 6");
  refused(header + "a,1,64,2,8,0,flat\n", "cases.csv:2: gate: expected a distribution, got 'flat'");
  refused(header + "a,1,64,2,7,0,mixed\n", "cases.csv:2: v_heads: expected a multiple");
  refused(header + "a,1,-3,2,8,0,mixed\n", "tokens: expected a whole number of at least 0");
  refused(header + "a,1,64,2,8,0,mixed\na,1,64,2,8,0,mixed\n", "cases.csv:3: the case 'a'");
  refused("lengths,qk_heads,v_heads\n64+x,2,8\n", "lengths: expected a whole number");
}

TEST_CASE("a report that is none is refused")
{
  const TemporaryFolder folder;
  const std::string path = folder / "report.json";
  for (const char* text : {"", "{", "[]", "{}", R"({"program": "gdnflow-ablate", "format": 99})",
                           R"({"program": "gdnflow-ablate", "format": 2, "version": 3})"}) {
    gdnflow::test::write_text(path, text);
    check_refusal("ablate", {"--from", path}, "expected a report of gdnflow-ablate");
  }
}

TEST_CASE("run refuses a missing input, a wrong file and wrong names")
{
  const TemporaryFolder folder;
  check_refusal("run", {}, "--input");
  check_refusal("run", {"--input", folder / "none.safetensors"}, "none.safetensors");
  const std::string path = folder / "bad.safetensors";
  gdnflow::test::write_text(path, "not a safetensors file");
  check_refusal("run", {"--input", path}, "bad.safetensors");
  const std::string layer = golden("packed_gva");
  check_refusal("run", {"--input", layer, "--map", "query=q"}, "NAME=TENSOR");
  check_refusal("run", {"--input", layer, "--map", "q"}, "NAME=TENSOR");
  check_refusal("run", {"--input", layer, "--map", "q=model.q"}, "model.q");
  check_refusal("run", {"--input", layer, "--map", "k=v"}, "k (v): expected");
  check_refusal("run", {"--input", layer, "--tolerance", "-1"}, "--tolerance");
  check_refusal("run", {"--input", layer, "--output", "/no/such/folder/o"}, "/no/such/folder");
  check_refusal("run", {"--input", layer, "--repeats", "0"}, "--repeats");
}

TEST_CASE("an output that is an input, or another output, is refused and nothing is lost")
{
  const TemporaryFolder folder;
  const std::string cases = folder / "cases.csv";
  const std::string text = "lengths,qk_heads,v_heads\n10,1,2\n";
  write_text(cases, text);
  check_refusal("ablate", {"--cases", cases, "--csv", cases}, "which --cases reads");
  check_refusal("ablate", {"--cases", cases, "--json=" + (folder / "./cases.csv")},
                "which --cases reads");
  check_refusal("ablate", {"--csv", folder / "new", "--json=" + (folder / "new")},
                "which --csv writes");
  check_refusal("run", {"--input", cases, "--output", cases}, "which --input reads");
  check_refusal("info", {"--explain", "--costs", cases, "--json=" + cases}, "which --costs reads");
  check_refusal("replay", {"--costs", cases, "--json=" + cases}, "which --costs reads");
  CHECK(read_text(cases) == text);
}
