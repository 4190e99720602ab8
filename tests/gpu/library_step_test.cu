#include <gdnflow/executor.hpp>
#include <gdnflow/pipeline.hpp>
#include <gdnflow/plan.hpp>

#include "support/gpu.hpp"

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include <cub/device/device_scan.cuh>
#include <cuda_runtime.h>
#include <doctest/doctest.h>

// A user's own CUDA stage around a library that only exposes a stream: a kernel copies the external
// tensor in, CUB scans between intermediates, a kernel copies the result out. So the graph can be
// rebound although what CUB launched is never edited.

using namespace gdnflow;

namespace {

struct CopyParams {
  const std::int32_t* from;  // [count]
  std::int32_t* to;          // [count]
  std::int64_t count;
};

__global__ void copy(const CopyParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < p.count) p.to[i] = p.from[i];
}

Step copy_step(const TensorView& from, const TensorView& to) {
  const CopyParams params{from.as<std::int32_t>(), to.as<std::int32_t>(), from.elements()};
  constexpr std::uint32_t threads = 128;
  const auto blocks = static_cast<std::uint32_t>((params.count + threads - 1) / threads);
  return kernel_step("copy", copy, {blocks}, {threads}, 0, params);
}

struct ScanParams {
  const std::int32_t* in;
  std::int32_t* out;
  void* scratch;
  std::int64_t scratch_bytes;
  std::int64_t count;
};

void enqueue_scan(const void* blob, Stream stream) {
  ScanParams p;
  std::memcpy(&p, blob, sizeof p);
  auto bytes = static_cast<std::size_t>(p.scratch_bytes);
  (void)cub::DeviceScan::InclusiveSum(p.scratch, bytes, p.in, p.out, static_cast<int>(p.count),
                                      stream);
}

std::int64_t scan_scratch_bytes(std::int64_t count) {
  std::size_t bytes = 0;
  const std::int32_t* in = nullptr;
  std::int32_t* out = nullptr;
  (void)cub::DeviceScan::InclusiveSum(nullptr, bytes, in, out, static_cast<int>(count));
  return static_cast<std::int64_t>(bytes);
}

Port integers(const char* name, Direction direction) {
  return {name, direction, TypeRule::i32, {"T"}, false, Padding::untouched};
}

Stage stage(const char* name, std::vector<Port> ports, void (*steps)(const StageCall&, StepList&),
            std::vector<ScratchSpec> (*scratch)(const VariantQuery&) = nullptr) {
  Variant variant;
  variant.id = "test";
  variant.description = "for tests";
  variant.target = DeviceType::cuda;
  variant.steps = steps;
  variant.scratch = scratch;
  return {name, "for tests", std::move(ports), {variant}};
}

Registry stages() {
  return Registry({
      stage("copy_in", {integers("x", Direction::in), integers("staged", Direction::out)},
            [](const StageCall& call, StepList& steps) {
              steps.push_back(copy_step(call["x"], call["staged"]));
            }),
      stage(
          "scan", {integers("staged", Direction::in), integers("sums", Direction::out)},
          [](const StageCall& call, StepList& steps) {
            const ScanParams params{call["staged"].as<std::int32_t>(),
                                    call["sums"].as<std::int32_t>(), call.scratch[0].data,
                                    call.scratch[0].elements(), call["sums"].elements()};
            steps.push_back({"scan", Enqueue{enqueue_scan, ParamBlob::of(params)}});
          },
          [](const VariantQuery& query) {
            return std::vector<ScratchSpec>{{"cub", scan_scratch_bytes(query.capacity.max_tokens)}};
          }),
      stage("copy_out", {integers("sums", Direction::in), integers("z", Direction::out)},
            [](const StageCall& call, StepList& steps) {
              steps.push_back(copy_step(call["sums"], call["z"]));
            }),
  });
}

/// A device array of i32, filled with `start`, `start + 1`, ...
class Numbers {
 public:
  Numbers(std::int64_t count, std::int32_t start) : host_(count) {
    std::iota(host_.begin(), host_.end(), start);
    REQUIRE(cudaMalloc(&data_, host_.size() * 4) == cudaSuccess);
    REQUIRE(cudaMemcpy(data_, host_.data(), host_.size() * 4, cudaMemcpyHostToDevice) ==
            cudaSuccess);
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { (void)cudaFree(data_); }

  TensorView view() const {
    return TensorView::dense(data_, DType::i32, {static_cast<std::int64_t>(host_.size())},
                             {DeviceType::cuda, 0});
  }
  std::vector<std::int32_t> sums() const {
    std::vector<std::int32_t> out(host_.size());
    std::partial_sum(host_.begin(), host_.end(), out.begin());
    return out;
  }
  std::vector<std::int32_t> download() const {
    std::vector<std::int32_t> out(host_.size());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cudaMemcpy(out.data(), data_, out.size() * 4, cudaMemcpyDeviceToHost) == cudaSuccess);
    return out;
  }

 private:
  std::vector<std::int32_t> host_;
  void* data_ = nullptr;
};

}  // namespace

TEST_CASE("a stage on CUB runs eagerly and in a graph, and is rebound through its own kernels")
{
  GDNFLOW_REQUIRE_GPU();
  constexpr std::int64_t count = 10000;
  const Registry registry = stages();
  const Plan plan(
      PipelineBuilder("scan", registry, {}, {count, 1}, device_info({DeviceType::cuda, 0}))
          .inputs({"x"})
          .outputs({"z"})
          .add("copy_in")
          .add("scan")
          .add("copy_out")
          .build(),
      {.reuse = true, .poison = true});
  const Numbers x(count, 1);
  const Numbers y(count, -77);
  for (const auto make : {make_eager_executor, make_graph_executor}) {
    const Numbers z(count, 0);
    const Numbers other(count, 0);
    const auto executor = make(plan, {});
    executor->bind({{"x", x.view()}, {"z", z.view()}});
    executor->build();
    for (int i = 0; i < 3; ++i) executor->run();
    CHECK(z.download() == x.sums());
    executor->bind({{"x", y.view()}, {"z", other.view()}});
    executor->run();
    CHECK(other.download() == y.sums());
    CHECK(z.download() == x.sums());
  }
}
