#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>

#if GDNFLOW_WITH_CUDA
#include "launch.hpp"
#endif

#include <utility>

namespace gdnflow {

#if GDNFLOW_WITH_CUDA
namespace {

class EagerExecutor final : public ExecutorBase {
 public:
  EagerExecutor(Plan plan, ExecutorOptions options)
      : ExecutorBase(std::move(plan), std::move(options), DeviceType::cuda, "eager"),
        device_(this->plan().pipeline().device().device.index) {}

  std::string_view kind() const noexcept override { return "eager"; }

  void run(Stream stream) override {
    require_built();
    const cuda::DeviceGuard guard(device_);
    enqueue(bound_, stream, behind_callers());
  }

  std::vector<NodeTime> profile(int repeats, Stream stream) override {
    require_built();
    require_repeats(repeats);
    const cuda::DeviceGuard guard(device_);
    std::vector<std::pair<cuda::EventOwner, cuda::EventOwner>> events;
    for (int i = 0; i < repeats; ++i) events.emplace_back(cuda::make_event(), cuda::make_event());
    // Every node then finds its inputs, and the clocks are up.
    enqueue(bound_, stream, false);
    std::vector<NodeTime> times;
    for (const int node : bound_.order()) {
      if (!bound_.enabled(node)) continue;
      for (const auto& [start, stop] : events) {
        cuda::check(cudaEventRecord(start.get(), stream), "cudaEventRecord");
        enqueue_node(bound_, node, stream, false);
        cuda::check(cudaEventRecord(stop.get(), stream), "cudaEventRecord");
      }
      std::vector<double> samples;
      for (const auto& [start, stop] : events) {
        float ms = 0;
        cuda::check(cudaEventSynchronize(stop.get()), "cudaEventSynchronize");
        cuda::check(cudaEventElapsedTime(&ms, start.get(), stop.get()), "cudaEventElapsedTime");
        samples.push_back(ms);
      }
      times.push_back({bound_.pipeline().nodes()[node].name, median(samples)});
    }
    return times;
  }

 protected:
  void build_executable() override {
    const cuda::DeviceGuard guard(device_);
    prepare_kernels(bound_);
  }

 private:
  int device_;
};

}  // namespace
#endif

std::unique_ptr<Executor> make_eager_executor([[maybe_unused]] Plan plan,
                                              [[maybe_unused]] ExecutorOptions options) {
#if GDNFLOW_WITH_CUDA
  return std::make_unique<EagerExecutor>(std::move(plan), std::move(options));
#else
  throw Error(ErrorCode::unsupported, "eager executor: this build of gdnflow has no CUDA");
#endif
}

}  // namespace gdnflow
