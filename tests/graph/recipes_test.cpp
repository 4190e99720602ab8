#include <gdnflow/error.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/stages.hpp>

#include "graph/tiny_stages.hpp"
#include "support/expect_error.hpp"

#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

Pipeline make(std::string_view recipe, const Problem& problem = {},
              const VariantOverrides& overrides = {}) {
  return make_pipeline(recipe, problem, {256, 2}, plain_host(), overrides);
}

std::vector<std::string> nodes_of(const Pipeline& pipeline) {
  std::vector<std::string> names;
  for (const int n : pipeline.order()) names.push_back(pipeline.nodes()[n].name);
  return names;
}

std::set<std::string> edges_of(const Pipeline& pipeline, EdgeKind kind) {
  std::set<std::string> names;
  for (const Edge& edge : pipeline.edges()) {
    if (edge.kind == kind) names.insert(edge.name);
  }
  return names;
}

std::string edge_on(const Pipeline& pipeline, std::string_view node, std::string_view port) {
  const Node& n = pipeline.nodes()[pipeline.node_index(node)];
  const int edge = n.edges[n.stage.port_index(port)];
  return edge < 0 ? "" : pipeline.edges()[edge].name;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("the ladder in its order")
{
  Names ids;
  for (const Recipe& recipe : recipes()) {
    ids.emplace_back(recipe.id);
    CHECK_FALSE(recipe.description.empty());
  }
  CHECK(ids == Names{"naive", "residual", "fused", "fused-64", "fused-128", "fused-128x512",
                     "warp-specialized", "register-state", "one-pass", "recurrent", "auto"});
}

TEST_CASE("each recipe has the stages of its idea")
{
  CHECK(nodes_of(make("naive")) ==
        Names{"chunk_index", "chunk_cumsum", "kkt_solve", "wu", "chunk_state", "chunk_output"});
  CHECK(nodes_of(make("residual")) ==
        Names{"chunk_index", "chunk_cumsum", "kkt_solve", "residual_state", "chunk_output"});
  CHECK(nodes_of(make("fused")) ==
        Names{"chunk_index", "chunk_cumsum", "kkt_solve", "fused_prefill"});
  CHECK(nodes_of(make("recurrent")) == Names{"one_pass"});
}

TEST_CASE("core is what follows the cumulative sum and the solve")
{
  const auto core = [](const Pipeline& pipeline) {
    Names names;
    for (const int n : pipeline.order()) {
      if (pipeline.nodes()[n].core) names.push_back(pipeline.nodes()[n].name);
    }
    return names;
  };
  CHECK(core(make("naive")) == Names{"wu", "chunk_state", "chunk_output"});
  CHECK(core(make("residual")) == Names{"residual_state", "chunk_output"});
  CHECK(core(make("fused")) == Names{"fused_prefill"});
  CHECK(core(make("recurrent")).empty());
}

TEST_CASE("the problem decides which external tensors there are")
{
  Problem p;
  CHECK(edges_of(make("residual", p), EdgeKind::input) ==
        std::set<std::string>{"q", "k", "v", "g", "beta", "cu_seqlens"});
  CHECK(edges_of(make("residual", p), EdgeKind::output) ==
        std::set<std::string>{"o", "final_state"});
  p.cu_seqlens = false;
  p.final_state = false;
  CHECK(edges_of(make("residual", p), EdgeKind::input) ==
        std::set<std::string>{"q", "k", "v", "g", "beta"});
  CHECK(edges_of(make("residual", p), EdgeKind::output) == std::set<std::string>{"o"});
}

TEST_CASE("every optional tensor is an input or output of every recipe")
{
  Problem p;
  p.gate = GateForm::raw;
  p.beta = BetaForm::logit;
  p.qk_norm = true;
  p.prefix_lens = true;
  p.initial_state = true;
  p.state_indices = true;
  p.output_state_indices = true;
  p.has_initial_state = true;
  p.checkpoint_interval = 128;
  p.checkpoint_state_indices = true;
  p.zero_padding = true;
  for (const Recipe& recipe : recipes()) {
    CAPTURE(recipe.id);
    if (const Support support = can_make_pipeline(recipe.id, p, {256, 2}, plain_host()); !support) {
      // A host-only build does not have the variant at all.
      const char* why = built_with_cuda() ? "the device is host" : "expected one of [host]";
      CHECK(support.reason.find(why) != std::string::npos);
      continue;
    }
    const Pipeline pipeline = make(recipe.id, p);
    CHECK(edges_of(pipeline, EdgeKind::input) ==
          std::set<std::string>{"q", "k", "v", "a", "b", "a_log", "dt_bias", "cu_seqlens",
                                "prefix_lens", "initial_state", "state_indices",
                                "output_state_indices", "has_initial_state",
                                "checkpoint_state_indices"});
    CHECK(edges_of(pipeline, EdgeKind::output) ==
          std::set<std::string>{"o", "final_state", "checkpoints"});
    // Whatever reads q, k, g or beta behind the front reads what the front made of them.
    for (const Node& node : pipeline.nodes()) {
      if (node.name == "qk_norm" || node.name == "gate") continue;
      for (const auto& [port, edge] : std::map<std::string, std::string>{{"q", "q_normalized"},
                                                                         {"k", "k_normalized"},
                                                                         {"g", "g_ready"},
                                                                         {"beta", "beta_ready"}}) {
        if (node.stage.port_index(port) >= 0) CHECK(edge_on(pipeline, node.name, port) == edge);
      }
    }
    const Node& last = pipeline.nodes()[pipeline.order().back()];
    CHECK(last.name == "zero_padding");
    CHECK(last.optional);
    CHECK_FALSE(last.core);
  }
}

TEST_CASE("the gate stage takes alpha and logits apart")
{
  Problem p;
  p.beta = BetaForm::logit;
  Pipeline pipeline = make("residual", p);
  CHECK(edge_on(pipeline, "gate", "g") == "g");
  CHECK(edge_on(pipeline, "gate", "b") == "b");
  CHECK(edge_on(pipeline, "gate", "beta").empty());
  CHECK(edge_on(pipeline, "chunk_cumsum", "g") == "g_ready");
  p.beta = BetaForm::ready;
  p.gate = GateForm::alpha;
  pipeline = make("residual", p);
  CHECK(edge_on(pipeline, "gate", "g") == "g");
  CHECK(edge_on(pipeline, "gate", "beta") == "beta");
  CHECK(edge_on(pipeline, "kkt_solve", "beta") == "beta_ready");
}

TEST_CASE("the front's stages do not wait for one another")
{
  Problem p;
  p.qk_norm = true;
  p.gate = GateForm::raw;
  const Pipeline pipeline = make("naive", p);
  for (const char* name : {"chunk_index", "gate", "qk_norm"}) {
    CAPTURE(name);
    CHECK(pipeline.nodes()[pipeline.node_index(name)].predecessors.empty());
  }
}

TEST_CASE("an unknown recipe, stage or variant is refused with what there is")
{
  expect_error(ErrorCode::invalid_argument,
               {"recipe", "naive, residual, fused, fused-64", "recurrent, auto]", "'fast'"},
               [] { make("fast"); });
  expect_error(ErrorCode::invalid_argument, {"recipe recurrent", "[one_pass]", "'kkt_solve'"}, [] {
    make("recurrent", {}, {{"kkt_solve", {"host", {}}}});
  });
  expect_error(ErrorCode::invalid_pipeline, {"kkt_solve", "'quick'"}, [] {
    make("naive", {}, {{"kkt_solve", {"quick", {}}}});
  });
  CHECK(make("naive", {}, {{"kkt_solve", {"host", {}}}}).nodes().size() == 6);
}

TEST_CASE("whether a pipeline can be made is an answer, not an exception")
{
  CHECK(can_make_pipeline("residual", {}, {256, 2}, plain_host()));
  const Support unknown = can_make_pipeline("fast", {}, {256, 2}, plain_host());
  CHECK_FALSE(unknown.ok);
  CHECK(unknown.reason.find("'fast'") != std::string::npos);
  // A GPU that is too old for every variant gets each one's reason.
  DeviceInfo old;
  old.device = {DeviceType::cuda, 0};
  old.name = "old";
  old.capability = 30;
  const Support refused = can_make_pipeline("fused", {}, {256, 2}, old);
  CHECK_FALSE(refused.ok);
  CHECK(refused.reason.find("no variant can serve") != std::string::npos);
}

TEST_CASE("a recipe without a name is auto, which keeps its name and takes another's stages")
{
  for (const char* id : {"", "auto"}) {
    const Pipeline pipeline = make(id);
    CHECK(pipeline.id() == "auto");
    CHECK(nodes_of(pipeline) == nodes_of(make("fused")));
  }
}

TEST_CASE("auto takes the recipe that has the stage of an override, or says why there is none")
{
  CHECK(nodes_of(make("auto", {}, {{"wu", {"host", {}}}})) == nodes_of(make("naive")));
  CHECK(nodes_of(make("auto", {}, {{"one_pass", {"host", {}}}})) == nodes_of(make("recurrent")));
  expect_error(ErrorCode::invalid_pipeline, {"kkt_solve", "'quick'"}, [] {
    make("auto", {}, {{"kkt_solve", {"quick", {}}}});
  });
  expect_error(ErrorCode::invalid_argument, {"recipe auto", "'lookup'"}, [] {
    make("auto", {}, {{"lookup", {"host", {}}}});
  });
}
