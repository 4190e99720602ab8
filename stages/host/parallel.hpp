#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace gdnflow::stages::host {

/// Calls `body(worker, i)` once for every i in [0, count), on all threads of OpenMP (one where the
/// library was built without it). Each thread makes its own worker, so scratch lives there and is
/// allocated once a thread. Items are handed out one by one, in order: lengths differ, so equal
/// shares would not be equal work. Which thread runs an item must not change its result. The first
/// exception stops the loop and is rethrown here, since none may leave an OpenMP region.
template <class MakeWorker, class Body>
void parallel_for(std::int64_t count, MakeWorker make_worker, Body body) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
#if defined(_OPENMP)
#pragma omp parallel if (count > 1)
#endif
  {
    try {
      auto worker = make_worker();
      for (std::int64_t i = next++; i < count; i = next++) body(worker, i);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      if (failure == nullptr) failure = std::current_exception();
      next = count;
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

/// The same over [0, tokens) in runs of `run_tokens`, for work without scratch that is the same for
/// every token: `body(first, count)`.
template <class Body>
void parallel_for_tokens(std::int64_t tokens, Body body) {
  constexpr std::int64_t run_tokens = 64;
  struct Nothing {};
  parallel_for((tokens + run_tokens - 1) / run_tokens, [] { return Nothing{}; },
               [&](Nothing&, std::int64_t run) {
                 const std::int64_t first = run * run_tokens;
                 body(first, tokens - first < run_tokens ? tokens - first : run_tokens);
               });
}

}  // namespace gdnflow::stages::host
