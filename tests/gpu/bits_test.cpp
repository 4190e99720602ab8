#include <gdnflow/executor.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/stages.hpp>

#include "gpu/device_externals.hpp"
#include "support/gpu.hpp"

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

// Roles of a kernel may meet in any order that its barriers allow, and results have the same bits
// in each. So runs agree to the bit, and so do builds that delay roles differently: with
// GDNFLOW_CHECKSUMS=FILE the sums of every output go to a file, which tests/gpu.sh compares between
// a build and one with GDNFLOW_DELAY_ROLES.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

struct Form {
  std::string recipe;
  VariantOverrides overrides;

  std::string text() const {
    return overrides.empty() ? recipe : to_string(overrides.begin()->second);
  }
};

/// The kernel that a recipe is named after, and its stage.
struct Kernel {
  std::string stage;
  const Variant* variant = nullptr;
};

Kernel kernel_of(std::string_view recipe) {
  for (const char* const stage : {"fused_prefill", "one_pass"}) {
    if (const Variant* const variant = builtin_stages().find(stage).find(recipe, gpu.type)) {
      return {stage, variant};
    }
  }
  return {};
}

/// Every recipe, with every value of each option of the kernel that it is named after, but for the
/// lengths up to which sequences are short.
std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (const Recipe& recipe : recipes()) {
    if (recipe.id == "auto" || is_excluded(recipe.id)) continue;
    const Kernel kernel = kernel_of(recipe.id);
    if (kernel.variant == nullptr) {
      forms.push_back({std::string(recipe.id), {}});
      continue;
    }
    std::vector<Options> choices{{}};
    for (const OptionSpec& spec : kernel.variant->options) {
      std::vector<Options> longer;
      for (const Options& choice : choices) {
        for (const std::int64_t value : spec.allowed) {
          if (spec.name == "short" && value != spec.default_value) continue;
          longer.push_back(choice);
          longer.back().emplace_back(spec.name, value);
        }
      }
      choices = std::move(longer);
    }
    for (Options& choice : choices) {
      forms.push_back({std::string(recipe.id),
                       {{kernel.stage, VariantChoice{kernel.variant->id, std::move(choice)}}}});
    }
  }
  return forms;
}

struct Shape {
  std::vector<std::int64_t> lengths;
  std::int32_t qk_heads, v_heads;
  Distribution distribution = Distribution::random_decay;
  std::int32_t dim = 128;
  DType activation = DType::bf16;
  bool initial_state = true;
  float state_factor = 1.0F;
  bool qk_norm = false;

  std::string text() const {
    return fmt::format("{} tokens, {}/{} heads of {}, {}, {}{}{}", fmt::join(lengths, "+"),
                       qk_heads, v_heads, dim, to_string(activation), to_string(distribution),
                       initial_state ? fmt::format(", state x {}", state_factor) : "",
                       qk_norm ? ", qk norm" : "");
  }

  Externals externals() const {
    Problem p;
    p.qk_heads = qk_heads;
    p.v_heads = v_heads;
    p.qk_dim = p.v_dim = dim;
    p.activation = activation;
    p.initial_state = initial_state;
    p.qk_norm = qk_norm;
    Externals x(p, {offsets_of(lengths).back() + 5, std::ssize(lengths) + 1}, lengths,
                distribution);
    if (initial_state) scale<float>(x["initial_state"], state_factor);
    return x;
  }
};

/// Short, packed, with tails; of those for segments one each that is cut, kept whole or linked,
/// both beside each other, and cut at first and then computed again; normalised; and so many
/// sequences of heads that some go token by token.
std::vector<Shape> all_shapes() {
  return {
      {{1}, 1, 1},
      {{1, 63, 64, 65, 0, 200}, 2, 4},
      {{500, 129}, 3, 12, Distribution::mixed, 128, DType::f16},
      {{75, 300}, 2, 2, Distribution::random_decay, 64},
      {{192, 100}, 16, 64, Distribution::random_decay, 128, DType::bf16, false},
      {{700, 40, 1300}, 2, 4},
      {{1025}, 1, 2, Distribution::no_decay},
      {{4000, 300}, 1, 4, Distribution::quarter_frozen},
      {{1025}, 1, 2, Distribution::random_decay, 128, DType::bf16, true, 1e15F},
      {{192, 100, 1}, 4, 8, Distribution::random_decay, 128, DType::bf16, true, 1.0F, true},
      {{3, 9, 1, 8, 30, 7, 0, 2, 8, 8, 64, 1, 4, 6, 8, 2, 3}, 16, 64},
  };
}

/// FNV-1a.
std::uint64_t checksum(const TensorView& view) {
  std::uint64_t sum = 0xcbf29ce484222325U;
  for (const unsigned char byte : std::span(static_cast<const unsigned char*>(view.data),
                                            static_cast<std::size_t>(view.bytes()))) {
    sum = (sum ^ byte) * 0x100000001b3U;
  }
  return sum;
}

}  // namespace

TEST_CASE("every kernel gives the same bits each time, in whichever order its roles come")
{
  GDNFLOW_REQUIRE_GPU();
  std::ofstream file;
  if (const char* path = std::getenv("GDNFLOW_CHECKSUMS"); path != nullptr) {
    file.open(path);
    REQUIRE_MESSAGE(file.is_open(), "GDNFLOW_CHECKSUMS: cannot be written: ", std::string(path));
    file << (GDNFLOW_DELAY_ROLES ? "roles delayed\n" : "roles as they come\n");
  }
  const std::vector<Form> forms = all_forms();
  int run = 0;
  for (const Shape& shape : all_shapes()) {
    const Externals host = shape.externals();
    DeviceExternals x(host);
    for (const Form& form : forms) {
      if (!can_make_pipeline(form.recipe, host.problem(), host.capacity(), device_info(gpu),
                             form.overrides)) {
        continue;
      }
      auto executor = make_graph_executor(Plan(make_pipeline(
          form.recipe, host.problem(), host.capacity(), device_info(gpu), form.overrides)));
      executor->bind(x.bindings());
      executor->build();
      std::vector<unsigned char> expected;
      for (int i = 0; i < 3; ++i) {
        x.overwrite(host);
        executor->run();
        const std::vector<unsigned char> bits = x.bits();
        if (i == 0) expected = bits;
        CHECK_MESSAGE(bits == expected, form.text(), ": ", shape.text(), ": run ", i, " differs");
      }
      const auto& outputs = x.download().tensors();
      file << fmt::format("{}: {}: o {:016x} final_state {:016x}\n", form.text(), shape.text(),
                          checksum(outputs.at("o").view()),
                          checksum(outputs.at("final_state").view()));
      ++run;
    }
  }
  CHECK(run >= 3 * std::ssize(all_shapes()));  // naive, residual and recurrent run everywhere
  file.flush();
  CHECK_MESSAGE((!file.is_open() || file.good()), "GDNFLOW_CHECKSUMS: could not be written");
}
