#include <gdnflow/cache.hpp>
#include <gdnflow/compare.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/oracle.hpp>

#include "support/expect_error.hpp"
#include "support/externals.hpp"

#include <memory>
#include <utility>

#include <doctest/doctest.h>

// On the host; tests/gpu does the same with graphs.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

Problem small_problem() {
  Problem p;
  p.qk_heads = 1;
  p.v_heads = 2;
  p.qk_dim = 16;
  p.v_dim = 16;
  p.activation = DType::f32;
  return p;
}

GraphKey key_of(const Capacity& capacity) {
  return {"residual", small_problem(), capacity, {}, {}};
}

Externals tensors(const Capacity& capacity, std::uint64_t seed = 1) {
  return {small_problem(), capacity, {capacity.max_tokens}, Distribution::random_decay, seed};
}

void check(const Externals& x) {
  const OracleResult expected = oracle_recurrent(x.problem(), x.oracle_inputs());
  CHECK(compare(x.tensors().at("o"), expected.o).within(1e-5));
}

}  // namespace

TEST_CASE("a hit gives the same executor, bound to what is asked for now")
{
  GraphCache cache(4);
  const Capacity capacity{100, 1};
  Externals x = tensors(capacity, 1);
  Externals y = tensors(capacity, 2);
  const auto first = cache.get(key_of(capacity), x.bindings());
  first->run();
  const auto second = cache.get(key_of(capacity), y.bindings());
  second->run();
  CHECK(first == second);
  CHECK(first->kind() == "host");
  check(x);
  check(y);
  const GraphCacheStats stats = cache.stats();
  CHECK(stats.hits == 1);
  CHECK(stats.misses == 1);
  CHECK(stats.evictions == 0);
  CHECK(stats.entries == 1);
  CHECK(stats.arena_bytes == first->plan().arena_bytes());
}

TEST_CASE("every part of a key tells entries apart")
{
  GraphCache cache(8);
  const Externals x = tensors({100, 1});
  const GraphKey key = key_of({100, 1});
  cache.get(key, x.bindings());
  GraphKey other = key;
  other.recipe = "naive";
  cache.get(other, x.bindings());
  other = key;
  other.problem.scale = 0.5F;
  cache.get(other, x.bindings());
  other = key;
  other.overrides = {{"kkt_solve", {"host", {}}}};
  cache.get(other, x.bindings());
  other = key;
  other.behind_callers = true;
  cache.get(other, x.bindings());
  cache.get(key_of({64, 1}), tensors({64, 1}).bindings());
  CHECK(cache.stats().misses == 6);
  CHECK(cache.stats().hits == 0);
  CHECK(cache.stats().entries == 6);
}

TEST_CASE("the entry used longest ago goes, and lives on with whoever holds it")
{
  GraphCache cache(2);
  Externals a = tensors({64, 1});
  const Externals b = tensors({65, 1});
  const Externals c = tensors({66, 1});
  const auto kept = cache.get(key_of({64, 1}), a.bindings());
  cache.get(key_of({65, 1}), b.bindings());
  cache.get(key_of({64, 1}), a.bindings());
  const auto third = cache.get(key_of({66, 1}), c.bindings());  // 65 goes
  CHECK(cache.stats().evictions == 1);
  CHECK(cache.stats().entries == 2);
  CHECK(cache.stats().arena_bytes == kept->plan().arena_bytes() + third->plan().arena_bytes());
  CHECK(cache.get(key_of({64, 1}), a.bindings()) == kept);
  cache.get(key_of({65, 1}), b.bindings());  // 66 goes
  cache.get(key_of({66, 1}), c.bindings());  // 64 goes
  CHECK(cache.stats().hits == 2);
  CHECK(cache.stats().misses == 5);
  CHECK(cache.stats().evictions == 3);
  kept->run();
  check(a);
  cache.clear();
  CHECK(cache.stats().entries == 0);
  CHECK(cache.stats().arena_bytes == 0);
  CHECK(cache.stats().misses == 5);
}

TEST_CASE("a miss that fails leaves the cache as it was")
{
  GraphCache cache(1);
  const Externals x = tensors({64, 1});
  const auto held = cache.get(key_of({64, 1}), x.bindings());
  GraphKey unknown = key_of({64, 1});
  unknown.recipe = "nothing";
  expect_error(ErrorCode::invalid_argument, {"recipe"}, [&] { cache.get(unknown, x.bindings()); });
  expect_error(ErrorCode::invalid_argument, {"q", "expected f32[65,1,16]", "got f32[64,1,16]"},
               [&] {
                 cache.get(key_of({65, 1}), {{"q", x.tensors().at("q").view()}});
               });
  expect_error(ErrorCode::invalid_argument, {"q: expected f32[65,1,16]", "got none"}, [&] {
    cache.get(key_of({65, 1}), {});
  });
  Bindings some = x.bindings();
  std::erase_if(some, [](const auto& binding) { return binding.first == "k"; });
  expect_error(ErrorCode::invalid_argument, {"k: expected f32[64,1,16]", "got none"}, [&] {
    cache.get(key_of({64, 1}), some);
  });
  CHECK(cache.stats().entries == 1);
  CHECK(cache.stats().misses == 1);
  CHECK(cache.stats().evictions == 0);
  CHECK(cache.get(key_of({64, 1}), x.bindings()) == held);
}

TEST_CASE("a cache holds something, and moves")
{
  expect_error(ErrorCode::invalid_argument, {"at least 1 entry"}, [] { GraphCache{0}; });
  GraphCache cache(1);
  const Externals x = tensors({64, 1});
  const auto executor = cache.get(key_of({64, 1}), x.bindings());
  GraphCache moved = std::move(cache);
  CHECK(moved.get(key_of({64, 1}), x.bindings()) == executor);
}
