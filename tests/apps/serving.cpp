#include "apps/process.hpp"
#include "support/gpu.hpp"

#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

// gdnflow-replay with the requests of a trace, its soak, and its measurement of a call's host time.

using namespace gdnflow::test;
using Json = nlohmann::json;

namespace {

std::string trace(const std::string& name) {
  return std::string(GDNFLOW_TEST_DATA) + "/../apps/traces/" + name + ".csv";
}

std::vector<std::string> with(std::vector<std::string> more) {
  std::vector<std::string> arguments{"--device", "host", "--heads", "1,2", "--head-dim", "16"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Json serve(std::vector<std::string> more) {
  const Outcome outcome = run("replay", with(std::move(more)));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  return Json::parse(outcome.out);
}

const std::string header = "arrival_ms,prompt_tokens,output_tokens,cached_tokens\n";

}  // namespace

TEST_CASE("every request of a trace is served once, and every token is counted")
{
  for (const std::string name : {"code", "conversation"}) {
    CAPTURE(name);
    const Json result = serve({"--trace", trace(name), "--requests", "20", "--length-scale", "0.13",
                               "--check", "12", "--layers", "3", "--json"});
    CHECK(result.at("requests") == 20);
    CHECK(result.at("right") == true);
    const bool shares = name == "conversation";
    CHECK((result.at("shared_tokens").get<long>() > 0) == shares);
    CHECK(result.at("sharing_requests") == (shares ? 19 : 0));
    for (const char* way : {"session", "per-shape"}) {
      CAPTURE(way);
      const Json& served = result.at("served_by").at(way);
      CHECK(served.at("served") == 20);
      const auto cached = served.at("cached_tokens").get<long>();
      CHECK((cached > 0) == shares);
      CHECK(cached <= result.at("shared_tokens").get<long>());
      CHECK(served.at("computed_tokens").get<long>() + cached ==
            result.at("prompt_tokens").get<long>());
      const Json& prefixes = served.at("prefix_cache");
      const auto hits = prefixes.at("hits").get<long>();
      CHECK((hits > 0) == shares);
      CHECK(hits + prefixes.at("misses").get<long>() == result.at("sharing_requests").get<long>());
      // Many more than there are rows, which are all in use in the end.
      CHECK(prefixes.at("rows_in_use") == result.at("checkpoint_rows"));
      CHECK(prefixes.at("checkpoints_written").get<long>() ==
            prefixes.at("evictions").get<long>() + prefixes.at("rows_in_use").get<long>());
      CHECK(served.at("checked") == 12);
      CHECK(served.at("wrong") == 0);
      CHECK(served.at("checked_checkpoints").get<long>() > 12);
      CHECK(served.at("worst_checkpoint_rel_rms").get<double>() > 0);
      CHECK(served.at("worst_checkpoint_rel_rms").get<double>() < 1e-5);
      CHECK((served.at("checked_starts").get<long>() > 0) == shares);
      CHECK(served.at("worst_o_rel_rms").get<double>() > 0);
      CHECK(served.at("worst_o_rel_rms").get<double>() < 1e-5);
      CHECK(served.at("counts").at("calls") == 3 * served.at("steps").get<long>());
      // Prompts are longer than a step, and steps shared.
      CHECK(served.at("pieces").get<long>() > 20);
      CHECK(served.at("pieces").get<long>() > served.at("steps").get<long>());
      for (const char* measure : {"step_ms", "request_ms", "call_host_us"}) {
        const Json& p = served.at(measure);
        CHECK(p.at("p50").get<double>() > 0);
        CHECK(p.at("p50").get<double>() <= p.at("p95").get<double>());
        CHECK(p.at("p95").get<double>() <= p.at("p99").get<double>());
      }
    }
    const Json& session = result.at("served_by").at("session");
    CHECK(session.at("counts").at("captures") == result.at("buckets").size());
    CHECK(session.at("counts").at("hits") == session.at("counts").at("calls"));
    CHECK(session.at("counts").at("workspace_bytes").get<long>() > 0);
    CHECK(session.at("padded_tokens").get<long>() > 0);
    CHECK(result.at("served_by").at("per-shape").at("padded_tokens") == 0);
  }
}

TEST_CASE("pools of any type and layout are served right, with norms and with one slot")
{
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--state-type", "bf16"},
        {"--type", "bf16", "--state-type", "f16"},
        {"--state-layout", "vk", "--qk-norm", "--head-map", "interleaved"},
        {"--pipeline", "naive", "--slots", "1", "--sequences", "1"},
        {"--distribution", "model"}}) {
    CAPTURE(options.front());
    CAPTURE(options[1]);
    std::vector<std::string> arguments{
        "--trace", trace("conversation"), "--requests", "8", "--check", "8", "--length-scale",
        "0.07",    "--exact-prefix",      "--json"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Json result = serve(arguments);
    CHECK(result.at("right") == true);
    const Json& session = result.at("served_by").at("session");
    CHECK(session.at("checked") == 8);
    CHECK(session.at("checked_checkpoints").get<long>() > 0);
    CHECK(session.at("checked_starts").get<long>() > 0);
    CHECK(session.at("cached_tokens").get<long>() % 64 != 0);
  }
}

TEST_CASE("the same seed and trace make the same steps")
{
  const auto counts = [](const std::string& seed) {
    const Json result = serve({"--trace", trace("conversation"), "--requests", "11", "--seed", seed,
                               "--check", "3", "--length-scale", "0.13", "--json"});
    const Json& session = result.at("served_by").at("session");
    return Json{session.at("steps"),
                session.at("pieces"),
                session.at("padded_tokens"),
                session.at("prefix_cache"),
                session.at("worst_o_rel_rms"),
                session.at("worst_state_rel_rms"),
                session.at("worst_checkpoint_rel_rms")};
  };
  const Json first = counts("1");
  CHECK(first == counts("1"));
  CHECK(first != counts("2"));  // other inputs, so other errors
}

namespace {

/// Requests so far apart that each is done before the next one comes: prompts and what is cached.
std::string apart(const std::vector<std::string>& requests) {
  std::string text = header;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    text += std::to_string(i * 100000) + "," + requests[i] + "\n";
  }
  return text;
}

/// What a way to serve came to, the same for each.
Json serve_checked(const std::string& file, std::vector<std::string> more) {
  more.insert(more.end(), {"--trace", file, "--length-scale", "1", "--check", "100", "--json"});
  const Json result = serve(std::move(more));
  CHECK(result.at("right") == true);
  Json session = result.at("served_by").at("session");
  const Json& shape = result.at("served_by").at("per-shape");
  for (const char* same : {"cached_tokens", "prefix_cache", "steps", "checked_checkpoints"}) {
    CHECK(session.at(same) == shape.at(same));
  }
  return session;
}

}  // namespace

TEST_CASE(
    "a prompt starts behind what an earlier one left of it: whole intervals, or where they part")
{
  const TemporaryFolder folder;
  const std::string file = folder / "trace.csv";
  // The first row's prefix was there before the trace, and the last one's last token is computed.
  write_text(file, apart({"300,1,37", "310,1,200", "290,1,200", "64,1,64", "64,1,64"}));
  const auto cached = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--speed", "1"});
    const Json session = serve_checked(file, std::move(more));
    CHECK(session.at("computed_tokens").get<int>() + session.at("cached_tokens").get<int>() ==
          300 + 310 + 290 + 64 + 64);
    return session.at("cached_tokens").get<int>();
  };
  CHECK(cached({}) == 192 + 192);
  CHECK(cached({"--checkpoint-interval", "128"}) == 128 + 128);
  CHECK(cached({"--checkpoint-interval", "256"}) == 0);
  CHECK(cached({"--checkpoint-interval", "0"}) == 0);
  // The second prompt is the first to part from another there, and the third one finds it.
  CHECK(cached({"--exact-prefix"}) == 192 + 200 + 0 + 63);
  CHECK(cached({"--exact-prefix", "--checkpoint-interval", "256"}) == 0 + 200 + 0 + 63);
  // In pieces that end in front of, at and behind that place; a state in the slot is taken along.
  for (const char* chunk : {"37", "100"}) {
    CAPTURE(chunk);
    CHECK(cached({"--exact-prefix", "--chunk-tokens", chunk}) == 192 + 200 + 0 + 63);
  }
}

TEST_CASE("checkpoints make room for others by when they were used last")
{
  const TemporaryFolder folder;
  const std::string file = folder / "trace.csv";
  // The third prompt begins as the first, the fifth as the second, the sixth as the first.
  write_text(file, apart({"130,1,0", "140,1,0", "150,1,128", "160,1,0", "170,1,135", "180,1,128"}));
  const auto counts = [&](const std::string& rows) {
    const Json session = serve_checked(
        file, {"--speed", "1", "--checkpoint-interval", "128", "--checkpoint-rows", rows});
    const Json& p = session.at("prefix_cache");
    CHECK(session.at("checked_checkpoints") == p.at("checkpoints_written"));
    CHECK(session.at("checked_starts") == p.at("hits"));
    CHECK(p.at("no_row") == 0);
    CHECK(p.at("already_there") == 0);
    return Json{p.at("hits"), p.at("misses"), p.at("checkpoints_written"), p.at("evictions"),
                p.at("rows_in_use")};
  };
  CHECK(counts("3") == Json{3, 0, 3, 0, 3});
  // The second one's goes for the fourth's, for the first one's was used since; then each of them
  // for the one that is computed again.
  CHECK(counts("2") == Json{1, 2, 5, 3, 2});
  CHECK(counts("1") == Json{0, 3, 6, 5, 1});
}

TEST_CASE("what a step writes nobody reads or writes over in it")
{
  const TemporaryFolder folder;
  const std::string file = folder / "trace.csv";
  write_text(file, header + "0,200,1,0\n0,200,1,150\n0,200,1,150\n");
  const auto counts = [&](std::vector<std::string> more) {
    const Json session = serve_checked(file, std::move(more));
    const Json& p = session.at("prefix_cache");
    return Json{p.at("hits"), p.at("checkpoints_written"), p.at("already_there"), p.at("no_row"),
                p.at("evictions")};
  };
  // All in one step: states that they share are written by the first, the third at 192 by each.
  CHECK(counts({"--chunk-tokens", "600"}) == Json{0, 5, 4, 0, 0});
  CHECK(counts({"--chunk-tokens", "600", "--checkpoint-rows", "1"}) == Json{0, 1, 2, 6, 0});
  // In two steps: the third request finds what the first one wrote.
  CHECK(counts({"--chunk-tokens", "400"}) == Json{1, 5, 2, 0, 0});
  // The row that two of them read is to be had for the last state alone, a step later.
  CHECK(counts({"--chunk-tokens", "200", "--checkpoint-rows", "1"}) == Json{2, 2, 0, 5, 1});
}

TEST_CASE("the state where two prompts part is nobody else's until its prompt has gone on")
{
  const TemporaryFolder folder;
  const std::string file = folder / "trace.csv";
  // The third prompt parts from the first and the fourth from the second, in the same step; in the
  // next one the third comes first and would have rows for its checkpoints.
  write_text(file, header + "0,100,1,0\n100000,110,1,0\n200000,300,1,95\n200000,300,1,105\n");
  const Json session =
      serve_checked(file, {"--speed", "1", "--exact-prefix", "--checkpoint-interval", "128",
                           "--checkpoint-rows", "2", "--chunk-tokens", "400"});
  CHECK(session.at("steps") == 4);
  CHECK(session.at("checked_starts") == 2);
  const Json& p = session.at("prefix_cache");
  CHECK(p.at("checkpoints_written") == 2);
  CHECK(p.at("no_row") == 4);
  CHECK(p.at("evictions") == 0);
}

TEST_CASE("requests that arrive by the clock wait for less when the clock is slow")
{
  const TemporaryFolder folder;
  const std::string file = folder / "trace.csv";
  std::string text = header;
  for (int i = 0; i < 20; ++i) text += std::to_string(i * 100000) + ",100,1,0\n";
  write_text(file, text);
  const Json result =
      serve({"--trace", file, "--length-scale", "1", "--speed", "1", "--check", "0", "--json"});
  const Json& session = result.at("served_by").at("session");
  CHECK(session.at("steps") == 20);  // each alone: nobody is there yet
  CHECK(session.at("wait_ms").at("p99") == 0);
}

TEST_CASE("a check can fail: outside of its bound a result is wrong")
{
  const Outcome outcome =
      run("replay",
          with({"--trace", trace("code"), "--requests", "4", "--check", "1", "--bound", "1e-12"}));
  CHECK(outcome.status == 1);
  CHECK(outcome.error_lines() == 2);  // one for each way to serve
  CHECK(outcome.err.find("request 3 of") != std::string::npos);
  CHECK(outcome.out.find("1 WRONG") != std::string::npos);
  CHECK(outcome.out.find(": right") == std::string::npos);
}

TEST_CASE("a bad line of a trace is refused with its number, what was expected and what was got")
{
  const TemporaryFolder folder;
  const std::string file = folder / "trace.csv";
  const auto refused = [&](const std::string& text, const std::string& line,
                           std::vector<std::string> parts) {
    write_text(file, text);
    const Outcome outcome = run("replay", with({"--trace", file}));
    CAPTURE(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.out == "");
    CHECK(outcome.error_lines() == 1);
    parts.push_back(file + ":" + line + ": ");
    for (const std::string& part : parts) CHECK(outcome.err.find(part) != std::string::npos);
  };
  refused(header + "0,5,1,0\n0,none,1,0\n", "3",
          {"prompt_tokens: expected a whole number of at least 1, got 'none'"});
  refused(header + "0,0,1,0\n", "2", {"prompt_tokens", "at least 1, got '0'"});
  refused(header + "0,5,1,6\n", "2", {"cached_tokens: expected at most the prompt's 5, got 6"});
  refused(header + "0,5,-1,0\n", "2", {"output_tokens", "at least 0, got '-1'"});
  refused(header + "9,5,1,0\n8.5,5,1,0\n", "3", {"arrival_ms: expected at least the 9", "got 8.5"});
  refused(header + "nan,5,1,0\n", "2", {"arrival_ms: expected a number of at least 0, got 'nan'"});
  refused(header + "0,5,1\n", "2", {"expected 4 fields, got 3"});
  refused(header + "0,99999999,1,0\n", "2", {"prompt_tokens: expected at most 16777216"});
  refused(header, "1", {"at least one request, got none"});
  refused("arrival_ms,prompt_tokens,cached_tokens\n0,5,0\n", "1",
          {"expected a column 'output_tokens'"});
  refused("", "1", {"expected a line of column names"});
}

TEST_CASE(
    "options of another way to use the program are refused, and so are numbers that cannot be")
{
  const auto refused = [](std::vector<std::string> arguments, const std::string& part) {
    const Outcome outcome = run("replay", with(std::move(arguments)));
    CAPTURE(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.error_lines() == 1);
    CHECK(outcome.err.find(part) != std::string::npos);
  };
  refused({"--layers", "3"}, "--layers: expected it with --trace, got it with random batches");
  refused({"--trace", trace("code"), "--batches", "3"},
          "--batches: expected it with random batches, got it with --trace");
  refused({"--soak", "1", "--trace", trace("code")}, "--soak: expected it without --trace");
  refused({"--soak", "0"}, "--soak: expected a number above 0, got 0");
  refused({"--trace", trace("code"), "--length-scale", "0"}, "--length-scale: expected");
  refused({"--trace", trace("code"), "--speed", "-1"}, "--speed: expected a number above 0");
  refused({"--trace", trace("code"), "--slots", "0"}, "--slots: expected at least 1, got 0");
  refused({"--trace", trace("code"), "--bound", "-1"}, "--bound: expected");
  refused({"--trace", trace("code"), "--checkpoint-interval", "100"},
          "--checkpoint-interval: expected 0 or a multiple of 64 of at most 2147483584, got 100");
  refused({"--trace", trace("code"), "--checkpoint-interval", "4294967296"},
          "--checkpoint-interval: expected");
  refused({"--trace", trace("code"), "--exact-prefix", "--checkpoint-interval", "0"},
          "--exact-prefix: expected it with a --checkpoint-interval above 0, got 0");
  refused({"--trace", trace("code"), "--checkpoint-rows", "5", "--checkpoint-interval", "0"},
          "--checkpoint-rows: expected it with a --checkpoint-interval above 0, got 0");
  refused({"--trace", trace("code"), "--checkpoint-rows", "0"},
          "--checkpoint-rows: expected at least 1, got 0");
  refused({"--trace", trace("code"), "--checkpoint-rows", "2147483647"},
          "--slots and --checkpoint-rows: expected at most 2147483647 together, got 4 and");
  refused({"--soak", "1", "--checkpoint-rows", "5"},
          "--checkpoint-rows: expected it with --trace, got it with --soak");
  refused({"--trace", trace("code"), "--length-scale", "1e6"},
          "prompt_tokens: expected at most 16777216 when scaled, got 4808 times 1000000");
  refused({"--trace", "/nowhere/trace.csv"}, "/nowhere/trace.csv");
  refused({"--trace", trace("code"), "--json=" + trace("code")}, "which --trace reads");
}

TEST_CASE("latencies are drawn")
{
  const TemporaryFolder folder;
  const std::string svg = folder / "latency.svg";
  const Outcome outcome = run("replay", with({"--trace", trace("code"), "--svg", svg}));
  CAPTURE(outcome.err);
  CHECK(outcome.status == 0);
  if (outcome.err.find("gnuplot was not found") == std::string::npos) {
    const std::string text = read_text(svg);
    CHECK(text.find("<svg") != std::string::npos);
    CHECK(text.find("per-shape") != std::string::npos);
  }
  // Without gnuplot the rest is still there.
  const Outcome without = run("replay", with({"--trace", trace("code"), "--svg", svg}), "/nowhere");
  CHECK(without.status == 0);
  CHECK(without.err.find("no plot: gnuplot was not found on PATH") != std::string::npos);
  CHECK(without.out.find("requests served") != std::string::npos);
}

TEST_CASE("a soak compares every batch, and one can be taken up again by its number")
{
  const Outcome outcome =
      run("replay", with({"--soak", "0.5", "--seed", "3", "--distribution", "no_decay", "--json"}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const Json result = Json::parse(outcome.out);
  CHECK(result.at("right") == true);
  CHECK(result.at("batches").get<long>() >= 2);
  CHECK(result.at("tokens").get<long>() > 0);
  CHECK(result.at("checked").get<long>() > 0);
  CHECK(result.at("first_batch") == 0);
  CHECK(result.at("distribution") == "no_decay");

  // No result is exact: the first batch that the oracle sees is wrong, and so it is again.
  const auto fails = [](const std::string& start) {
    const Outcome failed =
        run("replay", with({"--soak", "5", "--seed", "3", "--bound", "0", "--start-batch", start}));
    CHECK(failed.status == 1);
    CHECK(failed.error_lines() == 1);
    CHECK(failed.out.find("WRONG") != std::string::npos);
    return failed.err;
  };
  const std::string error = fails("70");
  const std::string number = error.substr(error.rfind(' ') + 1);
  CHECK(error.find("--seed 3 --start-batch ") != std::string::npos);
  CHECK(std::stol(number) >= 64);
  CHECK(fails(number.substr(0, number.find('\n'))) == error);
}

TEST_CASE("the host's time of a call is measured for every way to make it")
{
  const Json result = serve({"--host-cost", "--tokens", "64", "--sequences", "2", "--json"});
  CHECK(result.at("nodes").get<int>() > 0);
  for (const char* way :
       {"session", "session_rebound", "session_other_rows", "prefill", "bind", "plan", "capture"}) {
    CAPTURE(way);
    const Json& p = result.at("host_us").at(way);
    CHECK(p.at("p50").get<double>() > 0);
    CHECK(p.at("p50").get<double>() <= p.at("p99").get<double>());
  }
  for (const char* bucket : {"192", "2048"}) {
    CHECK(result.at("bucket_us").at(bucket).get<double>() > 0);
  }
}

TEST_CASE("on a GPU graphs, kernel by kernel and a graph a shape serve a trace alike")
{
  GDNFLOW_REQUIRE_GPU();
  std::vector<std::string> arguments{"--device", "cuda", "--heads", "2,4", "--json"};
  arguments.insert(arguments.end(), {"--trace", trace("conversation"), "--requests", "100"});
  arguments.insert(arguments.end(), {"--length-scale", "0.2", "--layers", "3", "--slots", "16"});
  arguments.insert(arguments.end(), {"--checkpoint-interval", "64", "--exact-prefix"});
  arguments.insert(arguments.end(), {"--check", "20"});
  const Outcome outcome = run("replay", arguments);
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const Json result = Json::parse(outcome.out);
  const Json& ways = result.at("served_by");
  for (const char* way : {"graph", "eager", "per-shape"}) {
    CAPTURE(way);
    CHECK(ways.at(way).at("served") == 100);
    CHECK(ways.at(way).at("checked") == 20);
    CHECK(ways.at(way).at("wrong") == 0);
    CHECK(ways.at(way).at("steps") == ways.at("graph").at("steps"));
    CHECK(ways.at(way).at("prefix_cache") == ways.at("graph").at("prefix_cache"));
    CHECK(ways.at(way).at("prefix_cache").at("hits").get<long>() > 0);
    CHECK(ways.at(way).at("prefix_cache").at("evictions").get<long>() > 0);
    CHECK(ways.at(way).at("checked_checkpoints").get<long>() > 0);
    CHECK(ways.at(way).at("checked_starts").get<long>() > 0);
  }
  // The same kernels for the same steps.
  for (const char* worst : {"worst_o_rel_rms", "worst_state_rel_rms", "worst_checkpoint_rel_rms"}) {
    CHECK(ways.at("graph").at(worst) == ways.at("eager").at(worst));
  }
}

TEST_CASE("on a GPU a soak finds nothing, and the host's time of a call is measured")
{
  GDNFLOW_REQUIRE_GPU();
  const Outcome soak =
      run("replay", {"--device", "cuda", "--heads", "2,4", "--soak", "5", "--most-tokens", "5000",
                     "--distribution", "quarter_frozen", "--json"});
  CAPTURE(soak.err);
  REQUIRE(soak.status == 0);
  CHECK(Json::parse(soak.out).at("right") == true);
  CHECK(Json::parse(soak.out).at("checked").get<long>() > 0);
  const Outcome cost =
      run("replay", {"--device", "cuda", "--heads", "2,4", "--host-cost", "--json"});
  CAPTURE(cost.err);
  REQUIRE(cost.status == 0);
  const Json us = Json::parse(cost.out).at("host_us");
  for (const char* way : {"replay", "replay_rebound", "eager", "eager_rebound", "bind_graph"}) {
    CHECK(us.at(way).at("p50").get<double>() > 0);
  }
  for (const char* bucket : {"192", "2048"}) {
    CHECK(Json::parse(cost.out).at("bucket_us").at(bucket).get<double>() > 0);
  }
  // A replay is what graphs are for, and a capture what they cost.
  CHECK(us.at("replay").at("p50").get<double>() < us.at("capture").at("p50").get<double>());
}
