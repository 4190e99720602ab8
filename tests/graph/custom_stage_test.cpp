// How to add a stage of your own, from outside the library, and build a pipeline with it. Only
// public headers are used, and nothing of the library is changed.
//
// The example gates the output with SiLU, o <- o * silu(z), as the models' layers do behind the
// recurrence. `silu_gate` becomes one more node behind the built-in stages: the planner and the
// executors treat it like any other.

#include <gdnflow/gdnflow.hpp>

#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace gdnflow;

// What the host variant does. Tensors come by the names of the ports, with strides; this stage
// promises (in `accepts`) that they are dense.
void run_silu_gate(const StageCall& call) {
  const float* z = call["z"].as<const float>();
  float* o = call["o"].as<float>();
  const std::int64_t count = call["o"].elements();
  for (std::int64_t i = 0; i < count; ++i) o[i] *= z[i] / (1.0F + std::exp(-z[i]));
}

// A stage is a value: its name, its ports with their types and extents, its variants. `o` is
// changed in place. A CUDA variant would stand beside this one with `target = DeviceType::cuda`
// and give kernel steps (see kernel_step in gdnflow/step.hpp).
Stage silu_gate() {
  Variant host;
  host.id = "host";
  host.description = "a loop";
  host.target = DeviceType::host;
  host.supports = [](const VariantQuery& query) {
    return query.problem.activation == DType::f32
               ? Support::yes()
               : Support::no("silu_gate takes f32 activations only");
  };
  host.accepts = [](const StageCall& call) {
    return call["z"].is_dense() && call["o"].is_dense() ? Support::yes()
                                                        : Support::no("z and o must be dense");
  };
  host.steps = [](const StageCall&, StepList& steps) {
    steps.push_back({"silu_gate", HostCall{run_silu_gate}});
  };

  Stage stage;
  stage.name = "silu_gate";
  stage.description = "o <- o * silu(z)";
  stage.ports = {{"z", Direction::in, TypeRule::activation, {"T", "Hv", "Dv"}},
                 {"o", Direction::inout, TypeRule::activation, {"T", "Hv", "Dv"}}};
  stage.variants = {host};
  return stage;
}

TensorView view(std::vector<float>& data, std::initializer_list<std::int64_t> extents) {
  data.resize(static_cast<std::size_t>(TensorView::dense(nullptr, DType::f32, extents).elements()));
  return TensorView::dense(data.data(), DType::f32, extents);
}

}  // namespace

TEST_CASE("a stage of the user's own runs in a pipeline of the user's own")
{
  // 1. The problem: what is fixed. And the capacity: the most that one plan serves.
  Problem problem;
  problem.qk_heads = 1;
  problem.v_heads = 2;
  problem.qk_dim = 16;
  problem.v_dim = 16;
  problem.activation = DType::f32;
  problem.cu_seqlens = false;  // dense: two sequences of 50 tokens
  const Capacity capacity{100, 2};

  // 2. The registry: the built-in stages and ours.
  Registry registry = builtin_stages();
  registry.add(silu_gate());

  // 3. The pipeline. Stages join by the names of their ports.
  StageUse optional;
  optional.optional = true;
  const Pipeline pipeline =
      PipelineBuilder("gated", registry, problem, capacity, device_info(Device{}))
          .inputs({"q", "k", "v", "g", "beta", "z"})
          .outputs({"o", "final_state"})
          .add("chunk_index")
          .add("chunk_cumsum")
          .add("kkt_solve")
          .add("residual_state")
          .add("chunk_output")
          .add("silu_gate", optional)
          .build();

  // 4. Tensors, a plan, an executor; bind, build, run.
  std::vector<float> q, k, v, g, beta, z, o, state;
  const TensorView zs = view(z, {100, 2, 16});
  const TensorView os = view(o, {100, 2, 16});
  const Bindings bindings{{"q", view(q, {100, 1, 16})},
                          {"k", view(k, {100, 1, 16})},
                          {"v", view(v, {100, 2, 16})},
                          {"g", view(g, {100, 2})},
                          {"beta", view(beta, {100, 2})},
                          {"z", zs},
                          {"o", os},
                          {"final_state", view(state, {2, 2, 16, 16})}};
  fill_input(InputKind::q, Distribution::random_decay, 1, bindings[0].second);
  fill_input(InputKind::k, Distribution::random_decay, 1, bindings[1].second);
  fill_input(InputKind::v, Distribution::random_decay, 1, bindings[2].second);
  fill_input(InputKind::g, Distribution::random_decay, 1, bindings[3].second);
  fill_input(InputKind::beta, Distribution::random_decay, 1, bindings[4].second);
  fill_uniform(2, -3.0F, 3.0F, zs);

  const auto executor = make_executor(Plan(pipeline));
  executor->bind(bindings);
  executor->build();
  executor->run();

  // 5. The result is the oracle's, gated.
  const OracleInputs inputs{bindings[0].second, bindings[1].second, bindings[2].second,
                            bindings[3].second, bindings[4].second, {},
                            {0, 50, 100}};
  const OracleResult plain = oracle_recurrent(problem, inputs);
  std::vector<double> gated = plain.o;
  for (std::size_t i = 0; i < gated.size(); ++i) gated[i] *= z[i] / (1.0 + std::exp(-double{z[i]}));
  CHECK(compare(os, gated).within(1e-5));

  // 6. An optional node can be switched off without building anew.
  executor->set_enabled("silu_gate", false);
  executor->run();
  CHECK(compare(os, plain.o).within(1e-5));
}

TEST_CASE("a stage of the user's own refuses in its own words")
{
  Registry registry = builtin_stages();
  registry.add(silu_gate());
  Problem problem;
  problem.activation = DType::bf16;
  PipelineBuilder builder("gated", registry, problem, {100, 1}, device_info(Device{}));
  builder.inputs({"z", "o"}).add("silu_gate");
  try {
    builder.build();
    FAIL("expected a refusal");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::unsupported);
    CHECK(std::string(error.what()).find("silu_gate takes f32 activations only") !=
          std::string::npos);
  }
}
