#include "support/golden.hpp"

#include <gdnflow/compare.hpp>

#include "support/stage_driver.hpp"

#include <string>

// The reference tensors of another implementation, stage by stage.

using namespace gdnflow;
using test::Form;
using test::StageDriver;

TEST_CASE("all forms equal the reference tensors")
{
  for (const std::string_view name : test::golden_names) {
    CAPTURE(std::string(name));
    const test::Golden golden = test::Golden::open(name);
    const Problem& p = golden.problem;
    const std::int64_t tokens = golden.inputs.q.extents[0];
    const auto sequences = static_cast<std::int64_t>(golden.inputs.cu_seqlens.size()) - 1;
    for (const Form form : test::forms) {
      CAPTURE(test::to_string(form));
      StageDriver driver(p, {tokens, sequences});
      for (const char* input : {"q", "k", "v", "g", "beta", "cu_seqlens"}) {
        driver.add_view(input, golden.file.find(input));
      }
      if (p.initial_state) driver.add_view("initial_state", golden.inputs.initial_state);
      if (p.qk_norm) {
        driver.run("qk_norm");
        driver.add_view("q", driver["q_normalized"]);
        driver.add_view("k", driver["k_normalized"]);
      }
      // In fp32, so that what is compared is the computation and not the rounding of o.
      driver.add_poisoned("o", DType::f32, {tokens, p.v_heads, p.v_dim});
      driver.add_poisoned_states("final_state", sequences);
      test::run_form(driver, form);
      const Comparison o = compare(driver["o"], golden.o());
      CHECK_MESSAGE(o.within(1e-5), to_string(o, golden.inputs.cu_seqlens));
      const Comparison state = compare(driver["final_state"], golden.final_state());
      CHECK_MESSAGE(state.within(1e-5), to_string(state));
    }
  }
}
