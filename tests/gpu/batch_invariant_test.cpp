#include <gdnflow/executor.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>

#include "gpu/device_externals.hpp"
#include "support/gpu.hpp"

#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

// In batch_invariant mode a sequence has the same bits alone and in a batch, in any bucket, and in
// a shard of the model's heads.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

Problem problem_of(std::int32_t qk_heads, std::int32_t v_heads, std::int32_t model_v_heads) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.initial_state = true;
  p.mode = Mode::batch_invariant;
  p.model_v_heads = model_v_heads;
  return p;
}

/// Bytes of rows [row, row + rows) of a dense tensor [rows, heads, ...], heads [head, head +
/// heads).
std::vector<char> part(const HostTensor& tensor, std::int64_t row, std::int64_t rows,
                       std::int64_t head, std::int64_t heads) {
  const TensorView& view = tensor.view();
  const std::int64_t of_row = view.bytes() / view.extents[0];
  const std::int64_t of_head = of_row / view.extents[1];
  std::vector<char> bytes;
  for (std::int64_t i = row; i < row + rows; ++i) {
    const char* const from = static_cast<const char*>(view.data) + i * of_row + head * of_head;
    bytes.insert(bytes.end(), from, from + heads * of_head);
  }
  return bytes;
}

void overwrite_front(HostTensor& tensor, const std::vector<char>& bytes) {
  REQUIRE(static_cast<std::int64_t>(bytes.size()) <= tensor.view().bytes());
  std::memcpy(tensor.view().data, bytes.data(), bytes.size());
}

Externals run(const std::string& recipe, const Externals& x,
              const VariantOverrides& overrides = {}) {
  DeviceExternals device(x);
  auto executor = make_graph_executor(
      Plan(make_pipeline(recipe, x.problem(), x.capacity(), device_info(gpu), overrides)));
  executor->bind(device.bindings());
  executor->build();
  const TestStream stream;
  executor->run(stream);
  return device.download();
}

/// Sequence `n` of a batch by itself, with value heads [head, head + problem.v_heads).
Externals alone(const Externals& batch, std::int64_t n, const Problem& problem, std::int64_t head,
                std::int64_t spare_tokens) {
  const std::int64_t first = batch.offsets()[static_cast<std::size_t>(n)];
  const std::int64_t tokens = batch.offsets()[static_cast<std::size_t>(n) + 1] - first;
  Externals x(problem, {tokens + spare_tokens, 1 + spare_tokens % 3}, {tokens});
  const std::int64_t ratio = problem.v_heads / problem.qk_heads;
  for (const char* name : {"q", "k", "v", "g", "beta"}) {
    const bool of_keys = name[0] == 'q' || name[0] == 'k';
    overwrite_front(x[name],
                    part(batch.tensors().at(name), first, tokens, of_keys ? head / ratio : head,
                         of_keys ? problem.qk_heads : problem.v_heads));
  }
  overwrite_front(x["initial_state"],
                  part(batch.tensors().at("initial_state"), n, 1, head, problem.v_heads));
  return x;
}

}  // namespace

TEST_CASE("in batch_invariant mode a sequence's bits depend on the sequence alone")
{
  GDNFLOW_REQUIRE_GPU();
  const std::vector<std::int64_t> lengths{700, 64, 3001, 1, 0, 1500};
  for (const char* const recipe :
       {"auto", "register-state", "warp-specialized", "fused-128x512", "recurrent"}) {
    const Problem whole = problem_of(2, 8, 0);
    const Capacity capacity{offsets_of(lengths).back() + 5, std::ssize(lengths) + 1};
    if (!can_make_pipeline(recipe, whole, capacity, device_info(gpu))) continue;
    for (const Distribution distribution : {Distribution::random_decay, Distribution::mixed}) {
      const Externals batch(whole, capacity, lengths, distribution);
      const Externals results = run(recipe, batch);
      for (std::int64_t n = 0; n < std::ssize(lengths); ++n) {
        const std::int64_t tokens = lengths[static_cast<std::size_t>(n)];
        const std::int64_t first = batch.offsets()[static_cast<std::size_t>(n)];
        for (const std::int64_t spare : {1, 6000}) {
          for (const std::int32_t shards : {1, 2}) {
            const std::int32_t heads = whole.v_heads / shards;
            const Problem problem =
                problem_of(whole.qk_heads / shards, heads, shards == 1 ? 0 : whole.v_heads);
            for (std::int32_t head = 0; head < whole.v_heads; head += heads) {
              const Externals one = run(recipe, alone(batch, n, problem, head, spare));
              const std::string what = fmt::format(
                  "{}, {}: sequence {} of {} tokens, {} heads from {}, {} tokens to "
                  "spare",
                  recipe, to_string(distribution), n, tokens, heads, head, spare);
              CHECK_MESSAGE(part(one.tensors().at("o"), 0, tokens, 0, heads) ==
                                part(results.tensors().at("o"), first, tokens, head, heads),
                            what, ": o differs");
              CHECK_MESSAGE(part(one.tensors().at("final_state"), 0, 1, 0, heads) ==
                                part(results.tensors().at("final_state"), n, 1, head, heads),
                            what, ": final_state differs");
            }
          }
        }
      }
    }
  }
}

TEST_CASE("in batch_invariant mode bits do not depend on which checkpoints are kept")
{
  GDNFLOW_REQUIRE_GPU();
  Problem p = problem_of(2, 4, 0);
  p.checkpoint_interval = 64;
  p.checkpoint_state_indices = true;
  for (const char* const recipe : {"auto", "register-state", "recurrent"}) {
    CAPTURE(recipe);
    const Capacity capacity{160, 1};
    if (!can_make_pipeline(recipe, p, capacity, device_info(gpu))) continue;
    const auto results_with = [&](std::int32_t first, std::int32_t second) {
      Externals x(p, capacity, {150});
      x.tensors()["checkpoints"] = HostTensor(p.state, {2, p.v_heads, p.qk_dim, p.v_dim});
      HostTensor indices(DType::i32, {2});
      indices.as<std::int32_t>()[0] = first;
      indices.as<std::int32_t>()[1] = second;
      x.tensors()["checkpoint_state_indices"] = std::move(indices);
      const Externals results = run(recipe, x);
      std::vector<char> bytes = part(results.tensors().at("o"), 0, 150, 0, p.v_heads);
      const std::vector<char> state = part(results.tensors().at("final_state"), 0, 1, 0, p.v_heads);
      bytes.insert(bytes.end(), state.begin(), state.end());
      return bytes;
    };
    const std::vector<char> kept = results_with(0, 1);
    CHECK(results_with(-1, -1) == kept);
    CHECK(results_with(1, -1) == kept);
  }
}

TEST_CASE("batch_invariant cuts long sequences, too")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem problem = problem_of(2, 8, 0);
  if (!can_make_pipeline("one-pass", problem, {64, 1}, device_info(gpu))) return;
  const Externals x(problem, {4000, 1}, {4000});
  const auto state = [](const Externals& results) {
    return part(results.tensors().at("final_state"), 0, 1, 0, 8);
  };
  // What lies below fp32's resolution at a cut still turns over a rounding here and there.
  const VariantOverrides uncut{{"one_pass", {"one-pass", {{"segments", 0}}}}};
  CHECK(state(run("auto", x)) != state(run("one-pass", x, uncut)));
}
