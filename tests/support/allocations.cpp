#include "support/allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

// Replaces the program's operator new by one that counts. In a file of its own: where a compiler
// sees through a replaced operator, it takes malloc and delete for a mismatch.

namespace {

std::atomic<long> count{0};

}  // namespace

namespace gdnflow::test {

long allocations() noexcept { return count.load(std::memory_order_relaxed); }

}  // namespace gdnflow::test

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(std::size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
