#include <gdnflow/stages.hpp>

#include "support/stage_driver.hpp"
#include "support/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include <doctest/doctest.h>

// The plan of segments on the host: borders, starts and bounds by the rules of gdnflow/stages.hpp.
// A host has few threads, so its `multiprocessors` are set to what a GPU would have.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

struct Row {
  std::int32_t sequence, begin, end, number;
};

/// log2 of the bound over chunks [first, last) of a head, in fp64.
double log2_bound(const StageDriver& driver, std::int32_t head, std::int32_t first,
                  std::int32_t last) {
  const Problem& p = driver.problem();
  double sum = 0.0;
  for (std::int32_t c = first; c < last; ++c) {
    const std::int32_t* row = driver["chunk_table"].as<std::int32_t>() + 4 * c;
    for (std::int64_t t = row[1]; t < row[1] + row[2]; ++t) {
      const float* k = driver["k"].as<float>() + (t * p.qk_heads + p.qk_head_of(head)) * p.qk_dim;
      double square = 0.0;
      for (std::int32_t d = 0; d < p.qk_dim; ++d) square += double{k[d]} * k[d];
      const double beta = driver["beta"].as<float>()[t * p.v_heads + head];
      // As chunk_cumsum cuts it off: exp is zero in fp32 below.
      const double g = std::max(-104.0F, driver["g"].as<float>()[t * p.v_heads + head]);
      sum += g * std::numbers::log2e + std::log2(std::max(1.0, std::abs(1.0 - beta * square)));
    }
  }
  return sum;
}

StageDriver planned(const std::vector<std::int64_t>& lengths, Distribution distribution,
                    std::int32_t multiprocessors, float key_scale = 1.0F) {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  p.activation = DType::f32;
  const Inputs in = Inputs::draw(p, lengths, distribution, 3);
  StageDriver driver(p, {in.cu_seqlens.back(), std::ssize(lengths)});
  driver.set_multiprocessors(multiprocessors);
  HostTensor k = in.k;
  for (std::int64_t i = 0; i < k.view().elements(); ++i) k.as<float>()[i] *= key_scale;
  driver.add("k", std::move(k));
  driver.add("g", in.g);
  driver.add("beta", in.beta);
  driver.add_index("cu_seqlens", in.cu_seqlens);
  for (const char* stage : {"chunk_index", "chunk_cumsum", "segments"}) driver.run(stage);
  return driver;
}

void check_plan(const StageDriver& driver, std::int32_t useful) {
  const Problem& p = driver.problem();
  const auto* rows = driver["segment_slots"].as<Row>();
  const auto* starts = driver["segment_starts"].as<std::int32_t>();
  const auto* bounds = driver["segment_bounds"].as<float>();
  const auto* offsets = driver["chunk_offsets"].as<std::int32_t>();
  const std::int64_t sequences = driver.capacity().max_sequences;
  std::int64_t slot = 0;
  std::int64_t running = 0;
  std::int64_t used = 0;
  for (std::int32_t n = 0; n < sequences; ++n) {
    CAPTURE(n);
    const std::int32_t first = offsets[n];
    running += offsets[n + 1] > first ? 1 : 0;
    std::int32_t reached = first;
    for (std::int32_t number = 0; rows[slot].sequence == n; ++number, ++slot) {
      CAPTURE(number);
      const Row& row = rows[slot];
      CHECK(row.number == number);
      CHECK(row.begin == reached);
      CHECK((row.begin - first) % segment_grain == 0);
      CHECK((row.end > row.begin || offsets[n + 1] == first));
      used += row.end > row.begin ? 1 : 0;
      reached = row.end;
      for (std::int32_t head = 0; head < p.v_heads; ++head) {
        const std::int32_t start = starts[slot * p.v_heads + head];
        const float bound = bounds[slot * p.v_heads + head];
        if (number == 0) {
          CHECK(start == row.begin);
          CHECK(bound == -std::numeric_limits<float>::infinity());
          continue;
        }
        const std::int32_t nearest = start < 0 ? std::max(first, row.begin - 64) : start;
        if (start >= 0) {
          CHECK((start - first) % segment_grain == 0);
          CHECK(start < row.begin);
          const double expected = log2_bound(driver, head, start, row.begin);
          CHECK(expected <= -28.0 + 1e-3);
          if (start > first) CHECK(bound == doctest::Approx(expected).epsilon(1e-4));
        }
        // Nothing nearer would have done.
        for (std::int32_t c = row.begin - 1; c > nearest; --c) {
          if ((c - first) % segment_grain == 0) {
            CHECK(log2_bound(driver, head, c, row.begin) > -28.0 - 1e-3);
          }
        }
      }
    }
    CHECK(reached == offsets[n + 1]);
  }
  CHECK(used <= std::max<std::int64_t>(running, useful));
  CHECK(rows[slot].sequence == -1);
}

}  // namespace

TEST_CASE("segments cover every sequence, start where the past has faded, and no nearer")
{
  for (const Distribution distribution :
       {Distribution::random_decay, Distribution::no_decay, Distribution::quarter_frozen,
        Distribution::strong, Distribution::hard_reset}) {
    for (const std::vector<std::int64_t>& lengths :
         {std::vector<std::int64_t>{2048}, {1, 0, 1500, 64}, {700, 700, 700}, {0, 0}}) {
      CAPTURE(to_string(distribution));
      CAPTURE(lengths);
      check_plan(planned(lengths, distribution, 64), 8);
    }
  }
}

TEST_CASE("keys longer than one keep segments apart, or whole")
{ check_plan(planned({2048}, Distribution::random_decay, 64, 1.7F), 8); }

TEST_CASE("heads that fill the machine leave sequences whole")
{
  const StageDriver driver = planned({2048, 5}, Distribution::random_decay, 15);
  const auto* rows = driver["segment_slots"].as<Row>();
  CHECK(rows[0].end == 32);
  CHECK(rows[1].sequence == 1);
  CHECK(rows[2].sequence == -1);
}
