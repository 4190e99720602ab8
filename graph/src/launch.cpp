#if GDNFLOW_WITH_CUDA

#include "launch.hpp"

#include <gdnflow/error.hpp>

#include "capture.hpp"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace gdnflow {
namespace {

dim3 to_dim3(const Dim3& d) { return {d.x, d.y, d.z}; }

void launch_kernel(const KernelLaunch& launch, cudaStream_t stream, bool overlaps, auto&& what) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  cudaLaunchConfig_t config{};
  config.gridDim = to_dim3(launch.grid);
  config.blockDim = to_dim3(launch.block);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  if (launch.cluster != Dim3{}) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = launch.cluster.x;
    attribute.val.clusterDim.y = launch.cluster.y;
    attribute.val.clusterDim.z = launch.cluster.z;
  }
  if (launch.programmatic && overlaps) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  // The runtime copies the parameters; it only wants them as pointers to non-const.
  void* argument = const_cast<std::byte*>(launch.params.bytes.data());
  cuda::check(cudaLaunchKernelExC(&config, launch.function, &argument), what);
}

/// Gives whether the kernel can do what its launch is marked for.
bool prepare_kernel(const KernelLaunch& launch, const DeviceInfo& device, auto&& what) {
  cudaFuncAttributes attributes{};
  cuda::check(cudaFuncGetAttributes(&attributes, launch.function), what);
  // Always to the same value, the most that the kernel may have: executors built at the same time
  // on several threads cannot lower one another's limit.
  constexpr std::size_t limit_without_asking = std::size_t{48} * 1024;
  if (launch.shared_bytes + attributes.sharedSizeBytes > limit_without_asking) {
    const std::int64_t most =
        device.shared_bytes_per_block - static_cast<std::int64_t>(attributes.sharedSizeBytes);
    cuda::check(cudaFuncSetAttribute(launch.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(most)),
                what);
  }
  constexpr std::uint32_t portable_cluster = 8;
  if (launch.cluster.x * launch.cluster.y * launch.cluster.z > portable_cluster) {
    cuda::check(
        cudaFuncSetAttribute(launch.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        what);
  }
  // What was compiled from PTX of an architecture before has no instruction to wait, whatever it
  // runs on.
  return !launch.programmatic || attributes.ptxVersion >= BoundPlan::least_programmatic;
}

/// A capture on a stream of its own; what was captured is thrown away.
void capture_and_discard(const Enqueue& work, auto&& what) {
  const cuda::StreamOwner stream = cuda::make_stream();
  // Relaxed: loading a kernel does things that the stricter modes forbid during a capture.
  cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed),
              "cudaStreamBeginCapture");
  try {
    work.function(work.params.bytes.data(), stream.get());
  } catch (...) {
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream.get(), &graph);
    const cuda::GraphOwner owner(graph);
    throw;
  }
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(stream.get(), &graph);
  const cuda::GraphOwner owner(graph);
  cuda::check(status, what);
}

}  // namespace

std::string step_text(const BoundPlan& bound, int node, const Step& step) {
  return fmt::format("{}: {}, step {}", bound.pipeline().id(), bound.pipeline().nodes()[node].name,
                     step.name);
}

ArenaMemory allocate_on_device(const Plan& plan, std::int64_t bytes) {
  const cuda::DeviceGuard guard(plan.pipeline().device().device.index);
  // A first call may stand inside a capture of the caller's.
  const cuda::RelaxedCaptureGuard relaxed;
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, static_cast<std::size_t>(bytes)),
              [&] { return fmt::format("{}: an arena of {} bytes", plan.pipeline().id(), bytes); });
  return {memory, [](void* allocated) { cuda::Destroyer<&cudaFree>{}(allocated); }};
}

void prepare_kernels(BoundPlan& bound) {
  const cuda::RelaxedCaptureGuard guard;
  bool all_wait = true;
  for (const int node : bound.order()) {
    for (const Step& step : bound.work(node).steps) {
      const auto what = [&] { return step_text(bound, node, step); };
      if (is_empty(step)) continue;
      if (const auto* launch = std::get_if<KernelLaunch>(&step.work)) {
        all_wait = prepare_kernel(*launch, bound.pipeline().device(), what) && all_wait;
      } else if (const auto* work = std::get_if<Enqueue>(&step.work)) {
        capture_and_discard(*work, what);
      } else if (std::holds_alternative<HostCall>(step.work)) {
        throw Error(ErrorCode::internal, fmt::format("{}: expected work for a CUDA device, got a "
                                                     "call on the host",
                                                     what()));
      }
    }
  }
  if (!all_wait) bound.forgo_programmatic();
}

bool enqueue_node(const BoundPlan& bound, int node, cudaStream_t stream, bool overlaps) {
  bool any = false;
  for (const Step& step : bound.work(node).steps) {
    const auto what = [&] { return step_text(bound, node, step); };
    if (is_empty(step)) continue;
    if (const auto* launch = std::get_if<KernelLaunch>(&step.work)) {
      launch_kernel(*launch, stream, overlaps || any, what);
    } else if (const auto* memset = std::get_if<Memset>(&step.work)) {
      cuda::check(cudaMemsetAsync(memset->destination, memset->value, memset->bytes, stream), what);
    } else if (const auto* work = std::get_if<Enqueue>(&step.work)) {
      work->function(work->params.bytes.data(), stream);
    }
    any = true;
  }
  return any;
}

void enqueue(const BoundPlan& bound, cudaStream_t stream, bool behind_callers) {
  bool overlaps = behind_callers && takes_programmatic(stream);
  if (bound.plan().options().poison && bound.arena() != nullptr) {
    cuda::check(cudaMemsetAsync(bound.arena(), 0xff,
                                static_cast<std::size_t>(bound.plan().arena_bytes()), stream),
                "cudaMemsetAsync of the arena");
    overlaps = true;
  }
  for (const int node : bound.order()) {
    if (!bound.enabled(node)) continue;
    overlaps = enqueue_node(bound, node, stream, overlaps) || overlaps;
  }
}

}  // namespace gdnflow

#endif  // GDNFLOW_WITH_CUDA
