#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

namespace gdnflow {

struct StageCall;

/// Parameters of a kernel or an enqueue function, by value. Aligned for CUtensorMap.
struct ParamBlob {
  static constexpr std::size_t capacity = 1920;

  alignas(128) std::array<std::byte, capacity> bytes;
  std::uint32_t size = 0;

  template <class Params>
  static ParamBlob of(const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params>);
    static_assert(sizeof(Params) <= capacity && alignof(Params) <= 128);
    ParamBlob blob;
    std::memcpy(blob.bytes.data(), &params, sizeof(Params));
    blob.size = sizeof(Params);
    return blob;
  }
};

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;

  friend bool operator==(const Dim3&, const Dim3&) = default;
};

/// A kernel that takes one parameter struct by value.
struct KernelLaunch {
  const void* function = nullptr;  ///< the host-side symbol of the `__global__` function
  Dim3 grid{};
  Dim3 block{};
  Dim3 cluster{};                  ///< 1,1,1: no cluster
  std::uint32_t shared_bytes = 0;  ///< dynamic; executors raise the function's limit when building
  bool programmatic = false;  ///< the kernel waits (griddepcontrol.wait) before its first global
                              ///< access, so on sm_90 and later executors may start it while its
                              ///< predecessor drains
  ParamBlob params;
};

/// Sets bytes of device memory.
struct Memset {
  void* destination = nullptr;
  std::uint8_t value = 0;
  std::size_t bytes = 0;
};

/// Work of a library that only exposes a stream (CUB). It is captured into the graph and its nodes
/// are never edited, so it may touch intermediates and scratch only, no external tensor.
struct Enqueue {
  void (*function)(const void* params, Stream stream) = nullptr;
  ParamBlob params;
};

/// A host variant: runs to completion on the calling thread (and the threads it starts).
struct HostCall {
  void (*function)(const StageCall& call) = nullptr;
};

/// One unit of work as data. Only executors turn it into work.
struct Step {
  std::string_view name;  ///< a literal, e.g. "kkt_solve"; shown in plans, traces and profiles
  std::variant<KernelLaunch, Memset, Enqueue, HostCall> work;
};

/// Steps of one stage, in order. Cleared and refilled when pointers are rebound, so that its
/// memory is reused.
using StepList = std::vector<Step>;

/// A launch step for `kernel`, a `__global__` function of one trivially copyable struct.
template <class Params>
Step kernel_step(std::string_view name, void (*kernel)(Params), Dim3 grid, Dim3 block,
                 std::uint32_t shared_bytes, const std::remove_const_t<Params>& params) {
  KernelLaunch launch;
  launch.function = reinterpret_cast<const void*>(kernel);
  launch.grid = grid;
  launch.block = block;
  launch.shared_bytes = shared_bytes;
  launch.params = ParamBlob::of(params);
  return Step{name, launch};
}

/// A launch step marked as KernelLaunch::programmatic.
inline Step programmatic(Step step) {
  std::get<KernelLaunch>(step.work).programmatic = true;
  return step;
}

}  // namespace gdnflow
