#include <gdnflow/choice.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/stages.hpp>

#include "graph/tiny_stages.hpp"
#include "support/expect_error.hpp"
#include "support/temporary_directory.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using namespace gdnflow::test;

// What recipe auto chooses. A build without CUDA has no GPU variants, so the choices on GPUs are
// made from stand-ins that refuse what the real ones refuse; where there are real ones, from those
// as well.

namespace {

DeviceInfo h200(std::int32_t multiprocessors = 132) {
  DeviceInfo info;
  info.device = {DeviceType::cuda, 0};
  info.name = "NVIDIA H200";
  info.capability = 90;
  info.multiprocessors = multiprocessors;
  info.shared_bytes_per_block = std::int64_t{227} * 1024;
  return info;
}

DeviceInfo other_gpu(std::string name, std::int32_t capability, std::int32_t multiprocessors) {
  DeviceInfo info = h200(multiprocessors);
  info.name = std::move(name);
  info.capability = capability;
  return info;
}

Support only_hopper(const VariantQuery& query) {
  if (query.device.capability != 90) return Support::no("expected a device of capability 9.0");
  return query.problem.v_dim == 128 ? Support::yes() : Support::no("expected head dimension 128");
}

Support only_hopper_and_whole_norms(const VariantQuery& query) {
  if (option_or(query.options, "qk_norm", 0) != 0 &&
      (option_or(query.options, "value_tile", 0) != 128 ||
       query.problem.activation != DType::bf16)) {
    return Support::no("qk_norm: expected value_tile 128 and bf16");
  }
  return only_hopper(query);
}

Support tile_fits(const VariantQuery& query) {
  const std::int64_t tile = option_or(query.options, "value_tile", 0);
  return tile <= query.problem.v_dim ? Support::yes() : Support::no("value_tile: too wide");
}

/// The built-in stages with a variant for GPUs that has a real one's name and refusals.
Registry stand_ins(std::string_view left_out = "") {
  std::vector<Stage> stages;
  for (const Stage& stage : builtin_stages().stages()) {
    Stage copy = stage;
    std::erase_if(copy.variants, [](const Variant& v) { return v.target != DeviceType::host; });
    const Variant host = copy.variants.front();
    const auto add = [&](std::string id, Support (*supports)(const VariantQuery&),
                         std::vector<std::int64_t> tiles) {
      if (id == left_out) return;
      Variant variant = idle_variant(std::move(id), DeviceType::cuda);
      variant.working_type = host.working_type;
      if (stage.name == "qk_norm") {
        variant.working_type = [](const Problem& p, std::string_view) { return p.activation; };
      }
      variant.supports = supports;
      if (!tiles.empty()) variant.options = {{"value_tile", "columns", tiles.front(), tiles}};
      if (variant.id == "register-state" || variant.id == "one-pass") {
        variant.options.push_back({"segments", "whether sequences are cut", 1, {0, 1}});
      }
      if (variant.id == "one-pass") {
        variant.options.push_back({"qk_norm", "whether q and k are normalised", 0, {0, 1}});
        variant.options.push_back({"gate", "whether gates are made ready", 0, {0, 1}});
      }
      copy.variants.push_back(std::move(variant));
    };
    if (copy.name == "fused_prefill") {
      add("register-state", only_hopper, {0, 64, 128});
      add("warp-specialized", only_hopper, {0, 64, 128});
      add("fused-128x512", tile_fits, {0, 64, 128});
      add("fused-128", tile_fits, {0, 64, 128});
      add("fused-64", tile_fits, {64});
    } else if (copy.name == "one_pass") {
      add("one-pass", only_hopper_and_whole_norms, {0, 64, 128});
      add("recurrent", nullptr, {});
    } else {
      add("naive", nullptr, {});
    }
    stages.push_back(std::move(copy));
  }
  return Registry(std::move(stages));
}

Problem heads(std::int32_t qk, std::int32_t v) {
  Problem problem;
  problem.qk_heads = qk;
  problem.v_heads = v;
  return problem;
}

Choice choice_of(const Problem& problem, const Capacity& capacity,
                 const DeviceInfo& device = h200(), const VariantOverrides& overrides = {}) {
  static const Registry registry = stand_ins();
  return choose(problem, capacity, device, overrides, builtin_cost_tables(), registry);
}

std::string chosen(const Choice& choice) {
  return choice.chosen() == nullptr ? "" : choice.chosen()->label();
}

const Candidate& find(const Choice& choice, std::string_view label) {
  const auto found = std::find_if(choice.candidates.begin(), choice.candidates.end(),
                                  [&](const Candidate& c) { return c.label() == label; });
  REQUIRE_MESSAGE(found != choice.candidates.end(), "no candidate ", std::string(label));
  return *found;
}

std::string tiled(const std::string& recipe, int tile) {
  return recipe + (recipe == "one-pass" ? " one_pass" : " fused_prefill") +
         ":value_tile=" + std::to_string(tile);
}

}  // namespace

TEST_CASE(
    "the choice on an H200: whole heads, halves where the chain is short or whole ones leave it "
    "idle")
{
  struct Case {
    Problem problem;
    Capacity capacity;
    const char* recipe;
    int tile;
  };
  for (const Case& c : {Case{heads(2, 8), {32768, 1}, "one-pass", 128},  // cut, into 16 pieces
                        Case{heads(16, 64), {8192, 1}, "one-pass", 128},
                        Case{heads(16, 64), {8192, 2}, "one-pass", 128},
                        Case{heads(8, 32), {8192, 4}, "one-pass", 128},
                        Case{heads(8, 24), {8192, 8}, "one-pass", 128},
                        // A few chunks, which halves take in less time each.
                        Case{heads(4, 16), {2048, 1}, "one-pass", 64},
                        Case{heads(2, 8), {1025, 1}, "one-pass", 64}}) {
    CAPTURE(c.problem.v_heads);
    CAPTURE(c.capacity.max_sequences);
    CHECK(chosen(choice_of(c.problem, c.capacity)) == tiled(c.recipe, c.tile));
  }
  // With 14 of the multiprocessors, 8 heads leave no room for halves.
  CHECK(chosen(choice_of(heads(2, 8), {1025, 1}, h200(14))) == tiled("one-pass", 128));
}

TEST_CASE("the choice is the same each time, and the pipeline is what was chosen")
{
  const Registry registry = stand_ins();
  const Problem problem = heads(16, 64);
  const Capacity capacity{8192, 2};
  const Choice first = choice_of(problem, capacity);
  const Choice second = choice_of(problem, capacity);
  CHECK(to_string(first) == to_string(second));
  const Pipeline pipeline = make_pipeline("auto", problem, capacity, h200(), {}, registry);
  CHECK(pipeline.id() == "auto");
  const Node& kernel = pipeline.nodes()[pipeline.node_index("one_pass")];
  CHECK(to_string(VariantChoice{kernel.chosen().id, kernel.options}) == "one-pass:value_tile=128");
}

TEST_CASE("segments are found where a kernel is to cut by them")
{
  const Registry registry = stand_ins();
  const auto has_segments = [&](const VariantOverrides& overrides) {
    return make_pipeline("register-state", heads(2, 8), {8192, 1}, h200(), overrides, registry)
               .node_index("segments") >= 0;
  };
  CHECK(has_segments({}));
  CHECK(has_segments({{"fused_prefill", parse_variant_choice("register-state:value_tile=64")}}));
  CHECK_FALSE(has_segments({{"fused_prefill", parse_variant_choice("register-state:segments=0")}}));
  CHECK_FALSE(has_segments({{"fused_prefill", parse_variant_choice("fused-128")}}));
  // one-pass finds them by itself.
  const Pipeline one = make_pipeline("one-pass", heads(2, 8), {8192, 1}, h200(), {}, registry);
  REQUIRE(one.nodes().size() == 1);
  CHECK(one.nodes()[0].stage.name == "one_pass");
}

TEST_CASE("where a kernel is refused or missing, the next best is taken")
{
  const Registry registry = stand_ins("one-pass");
  const Choice without =
      choose(heads(2, 8), {8192, 1}, h200(), {}, builtin_cost_tables(), registry);
  CHECK(chosen(without) == tiled("register-state", 64));
  CHECK_FALSE(find(without, "one-pass").support);

  const Choice ampere = choice_of(heads(2, 8), {8192, 1}, other_gpu("NVIDIA A100", 80, 108));
  CHECK(chosen(ampere) == "residual");  // with few heads it spreads over more blocks
  CHECK(find(ampere, "register-state").support.reason.find("capability 9.0") != std::string::npos);
  const Choice busy = choice_of(heads(16, 64), {32768, 4}, other_gpu("NVIDIA A100", 80, 108));
  CHECK(busy.chosen()->recipe.starts_with("fused-128"));
}

TEST_CASE("head dim 64 gets a kernel that takes it")
{
  Problem problem = heads(16, 64);
  problem.qk_dim = problem.v_dim = 64;
  const Choice choice = choice_of(problem, {8192, 2});
  CHECK(choice.chosen()->recipe.starts_with("fused-128"));
  CHECK(choice.chosen()->options == "fused_prefill:value_tile=64");
  CHECK(find(choice, tiled("fused-128x512", 128)).support.reason.find("value_tile") !=
        std::string::npos);
  CHECK_FALSE(find(choice, "register-state").support);
  CHECK(choice.assumption.find("those of head dim 128") != std::string::npos);
}

TEST_CASE("fp16 is chosen for as bf16 is")
{
  Problem problem = heads(4, 16);
  const std::string bf16 = to_string(choice_of(problem, {8192, 8}));
  problem.activation = DType::f16;
  CHECK(to_string(choice_of(problem, {8192, 8})) == bf16);
}

TEST_CASE("in batch_invariant mode the choice is the same for every capacity and width")
{
  for (const auto& [qk, v] : {std::pair{2, 8}, {16, 64}}) {
    Problem problem = heads(qk, v);
    problem.mode = Mode::batch_invariant;
    for (const Capacity& capacity : {Capacity{1, 1}, Capacity{8192, 1}, Capacity{65536, 64}}) {
      for (const int multiprocessors : {14, 132}) {
        const Choice choice = choice_of(problem, capacity, h200(multiprocessors));
        CHECK(chosen(choice) == tiled("one-pass", 64));
        CHECK(to_string(choice).find("whatever the capacity") != std::string::npos);
      }
    }
  }
}

TEST_CASE("the host takes fused and pretends no times")
{
  const Choice choice = choose({}, {256, 2}, plain_host());
  CHECK(chosen(choice) == "fused");
  for (const Candidate& candidate : choice.candidates) CHECK_FALSE(candidate.predicted_us);
  std::vector<std::string> running;
  for (const Candidate& candidate : choice.candidates) {
    if (candidate.support) running.push_back(candidate.label());
  }
  CHECK(running == std::vector<std::string>{"fused", "residual", "naive", "recurrent"});
}

TEST_CASE("what the caller sets stays, and only the rest is chosen")
{
  const Problem problem = heads(2, 8);
  const Capacity capacity{8192, 1};
  const auto with = [&](const char* stage, const char* variant) {
    return choice_of(problem, capacity, h200(), {{stage, parse_variant_choice(variant)}});
  };
  const Choice variant = with("fused_prefill", "fused-128");
  CHECK(chosen(variant) == tiled("fused-128", 64));
  CHECK(find(variant, "register-state").support.reason.find("the same as fused-128") !=
        std::string::npos);
  const Choice option = with("fused_prefill", "register-state:value_tile=128");
  CHECK(chosen(option) == tiled("register-state", 128));
  CHECK(option.chosen()->overrides.at("fused_prefill").options == Options{{"value_tile", 128}});
  CHECK(chosen(with("fused_prefill", "register-state:value_tile=0")) ==
        tiled("register-state", 64));
  CHECK(chosen(with("kkt_solve", "naive")) == tiled("register-state", 64));
  CHECK(chosen(with("wu", "naive")) == "naive");
  const Choice one_stage = with("one_pass", "recurrent");
  CHECK(chosen(one_stage) == "recurrent");
  CHECK(find(one_stage, "one-pass").support.reason.find("the same as recurrent") !=
        std::string::npos);
  CHECK(chosen(with("one_pass", "one-pass:segments=0")) == tiled("one-pass", 64));
  CHECK(choice_of(problem, capacity, h200(), {{"wu", {"none", {}}}}).chosen() == nullptr);
}

TEST_CASE("q and k are normalised by the kernel where it can, unless it is asked not to")
{
  static const Registry registry = stand_ins();
  const Capacity capacity{8192, 1};
  const auto has_stage = [&](const Problem& problem, const std::string& recipe,
                             const VariantOverrides& overrides) {
    const Pipeline pipeline = make_pipeline(recipe, problem, capacity, h200(), overrides, registry);
    return pipeline.node_index("qk_norm") >= 0;
  };
  const auto one_pass = [](const std::string& options) {
    return VariantOverrides{{"one_pass", parse_variant_choice("one-pass:" + options)}};
  };
  const Problem plain = heads(16, 64);
  Problem problem = plain;
  problem.qk_norm = true;
  CHECK_FALSE(has_stage(problem, "one-pass", one_pass("value_tile=128")));
  CHECK_FALSE(has_stage(plain, "one-pass", one_pass("value_tile=128")));
  CHECK(has_stage(problem, "one-pass", one_pass("value_tile=64")));
  CHECK(has_stage(problem, "one-pass", one_pass("value_tile=128,qk_norm=0")));
  CHECK(has_stage(problem, "register-state", {}));
  VariantOverrides both = one_pass("value_tile=128");
  both["qk_norm"] = {"naive", {}};
  CHECK(has_stage(problem, "one-pass", both));
  Problem half = problem;
  half.activation = DType::f16;
  CHECK(has_stage(half, "one-pass", one_pass("value_tile=128")));
  const Pipeline pipeline =
      make_pipeline("one-pass", problem, capacity, h200(), one_pass("value_tile=128"), registry);
  CHECK(option_or(pipeline.nodes()[pipeline.node_index("one_pass")].options, "qk_norm", 0) == 1);

  // What does without the stage is not charged for it.
  const Choice without = choice_of(plain, capacity);
  const Choice with = choice_of(problem, capacity);
  CHECK(*find(with, tiled("one-pass", 128)).predicted_us ==
        *find(without, tiled("one-pass", 128)).predicted_us);
  CHECK(*find(with, tiled("one-pass", 64)).predicted_us >
        *find(without, tiled("one-pass", 64)).predicted_us + 40);
  CHECK(chosen(with) == tiled("one-pass", 128));
  CHECK_FALSE(has_stage(problem, "auto", {}));
}

TEST_CASE("gates are made ready by the kernel where it can, unless it is asked not to")
{
  static const Registry registry = stand_ins();
  const Capacity capacity{8192, 1};
  const auto pipeline_of = [&](const Problem& problem, const std::string& recipe,
                               const VariantOverrides& overrides) {
    return make_pipeline(recipe, problem, capacity, h200(), overrides, registry);
  };
  const auto has_stage = [](const Pipeline& pipeline) { return pipeline.node_index("gate") >= 0; };
  const auto edge_on = [](const Pipeline& pipeline, std::string_view port) {
    const Node& node = pipeline.nodes()[pipeline.node_index("one_pass")];
    const int edge = node.edges[node.stage.port_index(port)];
    return edge < 0 ? std::string() : pipeline.edges()[edge].name;
  };
  const Problem plain = heads(16, 64);
  Problem raw = plain;
  raw.gate = GateForm::raw;
  raw.beta = BetaForm::logit;
  const Pipeline inside = pipeline_of(raw, "one-pass", {});
  CHECK_FALSE(has_stage(inside));
  CHECK(option_or(inside.nodes()[inside.node_index("one_pass")].options, "gate", 0) == 1);
  for (const char* const port : {"a", "a_log", "dt_bias", "b"})
    CHECK(edge_on(inside, port) == port);
  CHECK(edge_on(inside, "g").empty());
  CHECK(edge_on(inside, "beta").empty());
  for (const VariantOverrides& asked :
       {VariantOverrides{{"gate", {"naive", {}}}},
        VariantOverrides{{"one_pass", parse_variant_choice("one-pass:gate=0")}}}) {
    const Pipeline in_front = pipeline_of(raw, "one-pass", asked);
    CHECK(has_stage(in_front));
    CHECK(edge_on(in_front, "a").empty());
    CHECK(edge_on(in_front, "b").empty());
    CHECK(edge_on(in_front, "g") == "g_ready");
    CHECK(edge_on(in_front, "beta") == "beta_ready");
  }
  Problem alpha = plain;
  alpha.gate = GateForm::alpha;
  CHECK_FALSE(has_stage(pipeline_of(alpha, "one-pass", {})));
  CHECK(edge_on(pipeline_of(alpha, "one-pass", {}), "g") == "g");
  CHECK_FALSE(has_stage(pipeline_of(plain, "one-pass", {})));
  CHECK(has_stage(pipeline_of(raw, "register-state", {})));
  CHECK_FALSE(has_stage(pipeline_of(raw, "auto", {})));

  // What does without the stage is not charged for it.
  const Choice without = choice_of(plain, capacity);
  const Choice with = choice_of(raw, capacity);
  CHECK(*find(with, tiled("one-pass", 128)).predicted_us ==
        *find(without, tiled("one-pass", 128)).predicted_us);
  CHECK(*find(with, tiled("register-state", 128)).predicted_us >
        *find(without, tiled("register-state", 128)).predicted_us + 2);
}

TEST_CASE("shorter sequences than any measured get the shortest one's time, as a bound")
{
  const Choice choice = choice_of(heads(4, 16), {1024, 128});
  CHECK(choice.chosen()->recipe != "recurrent");
  CHECK(choice.chosen()->bound);
  CHECK(to_string(choice).find("<= ") != std::string::npos);
  CHECK_FALSE(choice_of(heads(4, 16), {131200, 128}).chosen()->bound);
  // But for the front, as long as 128 sequences of 16 tokens, the shortest it was measured on.
  const CostTable& table = builtin_cost_tables().front();
  CostForm core = *table.find("register-state", "fused_prefill:value_tile=128");
  CHECK(core.least_tokens == 16);
  core.whole = true;
  CHECK(predicted_us(table, core, heads(4, 16), {1024, 128}, h200()) ==
        predicted_us(table, core, heads(4, 16), {2048, 128}, h200()));
  CHECK(choice_of(heads(2, 8), {0, 1}).chosen() != nullptr);
}

TEST_CASE("the explanation names the choice, the assumption, the figures and every loser's reason")
{
  const std::string text =
      to_string(choice_of(heads(2, 8), {8192, 1}, other_gpu("NVIDIA GH200", 90, 144)));
  for (const char* part :
       {"auto: one-pass one_pass:value_tile=128\n", "8192 tokens, 1 sequence", "spread evenly",
        "cost table of NVIDIA H200, sm_90, 132 multiprocessors", "this is NVIDIA GH200, sm_90, 144",
        "chosen\n", "times as long\n", "recurrent"}) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
  const std::string ampere = to_string(choice_of({}, {8192, 1}, other_gpu("old", 80, 108)));
  CHECK(ampere.find("refused: ") != std::string::npos);
}

TEST_CASE("a table of the caller's own is what counts")
{
  CostTable table = builtin_cost_tables().front();
  for (CostForm& form : table.forms) {
    if (form.pipeline == "fused-64") form.us = {1.0};
  }
  const Registry registry = stand_ins();
  const Choice choice = choose(heads(2, 8), {8192, 1}, h200(), {}, {&table, 1}, registry);
  CHECK(chosen(choice) == "fused-64");
  CHECK(*choice.chosen()->predicted_us < 30.0);
  // Without a table the order of preference is left, and what no table has comes behind.
  CHECK(choose(heads(2, 8), {8192, 1}, h200(), {}, {}, registry).chosen()->recipe == "one-pass");
  std::erase_if(table.forms, [](const CostForm& form) { return form.pipeline != "recurrent"; });
  const Choice last = choose(heads(2, 8), {8192, 1}, h200(), {}, {&table, 1}, registry);
  CHECK(chosen(last) == "recurrent");
  CHECK(to_string(last).find("no measured times") != std::string::npos);
}

TEST_CASE("the real variants are chosen as the stand-ins are")
{
  if (!built_with_cuda()) return;
  CHECK(chosen(choose(heads(2, 8), {32768, 1}, h200())) == tiled("one-pass", 128));
  CHECK(chosen(choose(heads(4, 16), {2048, 1}, h200())) == tiled("one-pass", 64));
  CHECK(chosen(choose(heads(2, 8), {8192, 1}, other_gpu("NVIDIA A100", 80, 108))) == "residual");
  Problem narrow = heads(16, 64);
  narrow.qk_dim = narrow.v_dim = 64;
  CHECK(chosen(choose(narrow, {8192, 2}, h200())) == chosen(choice_of(narrow, {8192, 2})));
}

TEST_CASE("a measurement gives its own time, and less the farther away")
{
  CostTable table = builtin_cost_tables().front();
  CostForm form = *table.find("one-pass", "one_pass:value_tile=128");
  form.points = {{4096, 2, 4, 16, 132, 1.5}};
  const auto ratio = [&](const Problem& problem, const Capacity& capacity) {
    CostForm bare = form;
    bare.points.clear();
    return predicted_us(table, form, problem, capacity, h200()) /
           predicted_us(table, bare, problem, capacity, h200());
  };
  CHECK(ratio(heads(4, 16), {8192, 2}) == doctest::Approx(1.5));
  CHECK(ratio(heads(4, 16), {16384, 2}) == doctest::Approx(std::sqrt(1.5)));  // an octave away
  CHECK(ratio(heads(2, 8), {8192, 2}) < std::sqrt(1.5));
  CHECK(ratio(heads(4, 16), {1 << 20, 2}) < 1.001);
  // Of another GPU they say nothing.
  CHECK(predicted_us(table, form, heads(4, 16), {8192, 2}, other_gpu("NVIDIA GH200", 90, 132)) <
        predicted_us(table, form, heads(4, 16), {8192, 2}, h200()));
}

TEST_CASE("a prediction is its terms times their factors")
{
  CostTable table;
  table.gpu = "NVIDIA H200";
  table.multiprocessors = 100;
  table.front.us = {1000.0, 0, 0, 0, 1.0, 0};
  CostForm form;
  form.columns = 64;
  form.us = {1.0, 10.0, 0.5, 0.25, 0, 0.001};
  const Problem problem = heads(8, 16);
  // 3 x 16 heads are 96 blocks of half a head; 100 tokens are 2 chunks.
  const Capacity capacity{300, 3};
  const double front = 1000 + 96.0 / 50;
  const DeviceInfo half = h200(50);
  CHECK(predicted_us(table, form, problem, capacity, half) ==
        doctest::Approx(front + 1 + 2 * 10 + 2 * 2 * 0.5 + 96 * 0.001));
  // Another GPU with half of the multiprocessors has half of the memory's rate.
  CHECK(predicted_us(table, form, problem, capacity, other_gpu("small", 90, 50)) ==
        doctest::Approx(front + 1 + 2 * 10 + 2 * 2 * 0.5 + 96 * 0.002));
  form.resident = 2;
  CHECK(predicted_us(table, form, problem, capacity, half) ==
        doctest::Approx(front + 1 + 10 + 2 * 0.25 + 96 * 0.001));
  form.whole = true;
  form.step_tokens = 1;
  CHECK(predicted_us(table, form, problem, capacity, half) ==
        doctest::Approx(1 + 10 + 100 * 0.25 + 96 * 0.001));
}

TEST_CASE("a form that cuts sequences is as long as its longest segment")
{
  CostTable table;
  table.gpu = "NVIDIA H200";
  table.capability = 90;
  table.multiprocessors = 132;
  CostForm form;
  form.pipeline = "fused-128";
  form.whole = true;
  form.columns = 64;
  form.us = {0, 0, 1.0, 0, 0, 0, 100.0};
  const auto steps = [&](const Problem& problem, const Capacity& capacity) {
    return predicted_us(table, form, problem, capacity, h200());
  };
  CHECK(steps(heads(2, 8), {32768, 1}) == doctest::Approx(512));
  form.cut = true;
  // 132 / (2 x 8) are 8 segments, of 64 chunks and 8 in front.
  CHECK(steps(heads(2, 8), {32768, 1}) == doctest::Approx(100 + 64 + 8));
  // Two for each of four sequences; a whole number of four chunks.
  CHECK(steps(heads(2, 8), {4 * 64 * 130, 4}) == doctest::Approx(100 + 68 + 8));
  // Never longer than the sequence.
  CHECK(steps(heads(2, 8), {512, 1}) == doctest::Approx(100 + 8));
  // As many sequences as segments: whole, but the stage is there.
  CHECK(steps(heads(2, 8), {8 * 1024, 8}) == doctest::Approx(100 + 16));
  // Heads fill the machine.
  CHECK(steps(heads(16, 64), {8192, 1}) == doctest::Approx(128));
  table.forms = {form};
  const std::string json = to_json(table);
  CHECK(json.find("\"cut\": true") != std::string::npos);
  CHECK(to_json(parse_cost_table("again", json)) == json);
}

TEST_CASE("the nearest table: of the name, of the capability, from below, from above")
{
  std::vector<CostTable> tables(4);
  tables[0].gpu = "a";
  tables[0].capability = 80;
  tables[1].gpu = "b";
  tables[1].capability = 90;
  tables[2].gpu = "c";
  tables[2].capability = 90;
  tables[3].gpu = "d";
  tables[3].capability = 86;
  const auto nearest = [&](const char* name, int capability) {
    return cost_table_for(other_gpu(name, capability, 100), tables)->gpu;
  };
  CHECK(nearest("c", 90) == "c");
  CHECK(nearest("e", 90) == "b");
  CHECK(nearest("e", 120) == "b");
  CHECK(nearest("e", 89) == "d");
  CHECK(nearest("e", 75) == "a");
  CHECK(cost_table_for(h200(), {}) == nullptr);
  CHECK(cost_table_for(plain_host(), tables) == nullptr);
}

TEST_CASE("a table is read as it was written, and refused with what is wrong")
{
  const CostTable& table = builtin_cost_tables().front();
  const std::string json = to_json(table);
  CHECK(to_json(parse_cost_table("again", json)) == json);
  const TemporaryDirectory folder;
  const std::string path = (folder.path() / "costs.json").string();
  std::ofstream(path) << json;
  CHECK(to_json(read_cost_table(path)) == json);
  expect_error(ErrorCode::io, {"none.json"},
               [&] { read_cost_table((folder.path() / "none.json").string()); });

  const auto refused = [&](const std::string& from, const std::string& to, const char* what) {
    std::string text = json;
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    text.replace(at, from.size(), to);
    CAPTURE(to);
    expect_error(ErrorCode::format, {"cost table x.json", what},
                 [&] { parse_cost_table("x.json", text); });
  };
  refused("{", "[", "expected JSON");
  refused("\"format\": 1", "\"format\": 2", "format: expected 1, got 2");
  refused("\"gpu\": \"NVIDIA H200\"", "\"gpu\": 7", "gpu: expected text, got 7");
  refused("\"multiprocessors\": 132", "\"multiprocessors\": 0", "got 0");
  refused("\"launch\": ", "\"launch\": -", "launch: expected a number from 0 to");
  refused("\"launch\": ", "\"launch\": 1e300, \"round\": ", "launch: expected a number from 0 to");
  refused("\"naive\"", "\"native\"", "forms[0]: pipeline: expected one of naive, ");
  refused("\"points\": [", "\"points\": [[1, 2, 3, 4, 5, 0],", "forms[0]: points: expected five");
  refused("\"launch\": ", "\"lunch\": ", "'lunch'");
  refused("\"whole\": true", "\"whole\": 1", "whole: expected true or false, got 1");
  refused("\"columns\": 32", "\"columns\": 99999999999", "columns: expected a whole number");
  refused("\"residual\"", "\"naive\"", "got naive");
  refused("\"front\"", "\"back\"", "'front'");
  expect_error(ErrorCode::format, {"expected a field 'format'"},
               [] { parse_cost_table("x", "1"); });
}

TEST_CASE("on rows with equal lengths, the choice among forms measured is within 5 % of the best")
{
  // commit,gpu,capability,multiprocessors,case,pipeline,options,core_ms,forward_ms
  std::ifstream file(GDNFLOW_TEST_DATA "/../docs/results/h200_cost_rows.csv");
  std::string line;
  REQUIRE(std::getline(file, line));
  struct Form {
    double sum = 0;
    int count = 0;
    double predicted = 0;
  };
  std::map<std::string, std::map<std::string, Form>> cases;
  const CostTable& table = builtin_cost_tables().front();
  while (std::getline(file, line)) {
    std::vector<std::string> fields;
    std::stringstream stream(line);
    for (std::string field; std::getline(stream, field, ',');) fields.push_back(field);
    REQUIRE(fields.size() == 9);
    if (fields[4].find('+') != std::string::npos) continue;  // lengths differ
    std::int64_t sequences = 1;
    std::int64_t tokens = 0;
    std::int32_t qk = 0;
    std::int32_t v = 0;
    char mark = 0;
    std::stringstream name(fields[4]);
    name >> tokens >> mark;
    if (mark == 'x') {
      sequences = tokens;
      name >> tokens >> mark;
    }
    name >> qk >> mark >> v;
    REQUIRE(v > 0);
    const CostForm* const form = table.find(fields[5], fields[6]);
    REQUIRE(form != nullptr);
    Form& measured = cases[fields[3] + " " + fields[4]][fields[5] + fields[6]];
    measured.sum += std::stod(fields[8]);
    ++measured.count;
    measured.predicted = predicted_us(table, *form, heads(qk, v), {sequences * tokens, sequences},
                                      h200(std::stoi(fields[3])));
  }
  CHECK(cases.size() > 70);
  int beyond = 0;  // where other lengths of the same capacity have turned the choice
  for (const auto& entry : cases) {
    CAPTURE(entry.first);
    const std::map<std::string, Form>& forms = entry.second;
    const auto mean = [](const Form& form) { return form.sum / form.count; };
    const auto best = std::min_element(
        forms.begin(), forms.end(),
        [&](const auto& a, const auto& b) { return mean(a.second) < mean(b.second); });
    const auto taken = std::min_element(
        forms.begin(), forms.end(),
        [](const auto& a, const auto& b) { return a.second.predicted < b.second.predicted; });
    CHECK(mean(taken->second) <= 1.07 * mean(best->second));
    if (mean(taken->second) > 1.05 * mean(best->second)) ++beyond;
    // A prediction of the whole is no further off than a quarter.
    CHECK(taken->second.predicted == doctest::Approx(1e3 * mean(taken->second)).epsilon(0.25));
  }
  CHECK(beyond <= 1);
}
