#pragma once

#include <gdnflow/executor.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/recipes.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gdnflow {

/// What distinguishes one executable graph from another.
struct GraphKey {
  std::string recipe;  ///< empty: "auto"
  Problem problem;
  Capacity capacity;
  VariantOverrides overrides{};
  Device device{DeviceType::cuda, 0};
  bool behind_callers = false;  ///< as in ExecutorOptions

  friend bool operator==(const GraphKey&, const GraphKey&) = default;
};

struct GraphCacheStats {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;  ///< each one planned, built and instantiated an executor
  std::uint64_t evictions = 0;
  std::size_t entries = 0;
  std::int64_t arena_bytes = 0;  ///< of the entries' arenas together
};

/// Least-recently-used cache of built executors. Not thread-safe: one a thread or a stream.
class GDNFLOW_API GraphCache {
 public:
  /// Errors: invalid_argument for a limit of 0.
  explicit GraphCache(std::size_t most_entries);
  ~GraphCache();
  GraphCache(GraphCache&&) noexcept;
  GraphCache& operator=(GraphCache&&) noexcept;

  /// The executor for the key, bound to `bindings`, which name every external tensor: a hit rebinds
  /// (only what changed), a miss makes pipeline, plan and executor (graph on a CUDA device, host on
  /// the host), evicting the entry used longest ago. Both may stand inside a capture of the
  /// caller's. The pointer keeps an executor alive after its eviction. Errors: those of
  /// make_pipeline, bind and build; the cache is unchanged when it throws on a miss.
  std::shared_ptr<Executor> get(const GraphKey& key, const Bindings& bindings);

  GraphCacheStats stats() const noexcept;
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gdnflow
