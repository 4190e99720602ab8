#include <gdnflow/recipes.hpp>
#include <gdnflow/session.hpp>

#include "graph/small_session.hpp"
#include "support/chunked_prompts.hpp"
#include "support/engine_batch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <sys/mman.h>

// What has gone wrong in other systems' serving, each on the host through a session;
// docs/serving.md has the list. tests/gpu does the same with graphs.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

PrefillSession session_of(const Problem& problem, const Capacity& bucket,
                          const std::string& recipe) {
  return {problem, {bucket}, Device{}, {.prefill = {.recipe = recipe}}};
}

std::vector<std::string> host_recipes(const Problem& problem) {
  std::vector<std::string> ids;
  for (const Recipe& recipe : recipes()) {
    if (can_make_pipeline(recipe.id, problem, {64, 1}, device_info({}))) {
      ids.emplace_back(recipe.id);
    }
  }
  REQUIRE(ids.size() >= 4);
  return ids;
}

/// Address space that takes memory where it is written to, zero elsewhere.
class SparseMemory {
 public:
  explicit SparseMemory(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    REQUIRE(data_ != MAP_FAILED);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() { (void)munmap(data_, bytes_); }
  void* data() const noexcept { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

}  // namespace

TEST_CASE("prompts in pieces: each starts where the one before has left its slot")
{
  for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
    for (const DType index : {DType::i32, DType::i64}) {
      Problem p = small_session_problem();
      p.state_layout = layout;
      p.index = index;
      for (const std::string& recipe : host_recipes(p)) {
        CAPTURE(recipe);
        for (const bool padded : {false, true}) {
          ChunkedPrompts prompts(p, 200, awkward_pieces());
          PrefillSession session = session_of(prompts.problem(), prompts.capacity(), recipe);
          const PrefillTensors tensors = prompts.call(
              [&](const std::string& name) { return prompts.tensors().at(name).view(); });
          for (std::int64_t step = 0; step < prompts.steps(); ++step) {
            CAPTURE(step);
            prompts.begin(step, padded);
            session.run(tensors, padded ? prompts.rows() : prompts.tokens(),
                        padded ? prompts.prompts() : prompts.count());
            prompts.check(session_bound);
          }
          CHECK(session.stats().captures == 1);
          if (padded) CHECK(session.stats().rebinds == 0);
        }
      }
    }
  }
}

TEST_CASE("what is not finite in one sequence of a session changes no bit of another")
{
  const std::vector<EngineSequence> sequences{{70, 3}, {100, 1}, {65, 0}};
  for (const std::string& recipe : host_recipes(EngineBatch::pooled(small_session_problem()))) {
    CAPTURE(recipe);
    EngineBatch clean(small_session_problem(), 250, 4, sequences);
    PrefillSession session = session_of(clean.problem(), {256, 4}, recipe);
    session.run(clean.tensors(), clean.tokens(), clean.count());
    for (const float poison : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      for (const char* name : {"q", "k", "v", "g", "beta", "initial_state"}) {
        CAPTURE(name);
        EngineBatch batch(small_session_problem(), 250, 4, sequences);
        batch.poison_sequence(1, name, poison);
        session.run(batch.tensors(), batch.tokens(), batch.count());
        batch.check_same_but(1, batch.externals(), clean.externals());
      }
    }
  }
}

TEST_CASE("lengths of any kind lead to no row that there is not")
{
  constexpr std::int64_t rows = 137;
  for (const DType index : {DType::i32, DType::i64}) {
    Problem p = small_session_problem();
    p.index = index;
    for (const std::string& recipe : host_recipes(EngineBatch::pooled(p))) {
      CAPTURE(recipe);
      PrefillSession session = session_of(EngineBatch::pooled(p), {4096, 64}, recipe);
      for (const std::vector<std::int64_t>& offsets : bad_offsets(rows, index)) {
        CAPTURE(offsets);
        EngineBatch batch(p, rows, 3, safe_sequences(offsets, rows));
        batch.set_offsets(offsets);
        session.run(batch.tensors(), rows, 3);
        batch.check(session_bound);
      }
    }
  }
}

TEST_CASE("slots that the pool does not have are read as zero and written nowhere")
{
  for (const std::string& recipe : host_recipes(EngineBatch::pooled(small_session_problem()))) {
    CAPTURE(recipe);
    EngineBatch batch(small_session_problem(), 200, 3, {{70, 2}, {65, 3}, {40, 1 << 30}});
    PrefillSession session = session_of(batch.problem(), {200, 3}, recipe);
    session.run(batch.tensors(), batch.tokens(), batch.count());
    batch.check(session_bound);
  }
}

TEST_CASE("slots past 4096 of a pool of more than 2^31 elements are the slots that they are")
{
  // Slots of 2 MiB: of the pool's 17 GB only the pages in use are there.
  constexpr std::int64_t slots = 8192;
  constexpr std::int64_t stride = 1 << 19;
  static_assert(slots * stride > std::int64_t{1} << 31);
  for (const std::string& recipe : host_recipes(EngineBatch::pooled(small_session_problem()))) {
    CAPTURE(recipe);
    EngineBatch batch(small_session_problem(), 200, 3, {{70, 0}, {0, 1}, {65, 2}});
    EngineBatch expected(small_session_problem(), 200, 3, {{70, 0}, {0, 1}, {65, 2}});
    PrefillSession session = session_of(batch.problem(), {200, 3}, recipe);
    session.run(expected.tensors(), expected.tokens(), 3);

    const SparseMemory memory(slots * stride * static_cast<std::int64_t>(sizeof(float)));
    const std::int32_t used[] = {4097, 8191, 5000};
    const TensorView& initial = batch.externals()["initial_state"].view();
    const TensorView& final = expected.externals()["final_state"].view();
    const std::int64_t elements = initial.strides[0];
    for (std::int64_t n = 0; n < 3; ++n) {
      batch.externals()["state_indices"].as<std::int32_t>()[n] = used[n];
      std::copy_n(initial.as<float>() + n * elements, elements,
                  static_cast<float*>(memory.data()) + used[n] * stride);
    }
    PrefillTensors tensors = batch.tensors();
    tensors.initial_state.data = memory.data();
    tensors.initial_state.extents[0] = slots;
    tensors.initial_state.strides[0] = stride;
    tensors.final_state = tensors.initial_state;
    session.run(tensors, batch.tokens(), 3);
    CHECK(std::memcmp(batch.externals()["o"].as<float>(), expected.externals()["o"].as<float>(),
                      static_cast<std::size_t>(batch.externals().owned_o().bytes())) == 0);
    for (std::int64_t n = 0; n < 3; ++n) {
      CHECK(std::memcmp(static_cast<float*>(memory.data()) + used[n] * stride,
                        final.as<float>() + n * elements,
                        static_cast<std::size_t>(elements) * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("sequences of very unequal lengths are computed to their ends")
{
  Problem p = small_session_problem();
  p.qk_dim = p.v_dim = 4;
  for (const std::vector<EngineSequence>& sequences :
       {std::vector<EngineSequence>{{2867, 0}, {409, 1}}, {{999, 1}, {6553, 0}}}) {
    for (const std::string& recipe : host_recipes(EngineBatch::pooled(p))) {
      CAPTURE(recipe);
      EngineBatch batch(p, 8000, 2, sequences);
      PrefillSession session = session_of(batch.problem(), {8000, 2}, recipe);
      session.run(batch.tensors(), batch.tokens(), batch.count());
      batch.check(session_bound);
    }
  }
}
