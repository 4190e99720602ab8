#include <gdnflow/compare.hpp>

#include "support/stage_driver.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

// Where states come from and go to: pools, slots, flags, prefixes and checkpoints.

using namespace gdnflow;
using test::Form;
using test::HostTensor;
using test::Inputs;
using test::StageDriver;

namespace {

Problem small_problem() {
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  p.qk_dim = 8;
  p.v_dim = 16;
  p.activation = DType::f32;
  p.initial_state = true;
  return p;
}

std::int64_t state_elements(const Problem& p) {
  return std::int64_t{p.v_heads} * p.qk_dim * p.v_dim;
}

/// One row of a tensor of states.
TensorView row_of(const TensorView& states, std::int64_t row) {
  TensorView view = states;
  view.data = states.as<float>() + row * states.strides[0];
  view.extents[0] = 1;
  return view;
}

bool same(const TensorView& a, const TensorView& b) {
  const Comparison c = compare(a, b);
  return c.max_abs == 0.0 && c.nonfinite_mismatches == 0;
}

bool untouched(const TensorView& states, std::int64_t row) {
  const TensorView view = row_of(states, row);
  return std::all_of(view.as<float>(), view.as<float>() + view.elements(),
                     [](float x) { return std::isnan(x); });
}

/// Final states of a plain run in which sequence n starts from `initial[n]`.
StageDriver plain_run(const Problem& like, const Inputs& in, Form form) {
  Problem p = like;
  p.state_indices = p.output_state_indices = p.has_initial_state = false;
  StageDriver driver = test::make_driver(p, in);
  test::run_form(driver, form);
  return driver;
}

/// The inputs with the states of some sequences zeroed.
Inputs with_zero_states(const Problem& p, Inputs in, const std::vector<std::int64_t>& sequences) {
  for (const std::int64_t n : sequences) {
    std::fill_n(in.initial_state.as<float>() + n * state_elements(p), state_elements(p), 0.0F);
  }
  return in;
}

/// A pool of `slots` states, NaN but where sequence n's initial state stands in slot `of[n]`. Its
/// slots are `gap` elements apart from one another's ends.
struct Pool {
  HostTensor memory;
  TensorView view;

  Pool(const Problem& p, const Inputs& in, std::int64_t slots, const std::vector<std::int64_t>& of,
       std::int64_t gap = 0) {
    const std::int64_t stride = state_elements(p) + gap;
    memory = HostTensor(DType::f32, {slots * stride});
    std::fill_n(memory.as<float>(), slots * stride, std::nanf(""));
    view = in.initial_state;
    view.data = memory.as<float>();
    view.extents[0] = slots;
    view.strides[0] = stride;
    for (std::size_t n = 0; n < of.size(); ++n) {
      if (of[n] < 0 || of[n] >= slots) continue;
      std::copy_n(in.initial_state.as<float>() + static_cast<std::int64_t>(n) * state_elements(p),
                  state_elements(p), memory.as<float>() + of[n] * stride);
    }
  }
};

}  // namespace

TEST_CASE("a pool is updated in place, its slots given per sequence and padded")
{
  for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
    Problem p = small_problem();
    p.state_layout = layout;
    p.state_indices = true;
    // Sequence 1 is empty; slot -1 and slots past the pool's end read zero and are not written.
    const Inputs in = Inputs::draw(p, {70, 0, 3, 65, 64}, Distribution::random_decay, 4);
    const std::vector<std::int64_t> slots{5, 2, -1, 0, 7};
    for (const Form form : test::forms) {
      CAPTURE(test::to_string(form));
      Pool pool(p, in, 7, slots, 11);
      StageDriver driver = test::make_driver(p, in);
      driver.add_view("initial_state", pool.view);
      driver.add_view("final_state", pool.view);
      driver.add_i32("state_indices", slots);
      test::run_form(driver, form);

      const StageDriver plain = plain_run(p, with_zero_states(p, in, {2, 4}), form);
      CHECK(same(driver["o"], plain["o"]));
      for (const std::int64_t n : {0, 1, 3}) {
        CHECK(same(row_of(pool.view, slots[static_cast<std::size_t>(n)]),
                   row_of(plain["final_state"], n)));
      }
      // An empty sequence's final state is its initial state.
      CHECK(same(row_of(pool.view, 2), row_of(in.initial_state, 1)));
      for (const std::int64_t slot : {1, 3, 4, 6}) CHECK(untouched(pool.view, slot));
      const float* memory = pool.memory.as<float>();
      for (std::int64_t slot = 0; slot < 7; ++slot) {
        CHECK(std::isnan(memory[slot * pool.view.strides[0] + state_elements(p)]));  // the gap
      }
    }
  }
}

TEST_CASE("slots read and slots written may differ")
{
  Problem p = small_problem();
  p.state_indices = true;
  p.output_state_indices = true;
  const Inputs in = Inputs::draw(p, {70, 0, 3, 65}, Distribution::random_decay, 5);
  const std::vector<std::int64_t> read{3, 1, 0, -1};
  const std::vector<std::int64_t> write{4, 5, -1, 2};
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    Pool pool(p, in, 6, read);
    StageDriver driver = test::make_driver(p, in);
    driver.add_view("initial_state", pool.view);
    driver.add_view("final_state", pool.view);
    driver.add_i32("state_indices", read);
    driver.add_i32("output_state_indices", write);
    test::run_form(driver, form);

    const StageDriver plain = plain_run(p, with_zero_states(p, in, {3}), form);
    CHECK(same(driver["o"], plain["o"]));
    CHECK(same(row_of(pool.view, 4), row_of(plain["final_state"], 0)));
    CHECK(same(row_of(pool.view, 5), row_of(in.initial_state, 1)));  // the empty sequence, copied
    CHECK(same(row_of(pool.view, 2), row_of(plain["final_state"], 3)));
    // What was read stays as it was.
    CHECK(same(row_of(pool.view, 3), row_of(in.initial_state, 0)));
    CHECK(same(row_of(pool.view, 0), row_of(in.initial_state, 2)));
  }
}

TEST_CASE("output slots serve without an initial state")
{
  Problem p = small_problem();
  p.initial_state = false;
  p.output_state_indices = true;
  const Inputs in = Inputs::draw(p, {70, 0}, Distribution::random_decay, 6);
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver driver = test::make_driver(p, in);
    driver.add_poisoned_states("final_state", 4);
    driver.add_i32("output_state_indices", {2, 0});
    test::run_form(driver, form);
    const StageDriver plain = plain_run(p, in, form);
    CHECK(same(row_of(driver["final_state"], 2), row_of(plain["final_state"], 0)));
    CHECK(same(row_of(driver["final_state"], 0), row_of(plain["final_state"], 1)));
    CHECK(untouched(driver["final_state"], 1));
    CHECK(untouched(driver["final_state"], 3));
  }
}

TEST_CASE("a cleared flag starts from zero whatever the slot holds")
{
  Problem p = small_problem();
  p.has_initial_state = true;
  Inputs in = Inputs::draw(p, {70, 0, 65}, Distribution::random_decay, 7);
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    const StageDriver plain = plain_run(p, with_zero_states(p, in, {1, 2}), form);
    Inputs dirty = in;
    std::fill_n(dirty.initial_state.as<float>() + state_elements(p), 2 * state_elements(p),
                std::nanf(""));
    StageDriver driver = test::make_driver(p, dirty);
    driver.add_flags("has_initial_state", {1, 0, 0});
    test::run_form(driver, form);
    CHECK(same(driver["o"], plain["o"]));
    CHECK(same(driver["final_state"], plain["final_state"]));
  }
}

TEST_CASE("states in bf16 and fp16 pass through an empty sequence unchanged")
{
  for (const DType type : {DType::bf16, DType::f16}) {
    Problem p = small_problem();
    p.state = type;
    const Inputs in = Inputs::draw(p, {0}, Distribution::random_decay, 8);
    for (const Form form : test::forms) {
      StageDriver driver = test::make_driver(p, in);
      test::run_form(driver, form);
      CHECK(same(driver["final_state"], in.initial_state));
    }
  }
}

TEST_CASE("a prefix moves the chunks' borders and changes the result by rounding only")
{
  Problem p = small_problem();
  const Inputs in = Inputs::draw(p, {200, 0, 30, 65}, Distribution::random_decay, 9);
  const OracleResult expected = oracle_recurrent(p, in.views());
  p.prefix_lens = true;
  for (const Form form : test::forms) {
    CAPTURE(test::to_string(form));
    StageDriver driver = test::make_driver(p, in);
    driver.add_index("prefix_lens", {63, 5, 40, 1000});
    test::run_form(driver, form);
    CHECK(compare(driver["o"], expected.o).within(1e-5));
    CHECK(compare(driver["final_state"], expected.final_state).within(1e-5));
  }
}

TEST_CASE("a checkpoint is the state of a run cut at that place")
{
  struct Case {
    std::int32_t interval;
    std::vector<std::int64_t> lengths;
    std::vector<std::int64_t> prefixes;
  };
  const std::vector<Case> cases{
      {64, {200, 0, 64, 63}, {}},          {128, {300, 127, 128}, {}},
      {64, {200, 30, 1}, {10, 34, 63}},    // a first chunk that is short, and ends at a border
      {128, {300, 60, 100}, {65, 70, 1}},  // and one that ends before the border
      {192, {500, 10, 129}, {191, 0, 63}},
  };
  for (const Case& c : cases) {
    Problem p = small_problem();
    p.checkpoint_interval = c.interval;
    p.prefix_lens = !c.prefixes.empty();
    CAPTURE(c.interval);
    CAPTURE(c.lengths);
    CAPTURE(c.prefixes);
    const Inputs in = Inputs::draw(p, c.lengths, Distribution::random_decay, 10);

    // Where the checkpoints must be: (sequence, tokens before the cut), in order.
    std::vector<std::pair<std::size_t, std::int64_t>> cuts;
    for (std::size_t n = 0; n < c.lengths.size(); ++n) {
      const std::int64_t prefix = c.prefixes.empty() ? 0 : c.prefixes[n];
      for (std::int64_t t = 1; t <= c.lengths[n]; ++t) {
        if ((prefix + t) % c.interval == 0) cuts.emplace_back(n, t);
      }
    }
    REQUIRE(!cuts.empty());
    const auto rows = static_cast<std::int64_t>(cuts.size());

    for (const Form form : test::forms) {
      CAPTURE(test::to_string(form));
      const auto run = [&](std::int64_t pool_rows, const std::vector<std::int64_t>& slots) {
        StageDriver driver = test::make_driver(p, in);
        if (p.prefix_lens) driver.add_index("prefix_lens", c.prefixes);
        driver.add_poisoned_states("checkpoints", pool_rows);
        if (!slots.empty()) driver.add_i32("checkpoint_state_indices", slots);
        test::run_form(driver, form);
        return driver;
      };
      const StageDriver compact = run(rows + 1, {});
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto [n, tokens] = cuts[static_cast<std::size_t>(i)];
        CAPTURE(n);
        CAPTURE(tokens);
        // The same sequences, sequence n ending at the cut.
        StageDriver cut = test::make_driver(p, in);
        if (p.prefix_lens) cut.add_index("prefix_lens", c.prefixes);
        std::vector<std::int64_t> begins(in.cu_seqlens.begin(),
                                         in.cu_seqlens.begin() + static_cast<std::int64_t>(n) + 1);
        begins.push_back(begins.back() + tokens);
        begins.resize(in.cu_seqlens.size(), begins.back());
        cut.add_index("cu_seqlens", begins);
        test::run_form(cut, form);
        CHECK(same(row_of(compact["checkpoints"], i),
                   row_of(cut["final_state"], static_cast<std::int64_t>(n))));
      }
      CHECK(untouched(compact["checkpoints"], rows));

      // No rows at all: an empty list of slots, which may come with no memory, is not a missing
      // one.
      StageDriver none = test::make_driver(p, in);
      if (p.prefix_lens) none.add_index("prefix_lens", c.prefixes);
      none.add_poisoned_states("checkpoints", rows);
      none.add_view("checkpoint_state_indices", TensorView::dense(nullptr, DType::i32, {0}));
      test::run_form(none, form);
      CHECK(untouched(none["checkpoints"], 0));

      // Rows past the buffer's end are not written.
      const StageDriver short_one = run(rows - 1 > 0 ? rows - 1 : 1, {});
      CHECK(same(row_of(short_one["checkpoints"], 0), row_of(compact["checkpoints"], 0)));

      // To pool rows in reverse, the first skipped, and one index past the pool.
      std::vector<std::int64_t> slots;
      for (std::int64_t i = 0; i < rows; ++i) slots.push_back(rows - i);
      slots.front() = -1;
      if (rows > 2) slots[1] = rows + 9;
      const StageDriver pooled = run(rows + 1, slots);
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t slot = slots[static_cast<std::size_t>(i)];
        if (slot < 0 || slot > rows) continue;
        CHECK(same(row_of(pooled["checkpoints"], slot), row_of(compact["checkpoints"], i)));
      }
      CHECK(untouched(pooled["checkpoints"], 0));
      CHECK(untouched(pooled["checkpoints"], rows));

      // Fewer indices than checkpoints: those without one are skipped.
      slots.resize(1);
      slots[0] = 0;
      const StageDriver few = run(rows + 1, slots);
      CHECK(same(row_of(few["checkpoints"], 0), row_of(compact["checkpoints"], 0)));
      CHECK(untouched(few["checkpoints"], 1));
    }
  }
}
