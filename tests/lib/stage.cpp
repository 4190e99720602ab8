#include <gdnflow/registry.hpp>
#include <gdnflow/stage.hpp>

#include "support/expect_error.hpp"

#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::expect_error;

namespace {

void no_steps(const StageCall&, StepList&) {}

Variant variant(std::string id, DeviceType target = DeviceType::host) {
  Variant v;
  v.id = std::move(id);
  v.description = "for tests";
  v.target = target;
  v.steps = no_steps;
  return v;
}

Stage stage(std::string name) {
  return {std::move(name),
          "for tests",
          {{"x", Direction::in, TypeRule::activation, {"T", 64}},
           {"y", Direction::out, TypeRule::working, {"T"}}},
          {variant("host")}};
}

}  // namespace

TEST_CASE("an extent is a literal or a symbol with an offset")
{
  CHECK(Extent("T").symbol == "T");
  CHECK(Extent("T").offset == 0);
  CHECK(Extent("N+1") == Extent(std::string_view("N+1")));
  CHECK(Extent("N+1").symbol == "N");
  CHECK(Extent("N+1").offset == 1);
  CHECK(Extent("64") == Extent(64));
  for (const char* text : {"T", "N+1", "64", "Hqk"}) CHECK(to_string(Extent(text)) == text);
}

TEST_CASE("a malformed extent is refused with its text")
{
  for (const char* text :
       {"", "+1", "N+", "N+x", "N 1", "N-1", "6a", "N+1+1", "N+1 ", "99999999999999999999"}) {
    CAPTURE(text);
    expect_error(ErrorCode::invalid_argument, {text}, [&] { Extent{text}; });
  }
}

TEST_CASE("symbols take their values from the problem and the capacity")
{
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 8;
  p.qk_dim = 64;
  p.v_dim = 32;
  const Capacity c{130, 3};
  const auto value = [&](const char* text) { return evaluate(Extent(text), p, c); };
  CHECK(value("T") == 130);
  CHECK(value("N") == 3);
  CHECK(value("N+1") == 4);
  CHECK(value("Hqk") == 2);
  CHECK(value("Hv") == 8);
  CHECK(value("Dk") == 64);
  CHECK(value("Dv") == 32);
  CHECK(value("C") == 64);
  CHECK(value("NC") == max_chunks(p, c));
  CHECK(value("NS") == 3 + most_cuts);
  CHECK(value("Sr") == 64);
  CHECK(value("Sc") == 32);
  CHECK(value("7") == 7);
  CHECK_FALSE(value("K").has_value());
  p.state_layout = StateLayout::vk;
  CHECK(value("Sr") == 32);
  CHECK(value("Sc") == 64);
}

TEST_CASE("a variant choice with options prints what it parses")
{
  for (const char* text : {"naive", "fused-128:value_tile=64", "x:a=1,b=-2"}) {
    CHECK(to_string(parse_variant_choice(text)) == text);
  }
  const VariantChoice choice = parse_variant_choice("x:a=1,b=-2");
  CHECK(choice.id == "x");
  CHECK(option_or(choice.options, "b", 0) == -2);
  CHECK(option_or(choice.options, "c", 9) == 9);
}

TEST_CASE("a malformed variant choice is refused")
{
  for (const char* text :
       {"", ":a=1", "x:", "x:a", "x:a=", "x:=1", "x:a=1,", "x:a=1,,b=2", "x:a=one", "x:a=1.5"}) {
    CAPTURE(text);
    expect_error(ErrorCode::invalid_argument, {"expected"}, [&] { parse_variant_choice(text); });
  }
}

TEST_CASE("a port's type follows from the problem and the variant")
{
  Problem p;
  p.activation = DType::f16;
  p.state = DType::bf16;
  p.index = DType::i64;
  Variant v = variant("host");
  const auto type = [&](TypeRule rule) {
    return resolve_type({"x", Direction::in, rule, {}}, p, v);
  };
  CHECK(type(TypeRule::activation) == DType::f16);
  CHECK(type(TypeRule::state) == DType::bf16);
  CHECK(type(TypeRule::index) == DType::i64);
  CHECK(type(TypeRule::f32) == DType::f32);
  CHECK(type(TypeRule::i32) == DType::i32);
  CHECK(type(TypeRule::u8) == DType::u8);
  CHECK(type(TypeRule::working) == DType::f32);
  v.working_type = [](const Problem& problem, std::string_view) { return problem.activation; };
  CHECK(type(TypeRule::working) == DType::f16);
}

TEST_CASE("support checks the target and the options before the variant is asked")
{
  Variant v = variant("host");
  v.options = {{"tile", "columns of a tile", 64, {64, 128}}};
  v.supports = [](const VariantQuery& query) {
    return query.problem.qk_dim == 128 ? Support::yes() : Support::no("needs d_k 128");
  };
  Problem p;
  const Capacity c{64, 1};
  DeviceInfo host;
  Options options;
  const auto ask = [&] { return supports(v, {p, c, host, options}); };
  CHECK(ask());
  options = {{"tile", 128}};
  CHECK(ask());
  options = {{"tile", 96}};
  CHECK(ask().reason.find("64, 128") != std::string::npos);
  CHECK(ask().reason.find("96") != std::string::npos);
  options = {{"width", 64}};
  CHECK(ask().reason.find("width") != std::string::npos);
  CHECK(ask().reason.find("tile") != std::string::npos);
  options.clear();
  p.qk_dim = 64;
  CHECK(ask().reason == "needs d_k 128");
  host.device = {DeviceType::cuda, 0};
  CHECK(ask().reason.find("cuda:0") != std::string::npos);
}

TEST_CASE("a stage call finds tensors by port name")
{
  const Stage s = stage("s");
  const Problem p;
  const Capacity c{64, 1};
  const DeviceInfo host;
  const Options options{{"tile", 64}};
  float data = 0;
  const std::vector<TensorView> tensors{TensorView::dense(&data, DType::f32, {1}), TensorView{}};
  const StageCall call{p, c, host, options, s, tensors, {}};
  CHECK(call["x"].data == &data);
  CHECK(call.has("x"));
  CHECK_FALSE(call.has("y"));
  CHECK(call.option("tile", 0) == 64);
  expect_error(ErrorCode::internal, {"s", "z"}, [&] { static_cast<void>(call["z"]); });
}

TEST_CASE("a registry finds stages and names those it has")
{
  const Registry registry({stage("a"), stage("b")});
  CHECK(registry.contains("a"));
  CHECK_FALSE(registry.contains("c"));
  CHECK(registry.find("b").name == "b");
  CHECK(registry.stages().size() == 2);
  expect_error(ErrorCode::invalid_argument, {"a, b", "'c'"}, [&] { registry.find("c"); });
}

TEST_CASE("a registry refuses a stage that is not whole")
{
  Registry registry({stage("a")});
  const auto refused = [&](auto change, std::initializer_list<std::string_view> parts) {
    Stage s = stage("b");
    change(s);
    expect_error(ErrorCode::invalid_argument, parts, [&] { registry.add(s); });
    CHECK(registry.stages().size() == 1);
  };
  refused([](Stage& s) { s.name = "a"; }, {"a", "already"});
  refused([](Stage& s) { s.name.clear(); }, {"name"});
  refused([](Stage& s) { s.ports.clear(); }, {"b", "no ports"});
  refused([](Stage& s) { s.ports[1].name = "x"; }, {"b", "x", "twice"});
  refused([](Stage& s) { s.ports[1].name.clear(); }, {"b", "port"});
  refused([](Stage& s) { s.ports[0].extents.assign(7, Extent(1)); }, {"x", "6", "7"});
  refused([](Stage& s) { s.variants.clear(); }, {"b", "no variants"});
  refused([](Stage& s) { s.variants.push_back(variant("host")); }, {"host", "twice"});
  refused([](Stage& s) { s.variants[0].steps = nullptr; }, {"host", "steps"});
  refused([](Stage& s) { s.variants[0].id.clear(); }, {"b", "id"});
}

TEST_CASE("variants can be added behind a stage's own, one id a target")
{
  Registry registry({stage("a")});
  registry.add_variant("a", variant("host", DeviceType::cuda));
  registry.add_variant("a", variant("mine"));
  const Stage& a = registry.find("a");
  REQUIRE(a.variants.size() == 3);
  CHECK(a.variants.front().target == DeviceType::host);
  CHECK(a.find("host", DeviceType::cuda) == &a.variants[1]);
  CHECK(a.find("mine", DeviceType::host) == &a.variants[2]);
  CHECK(a.find("mine", DeviceType::cuda) == nullptr);
  expect_error(ErrorCode::invalid_argument, {"mine", "twice"},
               [&] { registry.add_variant("a", variant("mine")); });
  expect_error(ErrorCode::invalid_argument, {"'z'"},
               [&] { registry.add_variant("z", variant("mine")); });
}
