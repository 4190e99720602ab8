#include "host/convert.hpp"
#include "support/stage_driver.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

// The stages whose result is a formula an element or a row: gate, qk_norm, chunk_cumsum,
// zero_padding, and what kkt_solve's inverse must satisfy.

using namespace gdnflow;
using test::HostTensor;
using test::Inputs;
using test::StageDriver;

namespace {

Problem small_problem() {
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 4;
  p.qk_dim = 24;
  p.v_dim = 16;
  p.activation = DType::f32;
  return p;
}

std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.elements()));
  host::load(view, 0, view.elements(), values.data());
  return values;
}

double relative(double got, double expected) {
  return std::abs(got - expected) / std::max(std::abs(expected), 1e-300);
}

}  // namespace

TEST_CASE("gate turns raw projections into log decay and beta")
{
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    Problem p = small_problem();
    p.gate = GateForm::raw;
    p.beta = BetaForm::logit;
    p.activation = type;
    const std::int64_t tokens = 130;
    StageDriver driver(p, {tokens, 1});
    HostTensor a(type, {tokens, p.v_heads});
    HostTensor b(type, {tokens, p.v_heads});
    HostTensor a_log(DType::f32, {p.v_heads});
    HostTensor dt_bias(DType::f32, {p.v_heads});
    fill_uniform(1, -30.0F, 30.0F, a);
    fill_uniform(2, -30.0F, 30.0F, b);
    fill_uniform(3, -2.0F, 3.0F, a_log);
    fill_uniform(4, -1.0F, 1.0F, dt_bias);
    driver.add("a", a);
    driver.add("b", b);
    driver.add("a_log", a_log);
    driver.add("dt_bias", dt_bias);
    driver.run("gate");
    const std::vector<double> av = values_of(a);
    const std::vector<double> bv = values_of(b);
    for (std::size_t i = 0; i < av.size(); ++i) {
      const std::size_t head = i % 4;
      const double x = av[i] + double{dt_bias.as<float>()[head]};
      const double softplus = x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
      const double g = -std::exp(double{a_log.as<float>()[head]}) * softplus;
      CHECK(relative(driver["g_ready"].as<float>()[i], g) < 1e-6);
      CHECK(relative(driver["beta_ready"].as<float>()[i], 1 / (1 + std::exp(-bv[i]))) < 1e-6);
    }
  }
}

TEST_CASE("gate takes alpha, and passes on what is ready")
{
  Problem p = small_problem();
  p.gate = GateForm::alpha;
  StageDriver driver(p, {2, 1});
  HostTensor alpha(DType::f32, {2, 4});
  HostTensor beta(DType::f32, {2, 4});
  const std::vector<float> alphas{0.0F, 1.0F, 0.5F, 1e-30F, 0.999F, 1.5F, 1e-45F, 0.25F};
  std::copy(alphas.begin(), alphas.end(), alpha.as<float>());
  fill_uniform(1, 0.0F, 1.0F, beta);
  driver.add("g", alpha);
  driver.add("beta", beta);
  driver.run("gate");
  const float* g = driver["g_ready"].as<float>();
  CHECK(g[0] == -std::numeric_limits<float>::infinity());
  CHECK(g[1] == 0.0F);
  for (std::size_t i = 2; i < alphas.size(); ++i) {
    CHECK(relative(g[i], std::log(double{alphas[i]})) < 1e-6);
  }
  CHECK(std::equal(beta.as<float>(), beta.as<float>() + 8, driver["beta_ready"].as<float>()));
}

TEST_CASE("gate names the tensor that a raw gate lacks")
{
  Problem p = small_problem();
  p.gate = GateForm::raw;
  const Capacity capacity{4, 1};
  const DeviceInfo device = device_info(Device{});
  const Stage& stage = builtin_stages().find("gate");
  const std::vector<TensorView> tensors(stage.ports.size());
  const Options options;
  const StageCall call{p, capacity, device, options, stage, tensors, {}};
  const Support support = stage.find("host", DeviceType::host)->accepts(call);
  CHECK(!support.ok);
  CHECK(support.reason ==
        "gate: expected a tensor on 'a' for the raw gate and ready beta, got none");
}

TEST_CASE("qk_norm gives rows of length one, and zero for a zero row")
{
  Problem p = small_problem();
  p.activation = DType::bf16;
  const std::int64_t tokens = 70;
  HostTensor q(DType::bf16, {tokens, p.qk_heads, p.qk_dim});
  HostTensor k(DType::bf16, {tokens, p.qk_heads, p.qk_dim});
  fill_uniform(1, -2.0F, 2.0F, q);
  fill_uniform(2, -1e-3F, 1e-3F, k);  // where the epsilon matters
  std::fill_n(k.as<std::uint16_t>(), p.qk_dim, std::uint16_t{0});
  StageDriver driver(p, {tokens, 1});
  driver.add("q", q);
  driver.add("k", k);
  driver.run("qk_norm");
  for (const auto& [in, out] :
       {std::pair{q.view(), driver["q_normalized"]}, {k.view(), driver["k_normalized"]}}) {
    const std::vector<double> x = values_of(in);
    const std::vector<double> y = values_of(out);
    for (std::size_t row = 0; row < x.size(); row += 24) {
      double sum = 1e-6;
      for (std::size_t i = row; i < row + 24; ++i) sum += x[i] * x[i];
      for (std::size_t i = row; i < row + 24; ++i) {
        CHECK(std::abs(y[i] - x[i] / std::sqrt(sum)) < 1e-6);
      }
    }
  }
}

TEST_CASE("chunk_cumsum restarts at each chunk and cuts off where exp is zero")
{
  const Problem p = small_problem();
  const std::int64_t tokens = 230;
  StageDriver driver(p, {tokens, 3});
  HostTensor g(DType::f32, {tokens, p.v_heads});
  fill_uniform(1, -2.0F, 0.1F, g);
  g.as<float>()[4 * 20] = -std::numeric_limits<float>::infinity();
  g.as<float>()[4 * 21] = -1e6F;
  g.as<float>()[4 * 220 + 1] = std::nanf("");
  driver.add("g", g);
  driver.add_index("cu_seqlens", {0, 100, 100, 225});
  driver.run("chunk_index");
  driver.run("chunk_cumsum");
  const float* gc = driver["g_cumsum"].as<float>();
  for (std::int64_t head = 0; head < 4; ++head) {
    double sum = 0;
    for (std::int64_t t = 0; t < 225; ++t) {
      if (t == 0 || t == 64 || t == 100 || t == 164) sum = 0;
      const float x = g.as<float>()[4 * t + head];
      sum += std::isnan(x) ? double{x} : std::max(double{x}, -104.0);
      const float got = gc[4 * t + head];
      if (std::isnan(sum)) {
        CHECK(std::isnan(got));
      } else {
        CHECK(got == static_cast<float>(sum));
      }
    }
    for (std::int64_t t = 225; t < tokens; ++t) CHECK(std::isnan(gc[4 * t + head]));  // untouched
  }
}

TEST_CASE("kkt_solve's rows are the inverse's, zero above the diagonal and past the chunk")
{
  for (const HeadMap map : {HeadMap::grouped, HeadMap::interleaved}) {
    Problem p = small_problem();
    p.head_map = map;
    const Inputs in = Inputs::draw(p, {100, 7, 64}, Distribution::correlated, 2);
    StageDriver driver = test::make_driver(p, in);
    driver.run("chunk_index");
    driver.run("chunk_cumsum");
    driver.run("kkt_solve");
    const float* k = in.k.as<float>();
    const float* gc = driver["g_cumsum"].as<float>();
    const float* beta = in.beta.as<float>();
    const float* a = driver["A"].as<float>();
    const std::int32_t* counts = driver["chunk_counts"].as<std::int32_t>();
    const std::int32_t* table = driver["chunk_table"].as<std::int32_t>();
    double worst = 0;
    std::int64_t not_zero = 0;
    for (std::int32_t c = 0; c < counts[0]; ++c) {
      const std::int64_t first = table[4 * c + 1];
      const std::int64_t tokens = table[4 * c + 2];
      for (std::int32_t h = 0; h < p.v_heads; ++h) {
        const auto m = [&](std::int64_t i, std::int64_t j) {
          if (j >= i) return i == j ? 1.0 : 0.0;
          double dot = 0;
          for (std::int64_t d = 0; d < p.qk_dim; ++d) {
            const auto key = [&](std::int64_t t) {
              return double{k[((first + t) * p.qk_heads + p.qk_head_of(h)) * p.qk_dim + d]};
            };
            dot += key(i) * key(j);
          }
          const auto at = [&](const float* x, std::int64_t t) {
            return double{x[(first + t) * p.v_heads + h]};
          };
          return at(beta, i) * std::exp(at(gc, i) - at(gc, j)) * dot;
        };
        const auto inverse = [&](std::int64_t i, std::int64_t j) {
          return double{a[((first + i) * p.v_heads + h) * chunk_tokens + j]};
        };
        std::vector<double> m_values(static_cast<std::size_t>(tokens * tokens));
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (std::int64_t j = 0; j < tokens; ++j) {
            m_values[static_cast<std::size_t>(i * tokens + j)] = m(i, j);
          }
        }
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (std::int64_t j = 0; j < tokens; ++j) {
            double product = 0;
            for (std::int64_t r = 0; r < tokens; ++r) {
              product += m_values[static_cast<std::size_t>(i * tokens + r)] * inverse(r, j);
            }
            worst = std::max(worst, std::abs(product - (i == j ? 1.0 : 0.0)));
          }
          for (std::int64_t j = i + 1; j < chunk_tokens; ++j) not_zero += inverse(i, j) != 0.0;
        }
      }
    }
    CHECK(worst < 2e-6);
    CHECK(not_zero == 0);
  }
}

TEST_CASE("zero_padding clears what stands before and behind the sequences, in any type")
{
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    Problem p = small_problem();
    p.activation = type;
    StageDriver driver(p, {100, 2});
    driver.add_poisoned("o", type, {100, p.v_heads, p.v_dim});
    driver.add_index("cu_seqlens", {3, 10, 90});
    driver.run("zero_padding");
    const std::vector<double> o = values_of(driver["o"]);
    for (std::size_t i = 0; i < o.size(); ++i) {
      const std::size_t token = i / 64;
      const bool owned = token >= 3 && token < 90;
      if (owned ? !std::isnan(o[i]) : o[i] != 0.0) {
        FAIL_CHECK("token ", token);
        break;
      }
    }
  }
}
