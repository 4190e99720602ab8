#include <gdnflow/cache.hpp>
#include <gdnflow/error.hpp>

#include "edge_text.hpp"

#include <algorithm>
#include <list>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

struct KeyHash {
  std::size_t operator()(const GraphKey& key) const noexcept {
    // The rest rarely tells keys apart; equality looks at it.
    std::size_t seed = hash_value(key.problem);
    seed = seed * 31 + hash_value(key.capacity);
    return seed * 31 + std::hash<std::string>{}(key.recipe);
  }
};

/// What an executor was bound to before must not serve a call that does not name it.
void check_complete(const Executor& executor, const Bindings& bindings) {
  const Pipeline& pipeline = executor.plan().pipeline();
  for (const Edge& edge : pipeline.edges()) {
    const auto names = [&](const auto& binding) { return binding.first == edge.name; };
    if (edge.kind == EdgeKind::intermediate ||
        std::any_of(bindings.begin(), bindings.end(), names)) {
      continue;
    }
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: {}: expected {} {}, got none", pipeline.id(), edge.name,
                            type_text(edge, pipeline), to_string(pipeline.device().device)));
  }
}

std::shared_ptr<Executor> make(const GraphKey& key, const Bindings& bindings) {
  Plan plan(
      make_pipeline(key.recipe, key.problem, key.capacity, device_info(key.device), key.overrides));
  ExecutorOptions options;
  options.behind_callers = key.behind_callers;
  std::shared_ptr<Executor> executor = key.device.type == DeviceType::host
                                           ? make_host_executor(std::move(plan), options)
                                           : make_graph_executor(std::move(plan), options);
  executor->bind(bindings);
  check_complete(*executor, bindings);
  executor->build();
  return executor;
}

}  // namespace

struct GraphCache::Impl {
  struct Entry {
    GraphKey key;
    std::shared_ptr<Executor> executor;
  };
  using Entries = std::list<Entry>;

  std::size_t most_entries = 0;
  Entries entries;  ///< the one used last in front
  std::unordered_map<GraphKey, Entries::iterator, KeyHash> index;
  GraphCacheStats stats;

  void drop_last() {
    stats.arena_bytes -= entries.back().executor->plan().arena_bytes();
    index.erase(entries.back().key);
    entries.pop_back();
  }
};

GraphCache::GraphCache(std::size_t most_entries) : impl_(std::make_unique<Impl>()) {
  if (most_entries == 0) {
    throw Error(ErrorCode::invalid_argument, "graph cache: expected at least 1 entry, got 0");
  }
  impl_->most_entries = most_entries;
}

GraphCache::~GraphCache() = default;
GraphCache::GraphCache(GraphCache&&) noexcept = default;
GraphCache& GraphCache::operator=(GraphCache&&) noexcept = default;

std::shared_ptr<Executor> GraphCache::get(const GraphKey& key, const Bindings& bindings) {
  Impl& cache = *impl_;
  if (const auto found = cache.index.find(key); found != cache.index.end()) {
    check_complete(*found->second->executor, bindings);
    found->second->executor->bind(bindings);
    cache.entries.splice(cache.entries.begin(), cache.entries, found->second);
    ++cache.stats.hits;
    return found->second->executor;
  }
  // The list's node is made aside, so that nothing has changed where a step before the last throws.
  Impl::Entries fresh;
  fresh.push_back({key, make(key, bindings)});
  cache.index.emplace(key, fresh.begin());
  cache.entries.splice(cache.entries.begin(), fresh);
  ++cache.stats.misses;
  cache.stats.arena_bytes += cache.entries.front().executor->plan().arena_bytes();
  if (cache.entries.size() > cache.most_entries) {
    cache.drop_last();
    ++cache.stats.evictions;
  }
  return cache.entries.front().executor;
}

GraphCacheStats GraphCache::stats() const noexcept {
  GraphCacheStats stats = impl_->stats;
  stats.entries = impl_->entries.size();
  return stats;
}

void GraphCache::clear() {
  while (!impl_->entries.empty()) impl_->drop_last();
}

}  // namespace gdnflow
