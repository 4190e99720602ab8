#include "support/stage_driver.hpp"

#include <algorithm>
#include <array>
#include <random>
#include <vector>

using namespace gdnflow;
using test::StageDriver;

namespace {

using Row = std::array<std::int32_t, 4>;

struct Expected {
  std::vector<Row> rows;
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> checkpoint_offsets{0};
  std::array<std::int32_t, 4> counts{};
};

/// Token by token: a chunk ends where its sequence does or where the position passes a border.
Expected brute_force(const Problem& p, std::int64_t capacity,
                     const std::vector<std::int64_t>& cu_seqlens,
                     const std::vector<std::int64_t>& prefixes) {
  Expected e;
  std::int64_t border = std::clamp<std::int64_t>(cu_seqlens[0], 0, capacity);
  std::int32_t checkpoints = 0;
  for (std::size_t n = 0; n + 1 < cu_seqlens.size(); ++n) {
    const std::int64_t prefix = prefixes.empty() ? 0 : std::max<std::int64_t>(prefixes[n], 0);
    const std::int64_t begin = border;
    while (border < std::min(cu_seqlens[n + 1], capacity)) {
      const std::int64_t position = prefix + border - begin;
      if (border == begin || position % 64 == 0) {
        e.rows.push_back({static_cast<std::int32_t>(n), static_cast<std::int32_t>(border), 0,
                          static_cast<std::int32_t>(position / 64)});
      }
      ++e.rows.back()[2];
      ++border;
      if (p.checkpoint_interval != 0 && (position + 1) % p.checkpoint_interval == 0) ++checkpoints;
    }
    if (border > begin) ++e.counts[3];
    e.counts[1] += static_cast<std::int32_t>(border - begin);
    e.offsets.push_back(static_cast<std::int32_t>(e.rows.size()));
    e.checkpoint_offsets.push_back(checkpoints);
  }
  e.counts[0] = static_cast<std::int32_t>(e.rows.size());
  e.counts[2] = checkpoints;
  return e;
}

std::vector<std::int32_t> values_of(const TensorView& view) {
  return {view.as<const std::int32_t>(), view.as<const std::int32_t>() + view.elements()};
}

void check(Problem p, std::int64_t capacity, const std::vector<std::int64_t>& cu_seqlens,
           const std::vector<std::int64_t>& prefixes = {}) {
  CAPTURE(cu_seqlens);
  CAPTURE(prefixes);
  CAPTURE(capacity);
  p.prefix_lens = !prefixes.empty();
  StageDriver driver(p, {capacity, static_cast<std::int64_t>(cu_seqlens.size()) - 1});
  if (p.cu_seqlens) driver.add_index("cu_seqlens", cu_seqlens);
  if (p.prefix_lens) driver.add_index("prefix_lens", prefixes);
  driver.run("chunk_index");

  Expected expected = brute_force(p, capacity, cu_seqlens, prefixes);
  const TensorView& table = driver["chunk_table"];
  REQUIRE(static_cast<std::int64_t>(expected.rows.size()) <= table.extents[0]);
  expected.rows.resize(static_cast<std::size_t>(table.extents[0]));  // the rest is zero
  std::vector<std::int32_t> flat;
  for (const Row& row : expected.rows) flat.insert(flat.end(), row.begin(), row.end());
  CHECK(values_of(table) == flat);
  CHECK(values_of(driver["chunk_offsets"]) == expected.offsets);
  CHECK(values_of(driver["checkpoint_offsets"]) == expected.checkpoint_offsets);
  CHECK(values_of(driver["chunk_counts"]) ==
        std::vector<std::int32_t>(expected.counts.begin(), expected.counts.end()));
}

}  // namespace

TEST_CASE("chunk_index cuts packed sequences, empty ones included")
{
  const Problem p;
  check(p, 0, {0, 0});
  check(p, 1, {0, 1});
  check(p, 64, {0, 64});
  check(p, 65, {0, 65});
  check(p, 4096, {0, 101, 303, 1205, 3007, 4096});
  check(p, 200, {0, 0, 100, 200});
  check(p, 200, {0, 100, 100, 200});
  check(p, 200, {0, 100, 200, 200});
  check(p, 200, {0, 0, 0, 0});
  check(p, 500, {20, 90, 300});
}

TEST_CASE("chunk_index takes lengths of either integer type")
{
  Problem p;
  p.index = DType::i64;
  check(p, 300, {0, 15, 100, 300});
}

TEST_CASE("chunk_index makes falling, negative and overlong lengths safe")
{
  const Problem p;
  check(p, 300, {0, 200, 100, 300});
  check(p, 300, {0, 400, 500});
  check(p, 300, {-5, 100, -7, 120});
  check(p, 300, {310, 100, 300});
  Problem wide = p;
  wide.index = DType::i64;
  check(wide, 300, {-(std::int64_t{1} << 40), 64, std::int64_t{1} << 40, 12});
}

TEST_CASE("chunk_index starts chunks at absolute multiples of 64 behind a prefix")
{
  Problem p;
  p.checkpoint_interval = 128;
  check(p, 300, {0, 100, 300}, {64, 128});
  check(p, 300, {0, 100, 300}, {1, 63});
  check(p, 300, {0, 20, 300}, {10, 100});
  check(p, 300, {0, 20, 300}, {44, 108});
  check(p, 300, {0, 0, 300}, {37, -4});
}

TEST_CASE("chunk_index keeps chunk numbers within i32 behind an absurd prefix")
{
  Problem p;
  p.prefix_lens = true;
  p.index = DType::i64;
  StageDriver driver(p, {100, 1});
  driver.add_index("cu_seqlens", {0, 100});
  driver.add_index("prefix_lens", {std::numeric_limits<std::int64_t>::max()});
  driver.run("chunk_index");
  CHECK(values_of(driver["chunk_counts"])[0] == 2);
  CHECK(values_of(driver["chunk_table"])[3] == 1 << 30);
}

TEST_CASE("chunk_index shares the tokens equally where there are no lengths")
{
  Problem p;
  p.cu_seqlens = false;
  check(p, 300, {0, 100, 200, 300});
  check(p, 0, {0, 0, 0});
}

TEST_CASE("chunk_index equals brute force on random lengths")
{
  std::mt19937 random(7);
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
  };
  for (int round = 0; round < 300; ++round) {
    Problem p;
    p.checkpoint_interval = static_cast<std::int32_t>(64 * below(4));
    const std::int64_t sequences = 1 + below(6);
    const std::int64_t capacity = below(700);
    std::vector<std::int64_t> cu_seqlens;
    for (std::int64_t n = 0; n <= sequences; ++n) cu_seqlens.push_back(below(capacity + 50) - 10);
    if (round % 4 != 0) std::sort(cu_seqlens.begin(), cu_seqlens.end());
    std::vector<std::int64_t> prefixes;
    if (round % 2 == 0) {
      for (std::int64_t n = 0; n < sequences; ++n) prefixes.push_back(below(400));
    }
    check(p, capacity, cu_seqlens, prefixes);
  }
}
