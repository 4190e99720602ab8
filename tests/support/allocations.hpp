#pragma once

namespace gdnflow::test {

/// How often this program has called operator new so far, on any thread.
long allocations() noexcept;

}  // namespace gdnflow::test
