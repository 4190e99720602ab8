#include <gdnflow/device.hpp>
#include <gdnflow/stages.hpp>

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include <doctest/doctest.h>

using namespace gdnflow;

namespace {

std::string stages_header() {
  std::ifstream file(GDNFLOW_TEST_DATA "/../stages/include/gdnflow/stages.hpp");
  REQUIRE(file.good());
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

bool has_word(const std::string& text, const std::string& word) {
  return std::regex_search(text, std::regex("\\b" + word + "\\b"));
}

}  // namespace

TEST_CASE("the stages stand in the order of the forward pass")
{
  std::vector<std::string> names;
  for (const Stage& stage : builtin_stages().stages()) names.push_back(stage.name);
  CHECK(names == std::vector<std::string>{"chunk_index", "qk_norm", "gate", "chunk_cumsum",
                                          "segments", "kkt_solve", "wu", "chunk_state",
                                          "residual_state", "chunk_output", "fused_prefill",
                                          "one_pass", "zero_padding"});
}

TEST_CASE("every stage has a host variant that serves any problem")
{
  Problem odd;
  odd.qk_heads = 3;
  odd.v_heads = 9;
  odd.qk_dim = 7;
  odd.v_dim = 13;
  odd.activation = DType::f16;
  odd.state = DType::bf16;
  odd.state_layout = StateLayout::vk;
  odd.head_map = HeadMap::interleaved;
  const Capacity capacity{100, 3};
  const DeviceInfo host = device_info(Device{});
  const Options options;
  for (const Stage& stage : builtin_stages().stages()) {
    CAPTURE(stage.name);
    const Variant* variant = stage.find("host", DeviceType::host);
    REQUIRE(variant != nullptr);
    CHECK(supports(*variant, {odd, capacity, host, options}));
    CHECK((variant->working_type == nullptr));  // intermediates are fp32 on the host
  }
}

TEST_CASE("every stage says what it is, and its names are unique")
{
  std::set<std::string> stages;
  for (const Stage& stage : builtin_stages().stages()) {
    CAPTURE(stage.name);
    CHECK(stages.insert(stage.name).second);
    CHECK(!stage.description.empty());
    std::set<std::string> ports;
    for (const Port& port : stage.ports) {
      CAPTURE(port.name);
      CHECK(ports.insert(port.name).second);
      CHECK(!port.extents.empty());
    }
    CHECK(std::any_of(stage.ports.begin(), stage.ports.end(),
                      [](const Port& port) { return port.direction != Direction::in; }));
    std::set<std::pair<std::string, DeviceType>> variants;
    for (const Variant& variant : stage.variants) {
      CAPTURE(variant.id);
      CHECK(variants.insert({variant.id, variant.target}).second);
      CHECK(!variant.description.empty());
      CHECK((variant.steps != nullptr));
    }
  }
}

TEST_CASE("the stages' header names every stage and port")
{
  const std::string header = stages_header();
  for (const Stage& stage : builtin_stages().stages()) {
    CHECK_MESSAGE(has_word(header, stage.name), stage.name);
    for (const Port& port : stage.ports) {
      CHECK_MESSAGE(has_word(header, port.name), stage.name, ": ", port.name);
    }
  }
}

TEST_CASE("free extents stand on external tensors alone")
{
  const Problem problem;
  const Capacity capacity{64, 1};
  for (const Stage& stage : builtin_stages().stages()) {
    for (const Port& port : stage.ports) {
      for (const Extent& extent : port.extents) {
        CHECK_MESSAGE((evaluate(extent, problem, capacity).has_value() || port.optional),
                      stage.name, ": ", port.name);
      }
    }
  }
}
