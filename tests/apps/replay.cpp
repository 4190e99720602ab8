#include "apps/process.hpp"

#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using gdnflow::test::Outcome;
using gdnflow::test::run;
using Json = nlohmann::json;

TEST_CASE("random batches replay right on the host, with percentiles in order")
{
  const Outcome outcome =
      run("replay", {"--device", "host", "--tokens", "130", "--sequences", "5", "--batches", "12",
                     "--check", "12", "--initial-state", "--json"});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const Json result = Json::parse(outcome.out);
  CHECK(result.at("batches") == 12);
  CHECK(result.at("checked") == 12);
  CHECK(result.at("right") == true);
  CHECK(result.at("tokens").get<int>() >= 12);
  CHECK(result.at("tokens").get<int>() <= 12 * 130);
  CHECK(!result.contains("graph"));
  const Json& host = result.at("host");
  CHECK(host.at("worst_o_rel_rms").get<double>() > 0);
  CHECK(host.at("worst_o_rel_rms").get<double>() < 1e-5);
  CHECK(host.at("worst_state_rel_rms").get<double>() < 1e-5);
  CHECK(host.at("tokens_per_second").get<double>() > 0);
  for (const char* measure : {"latency_ms", "run_host_us", "bind_host_us"}) {
    const Json& p = host.at(measure);
    CHECK(p.at("p50").get<double>() > 0);
    CHECK(p.at("p50").get<double>() <= p.at("p95").get<double>());
    CHECK(p.at("p95").get<double>() <= p.at("p99").get<double>());
  }
}

TEST_CASE("the same seed draws the same batches, another seed others")
{
  const auto tokens = [](const std::string& seed) {
    const Outcome outcome = run(
        "replay", {"--device", "host", "--batches", "4", "--check", "0", "--seed", seed, "--json"});
    REQUIRE(outcome.status == 0);
    return Json::parse(outcome.out).at("tokens").get<int>();
  };
  const int first = tokens("1");
  CHECK(first == tokens("1"));
  CHECK(first != tokens("2"));
}

TEST_CASE("what was not checked is not called right")
{
  const Outcome outcome =
      run("replay", {"--device", "host", "--batches", "1", "--check", "0", "--heads", "1,2"});
  CHECK(outcome.status == 0);
  CHECK(outcome.out.find("none checked") != std::string::npos);
  CHECK(outcome.out.find("right") == std::string::npos);
}

TEST_CASE("the table says what was run and that the host has no graph")
{
  const Outcome outcome =
      run("replay", {"--device", "host", "--batches", "2", "--check", "1", "--heads", "1,2"});
  CAPTURE(outcome.err);
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");  // no progress line where standard error is no terminal
  CHECK(outcome.out.find("1/2 heads") != std::string::npos);
  CHECK(outcome.out.find("no graph") != std::string::npos);
  CHECK(outcome.out.find("p99 ms") != std::string::npos);
}
