#include <gdnflow/compare.hpp>
#include <gdnflow/device.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/registry.hpp>

#include "host/convert.hpp"
#include "support/device_tensor.hpp"
#include "support/gpu.hpp"
#include "support/stage_driver.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/core.h>

// Every CUDA variant against the host variant of its stage, each stage apart: both are given the
// same tensors, rounded to the types that the CUDA variant declares, and what it writes is compared
// with the host's fp32. A line a stage says how far apart they are, so that one run shows which
// stage is wrong. Outputs are poisoned with NaN, and so are inputs in rows that no sequence owns.

using namespace gdnflow;
using test::DeviceTensor;
using test::HostTensor;
using test::StageDriver;

namespace {

using Tensors = std::map<std::string, TensorView, std::less<>>;

constexpr std::string_view stages_on_tokens[] = {"chunk_cumsum",  "kkt_solve",      "wu",
                                                 "chunk_state",   "residual_state", "chunk_output",
                                                 "fused_prefill", "one_pass"};

const Variant& cuda_variant(const Stage& stage) {
  for (const Variant& variant : stage.variants) {
    if (variant.target == DeviceType::cuda) return variant;
  }
  FAIL("no CUDA variant of ", stage.name);
  return stage.variants.front();
}

void launch(const Step& step, cudaStream_t stream) {
  if (const auto* memset = std::get_if<Memset>(&step.work)) {
    REQUIRE(cudaMemsetAsync(memset->destination, memset->value, memset->bytes, stream) ==
            cudaSuccess);
    return;
  }
  if (const auto* work = std::get_if<Enqueue>(&step.work)) {
    work->function(work->params.bytes.data(), stream);
    return;
  }
  const auto* kernel = std::get_if<KernelLaunch>(&step.work);
  REQUIRE(kernel != nullptr);
  REQUIRE(cudaFuncSetAttribute(kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kernel->shared_bytes)) == cudaSuccess);
  cudaLaunchConfig_t config{};
  config.gridDim = {kernel->grid.x, kernel->grid.y, kernel->grid.z};
  config.blockDim = {kernel->block.x, kernel->block.y, kernel->block.z};
  config.dynamicSmemBytes = kernel->shared_bytes;
  config.stream = stream;
  void* argument = const_cast<std::byte*>(kernel->params.bytes.data());
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel->function, &argument);
  REQUIRE_MESSAGE(status == cudaSuccess, step.name, ": ", cudaGetErrorString(status));
}

/// Runs a CUDA variant on copies of host tensors, and copies back what it may write.
void run_on_gpu(const Problem& problem, const Capacity& capacity, const Stage& stage,
                const Variant& variant, const Tensors& tensors) {
  const DeviceInfo device = device_info({DeviceType::cuda, 0});
  const Options options;
  const VariantQuery query{problem, capacity, device, options};
  const Support supported = supports(variant, query);
  REQUIRE_MESSAGE(supported.ok, stage.name, ": ", supported.reason);

  std::deque<DeviceTensor> copies;
  std::vector<TensorView> views;
  for (const Port& port : stage.ports) {
    const auto it = tensors.find(port.name);
    views.push_back(it == tensors.end() ? TensorView{} : copies.emplace_back(it->second).view());
  }
  std::vector<TensorView> scratch;
  if (variant.scratch != nullptr) {
    for (const ScratchSpec& spec : variant.scratch(query)) {
      HostTensor poison(DType::u8, {spec.bytes});
      std::memset(poison.view().data, 0xff, static_cast<std::size_t>(spec.bytes));
      scratch.push_back(copies.emplace_back(poison.view()).view());
    }
  }
  const StageCall call{problem, capacity, device, options, stage, views, scratch};
  if (variant.accepts != nullptr) {
    const Support accepted = variant.accepts(call);
    REQUIRE_MESSAGE(accepted.ok, stage.name, ": ", accepted.reason);
  }
  StepList steps;
  variant.steps(call, steps);
  for (const Step& step : steps) launch(step, nullptr);
  const cudaError_t status = cudaDeviceSynchronize();
  REQUIRE_MESSAGE(status == cudaSuccess, stage.name, ": ", cudaGetErrorString(status));

  auto copy = copies.begin();
  for (const Port& port : stage.ports) {
    const auto it = tensors.find(port.name);
    if (it == tensors.end()) continue;
    if (port.direction != Direction::in) copy->download(it->second);
    ++copy;
  }
}

/// A dense copy in another floating type; the same type for what is not floating.
HostTensor converted(const TensorView& in, DType type) {
  const std::vector<std::int64_t> extents(in.extents.begin(), in.extents.begin() + in.rank);
  HostTensor out(is_float(in.dtype) ? type : in.dtype, extents);
  const std::int64_t row = in.rank == 0 ? 1 : in.extents[in.rank - 1];
  const std::int64_t rows = row == 0 ? 0 : in.elements() / row;
  std::vector<float> values(static_cast<std::size_t>(row));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t offset = 0;
    std::int64_t rest = r;
    for (int d = in.rank - 2; d >= 0; --d) {
      offset += rest % in.extents[d] * in.strides[d];
      rest /= in.extents[d];
    }
    if (is_float(in.dtype)) {
      host::load(in, offset, row, values.data());
      host::store(out.view(), r * row, row, values.data());
    } else {
      const auto size = static_cast<std::int64_t>(size_of(in.dtype));
      std::memcpy(out.as<std::byte>() + r * row * size, in.as<std::byte>() + offset * size,
                  static_cast<std::size_t>(row * size));
    }
  }
  return out;
}

HostTensor poisoned(DType type, const std::vector<std::int64_t>& extents) {
  HostTensor tensor(type, extents);
  std::memset(tensor.view().data, 0xff, static_cast<std::size_t>(tensor.view().bytes()));
  return tensor;
}

/// The relative RMS error of rounding once to a type.
double rounding_of(DType type) {
  return type == DType::bf16 ? 1.7e-3 : type == DType::f16 ? 2.1e-4 : 2e-6;
}

/// How far a CUDA variant may be from the host's on a port: a rounding where it computes in fp32, a
/// few where it feeds tensor cores.
double bound_of(const Stage& stage, const Variant& variant, const Problem& problem, DType output) {
  const bool on_tensor_cores = stage.name == "wu" || stage.name == "chunk_state" ||
                               stage.name == "residual_state" || stage.name == "chunk_output";
  // Fused, the roundings of states and of outputs add up.
  if (stage.name == "fused_prefill" || variant.id == "one-pass") {
    return 4 * rounding_of(problem.activation);
  }
  if (on_tensor_cores) return 3 * rounding_of(problem.activation);
  return 1.2 * rounding_of(output) + 5e-6;
}

/// A stage's tensors: what goes in, and outputs for both sides.
struct StageTensors {
  std::deque<HostTensor> owned;
  Tensors gpu;
  Tensors expected;
};

/// Takes inputs from `source`, rounded to what the CUDA variant declares. Outputs that `source`
/// has no tensor for are made by their extents, unless they are optional.
StageTensors tensors_of(const Stage& stage, const Variant& variant, const StageDriver& source) {
  StageTensors out;
  const auto keep = [&](HostTensor tensor) {
    return out.owned.emplace_back(std::move(tensor)).view();
  };
  for (const Port& port : stage.ports) {
    const bool there = source.has(port.name);
    if (!there && (port.optional || port.direction != Direction::out)) continue;
    const DType type = resolve_type(port, source.problem(), variant);
    if (port.direction == Direction::in) {
      // Views keep their strides where no rounding is needed.
      const TensorView view = source[port.name];
      out.gpu[port.name] = view.dtype == type ? view : keep(converted(view, type));
      out.expected[port.name] = out.gpu[port.name];
    } else if (port.direction == Direction::inout) {
      out.gpu[port.name] = keep(converted(source[port.name], type));
      out.expected[port.name] = keep(converted(source[port.name], type));
    } else {
      std::vector<std::int64_t> extents;
      for (std::size_t d = 0; d < port.extents.size(); ++d) {
        extents.push_back(
            there ? source[port.name].extents[d]
                  : evaluate(port.extents[d], source.problem(), source.capacity()).value());
      }
      out.gpu[port.name] = keep(poisoned(type, extents));
      out.expected[port.name] = keep(poisoned(is_float(type) ? DType::f32 : type, extents));
    }
  }
  return out;
}

void check_variant(const Stage& stage, const Variant& variant, const StageDriver& source) {
  const Problem& p = source.problem();
  const std::string& name = stage.name;
  StageTensors tensors = tensors_of(stage, variant, source);
  run_on_gpu(p, source.capacity(), stage, variant, tensors.gpu);
  StageDriver host(p, source.capacity());
  for (const auto& [port, view] : tensors.expected) host.add_view(port, view);
  host.run(name);

  std::string line =
      fmt::format("{} {} D{} {}:", name, variant.id, p.qk_dim, to_string(p.activation));
  bool all_good = true;
  for (const Port& port : stage.ports) {
    if (port.direction == Direction::in || tensors.gpu.count(port.name) == 0) continue;
    const TensorView& got = tensors.gpu[port.name];
    const TensorView& expected = tensors.expected[port.name];
    bool good = true;
    if (is_float(got.dtype)) {
      const Comparison comparison = compare(got, expected);
      good = comparison.within(bound_of(stage, variant, p, got.dtype));
      line += fmt::format(" {} rel_rms {:.2e}", port.name, comparison.relative_rms);
      CHECK_MESSAGE(good, name, " ", variant.id, " ", port.name, ": ", to_string(comparison));
    } else {
      good = std::memcmp(got.data, expected.data, static_cast<std::size_t>(got.bytes())) == 0;
      line += fmt::format(" {}", port.name);
      CHECK_MESSAGE(good, name, " ", variant.id, " ", port.name, ": differs from the host's");
    }
    line += good ? "" : " WRONG";
    all_good = all_good && good;
  }
  fmt::print("{}{}\n", line, all_good ? " ok" : "");
}

/// f(stage, variant) for every CUDA variant that serves the problem; the last of the list, the
/// plainest, must.
template <class F>
void for_each_cuda_variant(const Stage& stage, const StageDriver& source, F&& f) {
  const DeviceInfo device = device_info({DeviceType::cuda, 0});
  const Capacity capacity = source.capacity();
  const Options options;
  bool there_is_one = false;
  bool plainest_runs = false;
  for (const Variant& variant : stage.variants) {
    if (variant.target != DeviceType::cuda || test::is_excluded(variant.id)) continue;
    there_is_one = true;
    plainest_runs = supports(variant, {source.problem(), capacity, device, options}).ok;
    if (plainest_runs) f(stage, variant);
  }
  CHECK_MESSAGE((plainest_runs || !there_is_one), stage.name,
                ": the plainest variant refuses the problem");
}

void check_stage(std::string_view name, const StageDriver& source) {
  for_each_cuda_variant(
      builtin_stages().find(name), source,
      [&](const Stage& stage, const Variant& variant) { check_variant(stage, variant, source); });
}

/// Sequences of 70, 100 and 65 tokens: NaN in the middle one's inputs changes no bit of the others'
/// results.
void check_isolation(const Stage& stage, const Variant& variant, const StageDriver& source) {
  CAPTURE(stage.name);
  CAPTURE(variant.id);
  StageTensors clean = tensors_of(stage, variant, source);
  StageTensors poison = tensors_of(stage, variant, source);
  for (const Port& port : stage.ports) {
    if (port.direction != Direction::in || poison.gpu.count(port.name) == 0) continue;
    TensorView& view = poison.gpu[port.name];
    if (!is_float(view.dtype) || port.extents.front() != Extent("T")) continue;
    view = poison.owned.emplace_back(converted(view, view.dtype)).view();
    const std::int64_t row = view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
    std::memset(view.as<std::byte>() + 70 * row, 0xff, static_cast<std::size_t>(100 * row));
  }
  run_on_gpu(source.problem(), source.capacity(), stage, variant, clean.gpu);
  run_on_gpu(source.problem(), source.capacity(), stage, variant, poison.gpu);
  for (const Port& port : stage.ports) {
    if (port.direction == Direction::in || clean.gpu.count(port.name) == 0) continue;
    CAPTURE(port.name);
    // Rows of tokens, chunks or sequences that belong to the middle sequence.
    const bool by_token = port.extents.front() == Extent("T");
    const bool by_chunk = port.extents.front() == Extent("NC");
    const auto [first, last] = by_token   ? std::pair{70, 170}
                               : by_chunk ? std::pair{2, 4}
                                          : std::pair{1, 2};
    const TensorView& a = clean.gpu[port.name];
    const TensorView& b = poison.gpu[port.name];
    const std::int64_t row = a.strides[0] * static_cast<std::int64_t>(size_of(a.dtype));
    CHECK(std::memcmp(a.data, b.data, static_cast<std::size_t>(first * row)) == 0);
    CHECK(std::memcmp(a.as<std::byte>() + last * row, b.as<std::byte>() + last * row,
                      static_cast<std::size_t>(a.bytes() - last * row)) == 0);
  }
}

struct Case {
  Problem problem;
  std::vector<std::int64_t> lengths;
  Distribution distribution = Distribution::random_decay;
  std::vector<std::int64_t> prefixes{};  ///< one a sequence, where the problem has them
  bool packed_projection = false;        ///< q, k and v are views of one tensor
};

Problem problem(std::int32_t qk_heads, std::int32_t v_heads, std::int32_t dim, DType activation) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.qk_dim = dim;
  p.v_dim = dim;
  p.activation = activation;
  p.initial_state = true;
  return p;
}

/// A tensor of `rows` rows, the first of them copied, the others NaN.
HostTensor with_padding(const TensorView& in, std::int64_t rows) {
  std::vector<std::int64_t> extents(in.extents.begin(), in.extents.begin() + in.rank);
  extents[0] = rows;
  HostTensor out = poisoned(in.dtype, extents);
  std::memcpy(out.view().data, in.data, static_cast<std::size_t>(in.bytes()));
  return out;
}

/// q, k and v as views of one tensor [T, (2 Hqk + Hv) D].
void add_projection(StageDriver& driver, const Tensors& tensors) {
  const Problem& p = driver.problem();
  const std::int64_t width = (2 * p.qk_heads + p.v_heads) * std::int64_t{p.qk_dim};
  const std::int64_t tokens = driver.capacity().max_tokens;
  const TensorView projection = driver.add("projection", poisoned(p.activation, {tokens, width}));
  std::int64_t column = 0;
  for (const auto& [name, dense] : tensors) {
    TensorView view = dense;
    view.data = projection.as<std::byte>() + column * 2;
    view.strides[0] = width;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::memcpy(view.as<std::byte>() + t * width * 2,
                  dense.as<std::byte>() + t * dense.strides[0] * 2,
                  static_cast<std::size_t>(dense.strides[0] * 2));
    }
    driver.add_view(name, view);
    column += dense.strides[0];
  }
}

/// Inputs with room to spare: rows after the last sequence hold NaN, and two more sequences are
/// empty. Then the host's results of every stage, which the stages behind read.
StageDriver host_results(const Case& c) {
  const Problem& p = c.problem;
  const test::Inputs in = test::Inputs::draw(p, c.lengths, c.distribution, 7);
  const std::int64_t extra = p.cu_seqlens ? 37 : 0;
  const std::int64_t empty = p.cu_seqlens ? 2 : 0;
  const std::int64_t tokens = in.cu_seqlens.back() + extra;
  const std::int64_t sequences = static_cast<std::int64_t>(c.lengths.size()) + empty;
  StageDriver driver(p, {tokens, sequences});

  HostTensor q = with_padding(in.q, tokens);
  HostTensor k = with_padding(in.k, tokens);
  HostTensor v = with_padding(in.v, tokens);
  if (c.packed_projection) {
    add_projection(driver, {{"k", k.view()}, {"q", q.view()}, {"v", v.view()}});
  } else {
    driver.add("q", std::move(q));
    driver.add("k", std::move(k));
    driver.add("v", std::move(v));
  }
  driver.add("g", with_padding(in.g, tokens));
  driver.add("beta", with_padding(in.beta, tokens));
  if (p.cu_seqlens) {
    std::vector<std::int64_t> borders = in.cu_seqlens;
    borders.resize(static_cast<std::size_t>(sequences) + 1, in.cu_seqlens.back());
    driver.add_index("cu_seqlens", borders);
  }
  if (p.prefix_lens) {
    std::vector<std::int64_t> prefixes = c.prefixes;
    prefixes.resize(static_cast<std::size_t>(sequences), 5);
    driver.add_index("prefix_lens", prefixes);
  }

  const bool kv = p.state_layout == StateLayout::kv;
  const std::vector<std::int64_t> pool{sequences + 3, p.v_heads, kv ? p.qk_dim : p.v_dim,
                                       kv ? p.v_dim : p.qk_dim};
  HostTensor initial(p.state, pool);
  fill_input(InputKind::initial_state, c.distribution, 8, initial);
  driver.add("initial_state", std::move(initial));
  driver.add_poisoned_states("final_state", sequences + 3);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(sequences));
  for (std::size_t n = 0; n < slots.size(); ++n) {
    slots[n] = n == 1 ? -1 : sequences + 2 - static_cast<std::int64_t>(n);
  }
  if (p.state_indices) driver.add_i32("state_indices", slots);
  if (p.output_state_indices) {
    std::rotate(slots.begin(), slots.begin() + 1, slots.end());
    driver.add_i32("output_state_indices", slots);
  }
  if (p.has_initial_state) {
    std::vector<std::int64_t> flags(slots.size(), 1);
    flags[0] = 0;
    driver.add_flags("has_initial_state", flags);
  }
  if (p.checkpoint_interval > 0) {
    driver.add_poisoned_states("checkpoints", 5);
    if (p.checkpoint_state_indices) {
      driver.add_i32("checkpoint_state_indices", {4, -1, 2, 0});
    }
  }
  driver.add_poisoned("o", DType::f32, {tokens, p.v_heads, p.v_dim});

  for (const char* stage :
       {"chunk_index", "chunk_cumsum", "kkt_solve", "wu", "residual_state", "chunk_output"}) {
    driver.run(stage);
  }
  return driver;
}

void check(const Case& c) {
  CAPTURE(to_string(c.problem));
  CAPTURE(c.lengths);
  const StageDriver source = host_results(c);
  fmt::print("{}, {} sequences, {} tokens, {}\n", to_string(c.problem), c.lengths.size(),
             source.capacity().max_tokens, to_string(c.distribution));
  check_stage("chunk_index", source);
  for (const std::string_view stage : stages_on_tokens) check_stage(stage, source);
  check_stage("zero_padding", source);
}

}  // namespace

TEST_CASE("each CUDA stage equals the host's at lengths around a chunk's border")
{
  GDNFLOW_REQUIRE_GPU();
  for (const std::int64_t length : {1, 63, 64, 65, 200}) {
    check({problem(1, 2, 128, DType::bf16), {length}});
  }
}

TEST_CASE("each CUDA stage equals the host's for both dims and both activation types")
{
  GDNFLOW_REQUIRE_GPU();
  for (const std::int32_t dim : {64, 128}) {
    for (const DType type : {DType::bf16, DType::f16}) {
      check({problem(2, 4, dim, type), {15, 85, 200}});
    }
  }
}

TEST_CASE("each CUDA stage equals the host's on packed sequences, empty ones included")
{
  GDNFLOW_REQUIRE_GPU();
  check({problem(1, 1, 64, DType::bf16), {0, 101, 202, 0, 0, 64, 1, 0}});
  check({problem(1, 1, 128, DType::bf16), {256, 244, 500}});
  check({problem(1, 1, 64, DType::bf16), std::vector<std::int64_t>(1500, 3)});
  check({problem(1, 2, 64, DType::bf16), {0, 0, 0}});
}

TEST_CASE("each CUDA stage equals the host's for every ratio of heads and both head maps")
{
  GDNFLOW_REQUIRE_GPU();
  for (const auto& [qk_heads, v_heads] : {std::pair{3, 3}, {2, 8}, {4, 12}, {2, 80}}) {
    for (const HeadMap map : {HeadMap::grouped, HeadMap::interleaved}) {
      Problem p = problem(qk_heads, v_heads, 64, DType::bf16);
      p.head_map = map;
      check({p, {100, 65}});
    }
  }
}

TEST_CASE("each CUDA stage equals the host's for every layout and type of states and lengths")
{
  GDNFLOW_REQUIRE_GPU();
  for (const StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
    for (const DType state : {DType::f32, DType::bf16, DType::f16}) {
      Problem p = problem(1, 2, 128, DType::bf16);
      p.state_layout = layout;
      p.state = state;
      p.index = layout == StateLayout::kv ? DType::i32 : DType::i64;
      check({p, {130, 17}});
    }
  }
}

TEST_CASE("each CUDA stage equals the host's on dense and on strided tensors")
{
  GDNFLOW_REQUIRE_GPU();
  Problem dense = problem(2, 4, 128, DType::bf16);
  dense.cu_seqlens = false;
  check({dense, {100, 100}});
  Case strided{problem(2, 4, 128, DType::bf16), {100, 30}};
  strided.packed_projection = true;
  check(strided);
}

TEST_CASE("each CUDA stage equals the host's with slots, flags, prefixes and checkpoints")
{
  GDNFLOW_REQUIRE_GPU();
  for (const bool to_pool : {false, true}) {
    Problem p = problem(1, 2, 64, DType::bf16);
    p.state_indices = true;
    p.output_state_indices = to_pool;
    p.has_initial_state = true;
    p.prefix_lens = true;
    p.checkpoint_interval = 128;
    p.checkpoint_state_indices = to_pool;
    Case c{p, {128, 64, 300, 0, 10}};
    c.prefixes = {0, 64, 100, 128, 500};
    check(c);
  }
}

TEST_CASE("each CUDA stage equals the host's on every distribution")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Distribution distribution : distributions()) {
    // Keys up to length 2 make the inverse grow past what 16 bits can carry, and huge decays differ
    // in the last bits of their sums: both are judged by whole pipelines.
    if (distribution == Distribution::unnormalized) continue;
    check({problem(1, 2, 128, DType::bf16), {200, 64, 129}, distribution});
  }
}

TEST_CASE("the CUDA chunk table makes bad lengths safe as the host does")
{
  GDNFLOW_REQUIRE_GPU();
  for (const DType index : {DType::i32, DType::i64}) {
    Problem p = problem(1, 1, 64, DType::bf16);
    p.index = index;
    p.prefix_lens = true;
    p.checkpoint_interval = 64;
    StageDriver driver(p, {300, 6});
    driver.add_index("cu_seqlens", {-5, 70, 20, 90, 5000, -1, 200});
    driver.add_index("prefix_lens", {-3, 0, 63, 1 << 30, 64, 1});
    driver.add_poisoned("o", DType::f32, {300, 1, 64});
    check_stage("chunk_index", driver);
    check_stage("zero_padding", driver);
  }
}

TEST_CASE("the CUDA normalisation and gates equal the host's in every form")
{
  GDNFLOW_REQUIRE_GPU();
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const std::int32_t dim : {64, 128}) {
      StageDriver driver(problem(3, 6, dim, type), {77, 1});
      for (const char* name : {"q", "k"}) {
        HostTensor tensor(type, {77, 3, dim});
        fill_uniform(name[0], -2, 2, tensor);
        driver.add(name, std::move(tensor));
      }
      check_stage("qk_norm", driver);
    }
    for (const GateForm gate : {GateForm::log_decay, GateForm::alpha, GateForm::raw}) {
      for (const BetaForm beta : {BetaForm::ready, BetaForm::logit}) {
        Problem p = problem(2, 6, 64, type);
        p.gate = gate;
        p.beta = beta;
        StageDriver driver(p, {77, 1});
        const auto add = [&](const char* name, DType dtype, std::vector<std::int64_t> extents,
                             float low, float high) {
          HostTensor tensor(dtype, std::move(extents));
          fill_uniform(static_cast<std::uint64_t>(name[0]), low, high, tensor);
          driver.add(name, std::move(tensor));
        };
        const bool alpha = gate == GateForm::alpha;
        add("g", DType::f32, {77, 6}, alpha ? 0.0F : -3.0F, alpha ? 1.0F : 0.0F);
        add("beta", DType::f32, {77, 6}, 0.0F, 1.0F);
        add("a", type, {77, 6}, -30.0F, 30.0F);
        add("b", type, {77, 6}, -20.0F, 20.0F);
        add("a_log", DType::f32, {6}, -2.0F, 3.0F);
        add("dt_bias", DType::f32, {6}, -1.0F, 1.0F);
        check_stage("gate", driver);
      }
    }
  }
}

TEST_CASE("a NaN in one sequence changes no bit of another on the GPU")
{
  GDNFLOW_REQUIRE_GPU();
  // Sequences of two chunks each; the middle one is poisoned.
  const Case c{problem(1, 2, 128, DType::bf16), {70, 100, 65}};
  const StageDriver source = host_results(c);
  for (const std::string_view name : stages_on_tokens) {
    for_each_cuda_variant(builtin_stages().find(name), source,
                          [&](const Stage& stage, const Variant& variant) {
                            check_isolation(stage, variant, source);
                          });
  }
}

TEST_CASE("CUDA variants refuse what they cannot serve with a reason that names it")
{
  DeviceInfo device;
  device.device = {DeviceType::cuda, 0};
  device.capability = 90;
  device.multiprocessors = 132;
  device.shared_bytes_per_block = 227 * 1024;
  const Options options;
  const Capacity capacity{1000, 2};
  const auto reason = [&](const char* stage, const Problem& p, const Capacity& most) {
    const Support support = supports(cuda_variant(builtin_stages().find(stage)),
                                     VariantQuery{p, most, device, options});
    return support.ok ? std::string() : support.reason;
  };
  const Problem good = problem(2, 4, 128, DType::bf16);
  for (const char* stage : {"kkt_solve", "wu", "chunk_state", "residual_state", "chunk_output",
                            "one_pass", "qk_norm"}) {
    CAPTURE(stage);
    CHECK(reason(stage, good, capacity).empty());
    Problem p = good;
    p.qk_dim = p.v_dim = 96;
    CHECK(reason(stage, p, capacity).find("96") != std::string::npos);
    p = good;
    p.v_dim = 64;
    CHECK(reason(stage, p, capacity).find("d_v 64") != std::string::npos);
    p = good;
    p.activation = DType::f32;
    CHECK(reason(stage, p, capacity).find("f32") != std::string::npos);
  }
  CHECK(reason("residual_state", good, {1000, 1 << 30}).find("grid") != std::string::npos);
  device.capability = 75;
  CHECK(reason("chunk_index", good, capacity).find("sm_75") != std::string::npos);
}

TEST_CASE("CUDA variants refuse tensors that do not suit 16-byte loads")
{
  const Problem p = problem(1, 1, 64, DType::bf16);
  const Capacity capacity{64, 1};
  const DeviceInfo device;
  const Options options;
  const Stage& stage = builtin_stages().find("kkt_solve");
  const auto reason = [&](std::size_t misaligned_by, std::int64_t token_stride) {
    alignas(16) static std::byte memory[64];
    std::vector<TensorView> tensors;
    for (const Port& port : stage.ports) {
      std::vector<std::int64_t> extents;
      for (const Extent& e : port.extents) extents.push_back(evaluate(e, p, capacity).value());
      tensors.push_back(
          TensorView::dense(memory, resolve_type(port, p, cuda_variant(stage)), extents));
    }
    TensorView& k = tensors[static_cast<std::size_t>(stage.port_index("k"))];
    k.data = memory + misaligned_by;
    k.strides[0] = token_stride;
    const StageCall call{p, capacity, device, options, stage, tensors, {}};
    const Support support = cuda_variant(stage).accepts(call);
    return support.ok ? std::string() : support.reason;
  };
  CHECK(reason(0, 64).empty());
  CHECK(reason(0, 200).empty());
  CHECK(reason(2, 64).find("k: expected an address") != std::string::npos);
  CHECK(reason(0, 68).find("k: expected strides") != std::string::npos);
}
