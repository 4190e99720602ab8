#include <gdnflow/executor.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/pipeline.hpp>
#include <gdnflow/plan.hpp>

#include "host/convert.hpp"
#include "support/device_tensor.hpp"
#include "support/gpu.hpp"
#include "support/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/core.h>

// chunk_cumsum and kkt_solve, as they are chosen for a GPU, against the inverse in fp64. A may be
// as far from it as rounding the exact inverse to A's type, and hardly more: whatever the keys, the
// inversion's own error must not show. The two kernels are launched programmatically, and run
// eagerly and from a graph here.

using namespace gdnflow;
using test::DeviceTensor;
using test::HostTensor;

namespace {

struct Case {
  std::string name;
  Problem problem;
  std::vector<std::int64_t> lengths;
  Distribution keys = Distribution::random_decay;
  Distribution decay = Distribution::random_decay;
  bool repeated = false;         ///< all tokens have one key, and beta is 1
  std::int64_t more_tokens = 0;  ///< capacity beyond the lengths
};

Problem problem(std::int32_t qk_heads, std::int32_t v_heads, std::int32_t dim = 128,
                DType activation = DType::bf16) {
  Problem p;
  p.qk_heads = qk_heads;
  p.v_heads = v_heads;
  p.qk_dim = dim;
  p.v_dim = dim;
  p.activation = activation;
  return p;
}

std::vector<float> values(const TensorView& dense) {
  std::vector<float> out(static_cast<std::size_t>(dense.elements()));
  host::load(dense, 0, dense.elements(), out.data());
  return out;
}

HostTensor poisoned(DType type, const std::vector<std::int64_t>& extents) {
  HostTensor tensor(type, extents);
  std::memset(tensor.view().data, 0xff, static_cast<std::size_t>(tensor.view().bytes()));
  return tensor;
}

/// What the stages read, over the whole capacity: NaN in rows that no sequence owns.
struct Inputs {
  HostTensor k, g, beta, cu_seqlens;
  std::vector<std::int64_t> borders;
  std::int64_t capacity = 0;

  explicit Inputs(const Case& c) : borders(test::offsets_of(c.lengths)) {
    const Problem& p = c.problem;
    const std::int64_t tokens = borders.back();
    capacity = tokens + c.more_tokens;
    k = HostTensor(p.activation, {tokens, p.qk_heads, p.qk_dim});
    g = HostTensor(DType::f32, {tokens, p.v_heads});
    beta = HostTensor(DType::f32, {tokens, p.v_heads});
    fill_input(InputKind::k, c.keys, 11, k);
    fill_input(InputKind::g, c.decay, 11, g);
    fill_input(InputKind::beta, c.decay, 11, beta);
    if (c.repeated) {
      const std::int64_t row = p.qk_heads * std::int64_t{p.qk_dim} * 2;
      for (std::int64_t t = 1; t < tokens; ++t) {
        std::memcpy(k.as<std::byte>() + t * row, k.as<std::byte>(), static_cast<std::size_t>(row));
      }
      std::fill_n(beta.as<float>(), beta.view().elements(), 1.0F);
    }
    for (HostTensor* tensor : {&k, &g, &beta}) {
      std::vector<std::int64_t> extents(tensor->view().extents.begin(),
                                        tensor->view().extents.begin() + tensor->view().rank);
      extents[0] = capacity;
      HostTensor padded = poisoned(tensor->view().dtype, extents);
      std::memcpy(padded.view().data, tensor->view().data,
                  static_cast<std::size_t>(tensor->view().bytes()));
      *tensor = std::move(padded);
    }
    cu_seqlens = HostTensor(DType::i32, {static_cast<std::int64_t>(borders.size())});
    std::copy(borders.begin(), borders.end(), cu_seqlens.as<std::int32_t>());
  }
};

Pipeline pipeline_of(const Case& c, const Inputs& in) {
  PipelineBuilder builder("inverse", builtin_stages(), c.problem,
                          {in.capacity, static_cast<std::int64_t>(c.lengths.size())},
                          device_info({DeviceType::cuda, 0}));
  std::vector<std::string> inputs{"k", "g", "beta"};
  if (c.problem.cu_seqlens) inputs.push_back("cu_seqlens");
  StageUse cumsum;
  cumsum.variant = parse_variant_choice("split-scan");
  StageUse solve;
  solve.variant = parse_variant_choice("tensor-core");
  return builder.inputs(inputs)
      .outputs({"A", "g_cumsum"})
      .add("chunk_index")
      .add("chunk_cumsum", cumsum)
      .add("kkt_solve", solve)
      .build();
}

/// A, from poisoned memory.
HostTensor run(const Case& c, const Inputs& in,
               std::unique_ptr<Executor> (*make)(Plan, ExecutorOptions), int times) {
  const Problem& p = c.problem;
  HostTensor a = poisoned(p.activation, {in.capacity, p.v_heads, chunk_tokens});
  HostTensor g_cumsum = poisoned(DType::f32, {in.capacity, p.v_heads});
  const DeviceTensor k(in.k);
  const DeviceTensor g(in.g);
  const DeviceTensor beta(in.beta);
  const DeviceTensor cu_seqlens(in.cu_seqlens);
  const DeviceTensor a_device(a);
  const DeviceTensor g_cumsum_device(g_cumsum);
  Bindings bindings{{"k", k.view()},
                    {"g", g.view()},
                    {"beta", beta.view()},
                    {"A", a_device.view()},
                    {"g_cumsum", g_cumsum_device.view()}};
  if (p.cu_seqlens) bindings.emplace_back("cu_seqlens", cu_seqlens.view());
  const auto executor = make(Plan(pipeline_of(c, in)), {});
  executor->bind(bindings);
  executor->build();
  for (int i = 0; i < times; ++i) executor->run();
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  a_device.download(a);
  return a;
}

/// (I + strict_lower(beta_i exp(gc_i - gc_j) <k_i, k_j>))^-1 of a chunk, by rows, in fp64.
std::vector<double> exact_inverse(const Problem& p, const std::vector<float>& k,
                                  const std::vector<float>& g, const std::vector<float>& beta,
                                  std::int64_t first, std::int64_t tokens, std::int32_t head) {
  const auto n = static_cast<std::size_t>(tokens);
  const auto key = [&](std::size_t i) {
    return k.data() +
           ((first + static_cast<std::int64_t>(i)) * p.qk_heads + p.qk_head_of(head)) * p.qk_dim;
  };
  const auto gate = [&](const std::vector<float>& x, std::size_t i) {
    return static_cast<double>(
        x[static_cast<std::size_t>((first + static_cast<std::int64_t>(i)) * p.v_heads + head)]);
  };
  std::vector<double> inverse(n * n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    double* row = inverse.data() + i * n;
    row[i] = 1.0;
    double log_decay = 0.0;  // of j to i: gc_i - gc_j without the cancellation
    for (std::size_t j = i; j-- > 0;) {
      log_decay += gate(g, j + 1);
      double product = 0.0;
      for (std::int32_t d = 0; d < p.qk_dim; ++d) {
        product += static_cast<double>(key(i)[d]) * static_cast<double>(key(j)[d]);
      }
      const double factor = gate(beta, i) * std::exp(log_decay) * product;
      for (std::size_t column = 0; column <= j; ++column) {
        row[column] -= factor * inverse[j * n + column];
      }
    }
  }
  return inverse;
}

/// Every row of A against fp64; rows that no sequence owns must be as they were.
void check_inverse(const Case& c, const Inputs& in, const HostTensor& a) {
  const Problem& p = c.problem;
  const std::vector<float> k = values(in.k);
  const std::vector<float> g = values(in.g);
  const std::vector<float> beta = values(in.beta);
  const std::vector<float> got = values(a);
  HostTensor one(p.activation, {1});
  const auto rounded = [&](double x) {
    const auto narrow = static_cast<float>(x);
    host::store(one.view(), 0, 1, &narrow);
    return values(one)[0];
  };
  double error = 0.0;
  double rounding = 0.0;
  double norm = 0.0;
  std::int64_t outside = 0;  // elements above the diagonal or past the chunk that are not zero
  for (std::size_t n = 0; n + 1 < in.borders.size(); ++n) {
    for (std::int64_t first = in.borders[n]; first < in.borders[n + 1]; first += chunk_tokens) {
      const std::int64_t tokens = std::min(chunk_tokens, in.borders[n + 1] - first);
      for (std::int32_t head = 0; head < p.v_heads; ++head) {
        const std::vector<double> exact = exact_inverse(p, k, g, beta, first, tokens, head);
        for (std::int64_t i = 0; i < tokens; ++i) {
          const float* row = got.data() + ((first + i) * p.v_heads + head) * chunk_tokens;
          for (std::int64_t j = 0; j < chunk_tokens; ++j) {
            if (j > i) {
              outside += row[j] == 0.0F ? 0 : 1;
              continue;
            }
            const double expected = exact[static_cast<std::size_t>(i * tokens + j)];
            error += std::pow(static_cast<double>(row[j]) - expected, 2);
            rounding += std::pow(static_cast<double>(rounded(expected)) - expected, 2);
            norm += expected * expected;
          }
        }
      }
    }
  }
  CHECK(outside == 0);
  const double relative = std::sqrt(error / norm);
  const double unavoidable = std::sqrt(rounding / norm);
  fmt::print("A, {}: {}, rel_rms {:.3e}, of which rounding {:.3e}\n", c.name, to_string(p),
             relative, unavoidable);
  // The small term is for fp32 sums of g: differences of sums carry the sums' own roundings.
  CHECK(relative <= 1.03 * unavoidable + 2e-6);

  const auto* bytes = a.as<std::uint8_t>();
  const std::int64_t owned = in.borders.back() * p.v_heads * chunk_tokens * 2;
  CHECK(std::all_of(bytes + owned, bytes + a.view().bytes(),
                    [](std::uint8_t byte) { return byte == 0xff; }));
}

bool same_bits(const HostTensor& x, const HostTensor& y, std::int64_t bytes) {
  return std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(bytes)) == 0;
}

void check(const Case& c) {
  CAPTURE(c.name);
  CAPTURE(to_string(c.problem));
  CAPTURE(c.lengths);
  const Inputs in(c);
  const HostTensor eager = run(c, in, make_eager_executor, 3);
  check_inverse(c, in, eager);
  const HostTensor replayed = run(c, in, make_graph_executor, 3);
  CHECK(same_bits(eager, replayed, eager.view().bytes()));
}

}  // namespace

TEST_CASE("A equals the fp64 inverse to its own rounding, for keys of every kind")
{
  GDNFLOW_REQUIRE_GPU();
  const Problem p = problem(2, 8);
  check({"random keys", p, {256, 75}});
  check({"correlated keys", p, {512}, Distribution::correlated});
  check({"correlated keys without decay",
         p,
         {512},
         Distribution::correlated,
         Distribution::no_decay});
  check({"repeated keys, beta 1, no decay",
         p,
         {200},
         Distribution::random_decay,
         Distribution::no_decay,
         true});
  check({"keys up to 2", p, {512}, Distribution::unnormalized});
  check({"decay of a model", p, {300}, Distribution::correlated, Distribution::model});
}

TEST_CASE("A equals the fp64 inverse at every length around a block's and a chunk's border")
{
  GDNFLOW_REQUIRE_GPU();
  check({"tails",
         problem(1, 4),
         {0, 1, 2, 15, 16, 17, 31, 0, 33, 47, 48, 49, 63, 64, 65, 127, 0},
         Distribution::correlated,
         Distribution::random_decay,
         false,
         70});
}

TEST_CASE("A equals the fp64 inverse for every ratio of heads, both head maps, dims and types")
{
  GDNFLOW_REQUIRE_GPU();
  for (const auto& [qk_heads, v_heads] :
       {std::pair{3, 3}, {2, 4}, {4, 12}, {2, 8}, {1, 8}, {2, 24}, {1, 5}}) {
    for (const HeadMap map : {HeadMap::grouped, HeadMap::interleaved}) {
      Problem p = problem(qk_heads, v_heads);
      p.head_map = map;
      check({"ratios", p, {64, 100}, Distribution::correlated});
    }
  }
  for (const std::int32_t dim : {64, 128}) {
    for (const DType type : {DType::bf16, DType::f16}) {
      check({"dims and types", problem(2, 4, dim, type), {150}, Distribution::correlated});
    }
  }
  Problem dense = problem(2, 8);
  dense.cu_seqlens = false;
  check({"dense", dense, {100, 100, 100}, Distribution::correlated});
}

TEST_CASE("strong decay and resets leave A finite and the identity where nothing is remembered")
{
  GDNFLOW_REQUIRE_GPU();
  for (const Distribution decay :
       {Distribution::strong, Distribution::hard_reset, Distribution::huge}) {
    const Case c{
        std::string(to_string(decay)), problem(2, 8), {300}, Distribution::correlated, decay};
    const Inputs in(c);
    const std::vector<float> a = values(run(c, in, make_eager_executor, 1));
    CHECK(std::all_of(a.begin(), a.end(), [](float x) { return std::isfinite(x); }));
    if (decay != Distribution::huge) continue;
    for (std::int64_t t = 0; t < 300; ++t) {
      for (std::int64_t head = 0; head < 8; ++head) {
        for (std::int64_t j = 0; j < chunk_tokens; ++j) {
          const float expected = j == t % chunk_tokens ? 1.0F : 0.0F;
          REQUIRE(a[static_cast<std::size_t>((t * 8 + head) * chunk_tokens + j)] == expected);
        }
      }
    }
  }
}

TEST_CASE("A has the same bits in any capacity")
{
  GDNFLOW_REQUIRE_GPU();
  Case c{"capacity", problem(2, 8), {130, 64, 9}, Distribution::correlated};
  const Inputs tight(c);
  const HostTensor expected = run(c, tight, make_graph_executor, 1);
  c.more_tokens = 20000;
  const Inputs ample(c);
  const HostTensor got = run(c, ample, make_graph_executor, 2);
  CHECK(same_bits(expected, got, expected.view().bytes()));
}
