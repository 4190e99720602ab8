#include <gdnflow/compare.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/recipes.hpp>

#include "gpu/pairwise.hpp"
#include "host/convert.hpp"
#include "support/device_tensor.hpp"
#include "support/gpu.hpp"
#include "support/tensor.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

// Every recipe on the GPU against the fp64 oracle over lengths, heads, dims, types, layouts,
// options and distributions: a pairwise cover, or with GDNFLOW_TEST_FULL=1 the product of those
// that matter most. Padding and outputs are poisoned with NaN, the arena too. A line for each case
// that fails names everything in it.

using namespace gdnflow;
using namespace gdnflow::test;

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

using Lengths = std::vector<std::int64_t>;

std::vector<Lengths> all_lengths() {
  std::vector<Lengths> list;
  for (const std::int64_t length :
       {0,  1,   2,   15,  16,  17,  31,  57,   59,   61,   63,   64,  65,
        75, 100, 127, 128, 129, 192, 500, 1000, 1024, 1025, 2048, 8192}) {
    list.push_back({length});
  }
  for (const Lengths& offsets : {Lengths{0, 256, 500, 1000},
                                 {0, 15, 100, 300, 1200, 2000},
                                 {0, 1, 100, 300, 1200, 2048},
                                 {0, 101, 303, 1205, 3007, 4096}}) {
    Lengths& lengths = list.emplace_back();
    for (std::size_t i = 1; i < offsets.size(); ++i) {
      lengths.push_back(offsets[i] - offsets[i - 1]);
    }
  }
  list.push_back({1238, 1199, 519});
  list.push_back({0, 100, 64});
  list.push_back({100, 0, 64});
  list.push_back({100, 64, 0});
  list.push_back({0, 0, 0});
  list.push_back(Lengths(300, 16));
  return list;
}

constexpr std::array<std::pair<int, int>, 9> heads{
    {{1, 1}, {2, 4}, {2, 8}, {3, 3}, {4, 12}, {8, 24}, {16, 16}, {16, 48}, {16, 64}}};
constexpr std::array<DType, 3> state_types{DType::f32, DType::bf16, DType::f16};
constexpr std::array<Distribution, 9> kinds{
    Distribution::random_decay,   Distribution::mixed,      Distribution::no_decay,
    Distribution::quarter_frozen, Distribution::correlated, Distribution::model,
    Distribution::strong,         Distribution::hard_reset, Distribution::huge};

/// The factors of a case, in the order of a row of choices.
enum Factor { recipe, length, head, dim, type, kind, options, state_type, layout, mode, count };

/// Bits of the factor `options`.
enum Option {
  initial_state = 1,
  raw_gate = 2,
  logit_beta = 4,
  qk_norm = 8,
  wide_index = 16,
  interleaved = 32,
  zero_padding = 64,
  no_final_state = 128,
  option_sets = 256
};

/// A recipe, with each tile where its kernel has a choice.
struct Form {
  std::string recipe;
  VariantOverrides overrides;
  std::string text;
};

struct Case {
  Form form;
  Problem problem;
  Lengths lengths;
  Distribution distribution{};
  bool graph = false;

  Capacity capacity() const {
    // Room for more than there is: padding rows, and a sequence that stays empty.
    return {offsets_of(lengths).back() + 37, static_cast<std::int64_t>(lengths.size()) + 1};
  }
  std::string text() const {
    const std::size_t shown = std::min<std::size_t>(lengths.size(), 6);
    return fmt::format("{} {}: lengths [{}{}], {}, {}", form.text, graph ? "graph" : "eager",
                       fmt::join(lengths.begin(), lengths.begin() + shown, ","),
                       shown < lengths.size() ? ",..." : "", to_string(problem),
                       to_string(distribution));
  }
};

/// What this GPU can run at all; the rest has no say in the cover.
std::vector<Form> runnable_forms() {
  std::vector<Form> forms;
  for (const Recipe& r : recipes()) {
    if (is_excluded(r.id)) continue;
    const Capacity some{1024, 1};
    if (!can_make_pipeline(r.id, {}, some, device_info(gpu))) continue;
    const Form plain{std::string(r.id), {}, std::string(r.id)};
    const std::size_t before = forms.size();
    if (r.id != "auto") {
      const Pipeline pipeline = make_pipeline(r.id, {}, some, device_info(gpu));
      for (const Node& node : pipeline.nodes()) {
        const std::vector<OptionSpec>& options = node.chosen().options;
        const auto spec = std::find_if(options.begin(), options.end(),
                                       [](const OptionSpec& o) { return o.name == "value_tile"; });
        if (spec == options.end()) continue;
        for (const std::int64_t value : spec->allowed) {
          if (value == 0) continue;  // one of the others
          Form form = plain;
          form.overrides = {{node.stage.name, {node.chosen().id, {{spec->name, value}}}}};
          form.text = fmt::format("{} {}:value_tile={}", r.id, node.stage.name, value);
          if (can_make_pipeline(r.id, {}, some, device_info(gpu), form.overrides)) {
            forms.push_back(std::move(form));
          }
        }
      }
    }
    if (forms.size() == before) forms.push_back(plain);
  }
  return forms;
}

Case make_case(const std::vector<int>& row, const std::vector<Form>& forms,
               const std::vector<Lengths>& lengths) {
  Case c;
  c.form = forms[row[recipe]];
  c.lengths = lengths[row[length]];
  c.distribution = kinds[row[kind]];
  c.graph = row[mode] == 1;
  Problem& p = c.problem;
  p.qk_heads = heads[row[head]].first;
  p.v_heads = heads[row[head]].second;
  p.qk_dim = p.v_dim = row[dim] == 0 ? 128 : 64;
  p.activation = row[type] == 0 ? DType::bf16 : DType::f16;
  p.state = state_types[row[state_type]];
  p.state_layout = row[layout] == 0 ? StateLayout::kv : StateLayout::vk;
  const int set = row[options];
  p.initial_state = (set & initial_state) != 0;
  p.gate = (set & raw_gate) != 0 ? GateForm::raw : GateForm::log_decay;
  p.beta = (set & logit_beta) != 0 ? BetaForm::logit : BetaForm::ready;
  p.qk_norm = (set & qk_norm) != 0;
  p.index = (set & wide_index) != 0 ? DType::i64 : DType::i32;
  p.head_map = (set & interleaved) != 0 ? HeadMap::interleaved : HeadMap::grouped;
  p.zero_padding = (set & zero_padding) != 0;
  p.final_state = (set & no_final_state) == 0;
  return c;
}

/// The external tensors of a case, drawn on the device.
class Tensors {
 public:
  explicit Tensors(const Case& c) : case_(c), offsets_(offsets_of(c.lengths)) {
    const Problem& p = c.problem;
    const Capacity capacity = c.capacity();
    owned_ = offsets_.back();
    tokens_ = capacity.max_tokens;
    offsets_.resize(static_cast<std::size_t>(capacity.max_sequences) + 1, owned_);
    draw("q", query_input(p), p.activation, {tokens_, p.qk_heads, p.qk_dim});
    draw("k", key_input(p), p.activation, {tokens_, p.qk_heads, p.qk_dim});
    draw("v", InputKind::v, p.activation, {tokens_, p.v_heads, p.v_dim});
    draw_gates();
    const bool kv = p.state_layout == StateLayout::kv;
    const std::vector<std::int64_t> states{capacity.max_sequences, p.v_heads,
                                           kv ? p.qk_dim : p.v_dim, kv ? p.v_dim : p.qk_dim};
    if (p.initial_state) {
      fill_input(InputKind::initial_state, c.distribution, seed,
                 make("initial_state", p.state, states));
    }
    if (p.final_state) make("final_state", p.state, states);
    make("o", p.activation, {tokens_, p.v_heads, p.v_dim});
    upload_offsets();
  }

  Bindings bindings() const {
    Bindings list;
    for (const auto& [name, tensor] : tensors_) list.emplace_back(name, tensor->view());
    return list;
  }
  TensorView view(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? TensorView{} : found->second->view();
  }
  std::int64_t owned() const noexcept { return owned_; }

  OracleInputs oracle_inputs() const {
    return {view("q"),
            view("k"),
            view("v"),
            oracle_g_->view(),
            oracle_beta_->view(),
            view("initial_state"),
            offsets_};
  }

 private:
  static constexpr std::uint64_t seed = 7;

  const TensorView& make(const std::string& name, DType dtype,
                         const std::vector<std::int64_t>& extents) {
    return (tensors_[name] = std::make_unique<DeviceTensor>(dtype, extents))->view();
  }

  /// Draws the rows that sequences own; the others keep their poison.
  TensorView owned_rows(TensorView view) const {
    view.extents[0] = owned_;
    return view;
  }
  void draw(const std::string& name, InputKind input, DType dtype,
            const std::vector<std::int64_t>& extents) {
    fill_input(input, case_.distribution, seed, owned_rows(make(name, dtype, extents)));
  }

  /// Gates in the form that the problem takes, and as the oracle takes them.
  void draw_gates() {
    const Problem& p = case_.problem;
    const std::vector<std::int64_t> extents{tokens_, p.v_heads};
    oracle_g_ = std::make_unique<DeviceTensor>(DType::f32, extents);
    oracle_beta_ = std::make_unique<DeviceTensor>(DType::f32, extents);
    if (p.gate == GateForm::raw) {
      const auto a = draw_raw("a", seed + 1, -4.0F, 0.0F);
      const auto a_log = draw_uniform("a_log", seed + 2, -2.0F, 1.0F, p.v_heads);
      const auto dt_bias = draw_uniform("dt_bias", seed + 3, -1.0F, 1.0F, p.v_heads);
      HostTensor g(DType::f32, extents);
      for (std::size_t i = 0; i < a.size(); ++i) {
        const std::size_t h = i % static_cast<std::size_t>(p.v_heads);
        const double x = double{a[i]} + double{dt_bias[h]};
        g.as<float>()[i] =
            static_cast<float>(-std::exp(double{a_log[h]}) * std::log1p(std::exp(x)));
      }
      oracle_g_->upload(g.view());
    } else if (p.gate == GateForm::alpha) {
      fill_uniform(seed + 5, 0.6F, 1.0F, owned_rows(make("g", DType::f32, extents)));
    } else {
      draw("g", InputKind::g, DType::f32, extents);
      copy(view("g"), *oracle_g_);
    }
    if (p.beta == BetaForm::logit) {
      const auto b = draw_raw("b", seed + 4, -3.0F, 3.0F);
      HostTensor beta(DType::f32, extents);
      for (std::size_t i = 0; i < b.size(); ++i) {
        beta.as<float>()[i] = static_cast<float>(1.0 / (1.0 + std::exp(-double{b[i]})));
      }
      oracle_beta_->upload(beta.view());
    } else {
      draw("beta", InputKind::beta, DType::f32, extents);
      copy(view("beta"), *oracle_beta_);
    }
  }
  static void copy(const TensorView& from, const DeviceTensor& to) {
    REQUIRE(cudaMemcpy(to.view().data, from.data, static_cast<std::size_t>(from.bytes()),
                       cudaMemcpyDeviceToDevice) == cudaSuccess);
  }

  /// A raw gate in the activations' type; gives the numbers of the rows that sequences own.
  std::vector<float> draw_raw(const std::string& name, std::uint64_t s, float low, float high) {
    const TensorView& tensor =
        make(name, case_.problem.activation, {tokens_, case_.problem.v_heads});
    fill_uniform(s, low, high, owned_rows(tensor));
    const HostTensor host(tensor.dtype, {tokens_, case_.problem.v_heads});
    tensors_[name]->download(host.view());
    std::vector<float> values(static_cast<std::size_t>(owned_rows(tensor).elements()));
    host::load(host.view(), 0, static_cast<std::int64_t>(values.size()), values.data());
    return values;
  }
  std::vector<float> draw_uniform(const std::string& name, std::uint64_t s, float low, float high,
                                  std::int64_t elements) {
    fill_uniform(s, low, high, make(name, DType::f32, {elements}));
    const HostTensor host(DType::f32, {elements});
    tensors_[name]->download(host.view());
    return {host.as<float>(), host.as<float>() + elements};
  }

  void upload_offsets() {
    const DType index = case_.problem.index;
    const HostTensor host(index, {static_cast<std::int64_t>(offsets_.size())});
    host::dispatch_index(index, [&]<class T>(std::type_identity<T>) {
      for (std::size_t i = 0; i < offsets_.size(); ++i) {
        host.as<T>()[i] = static_cast<T>(offsets_[i]);
      }
    });
    tensors_["cu_seqlens"] = std::make_unique<DeviceTensor>(host.view());
  }

  Case case_;
  std::int64_t owned_ = 0;
  std::int64_t tokens_ = 0;
  std::vector<std::int64_t> offsets_;
  std::map<std::string, std::unique_ptr<DeviceTensor>> tensors_;
  std::unique_ptr<DeviceTensor> oracle_g_;
  std::unique_ptr<DeviceTensor> oracle_beta_;
};

/// fp64 device memory.
class Doubles {
 public:
  explicit Doubles(std::int64_t elements) : memory_(DType::i64, {elements}) {}
  double* data() const noexcept { return memory_.view().as<double>(); }

 private:
  DeviceTensor memory_;
};

/// Relative RMS that rounding to a type alone brings, at most.
double rounding_of(DType type) {
  return type == DType::bf16 ? 1.7e-3 : type == DType::f16 ? 2.2e-4 : 0.0;
}

/// The project's bounds on relative RMS; docs/numerics.md says where they come from.
double most_error(const Case& c, bool output) {
  if (c.problem.activation == DType::f16) return 1e-3;
  return output && c.distribution == Distribution::correlated ? 8e-3 : 5e-3;
}

bool padding_is(const TensorView& o, std::int64_t owned, unsigned char value) {
  TensorView rows = o;
  rows.extents[0] = owned;
  const auto skipped = static_cast<std::size_t>(rows.bytes());
  std::vector<unsigned char> padding(static_cast<std::size_t>(o.bytes()) - skipped);
  REQUIRE(cudaMemcpy(padding.data(), o.as<char>() + skipped, padding.size(),
                     cudaMemcpyDeviceToHost) == cudaSuccess);
  for (const unsigned char byte : padding) {
    if (byte != value) return false;
  }
  return true;
}

/// Runs a case and gives what is wrong with it; empty where nothing is.
std::string failure_of(const Case& c) {
  const Tensors x(c);
  Plan plan(
      make_pipeline(c.form.recipe, c.problem, c.capacity(), device_info(gpu), c.form.overrides),
      {.reuse = true, .poison = true});
  const auto executor =
      c.graph ? make_graph_executor(std::move(plan)) : make_eager_executor(std::move(plan));
  executor->bind(x.bindings());
  executor->build();
  executor->run();
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

  TensorView o = x.view("o");
  const TensorView state = x.view("final_state");
  const Doubles expected_o(o.elements());
  const Doubles expected_state(
      std::max<std::int64_t>(state.data == nullptr ? 0 : state.elements(), 1));
  oracle_on_device(c.problem, x.oracle_inputs(), expected_o.data(),
                   state.data == nullptr ? nullptr : expected_state.data());

  std::string wrong;
  if (!padding_is(o, x.owned(), c.problem.zero_padding ? 0x00 : 0xff)) wrong += "; padding of o";
  o.extents[0] = x.owned();
  const auto check = [&](const char* name, const Comparison& got, double most) {
    if (!got.within(most)) {
      wrong += fmt::format("; {}: {} (at most {:.1e})", name, to_string(got), most);
    }
  };
  const Comparison output = compare_on_device(o, expected_o.data());
  check("o", output, most_error(c, true));
  if (c.distribution == Distribution::random_decay && output.over_tolerance > 0) {
    wrong += fmt::format("; o: {} elements over 5e-3 + 5e-3 |expected|", output.over_tolerance);
  }
  if (state.data != nullptr) {
    check("final_state", compare_on_device(state, expected_state.data()),
          std::hypot(most_error(c, false), rounding_of(c.problem.state)));
  }
  return wrong;
}

std::vector<std::vector<int>> rows_of(const std::vector<int>& sizes) {
  std::vector<std::vector<int>> rows = pairwise_cover(sizes);
  const char* full = std::getenv("GDNFLOW_TEST_FULL");
  if (full == nullptr || std::string_view(full) == "0") return rows;
  // The product of what decides the arithmetic; the rest is drawn.
  std::mt19937 random(2);
  rows.clear();
  std::vector<int> row(sizes.size(), 0);
  while (true) {
    for (const int drawn : {options, state_type, layout, mode}) {
      row[drawn] = static_cast<int>(random() % static_cast<unsigned>(sizes[drawn]));
    }
    rows.push_back(row);
    int f = kind;
    while (f >= 0 && ++row[f] == sizes[f]) row[f--] = 0;
    if (f < 0) return rows;
  }
}

}  // namespace

TEST_CASE("every recipe agrees with the oracle over the cover of problems")
{
  GDNFLOW_REQUIRE_GPU();
  const std::vector<Lengths> lengths = all_lengths();
  const std::vector<Form> forms = runnable_forms();
  for (const char* id : {"naive", "residual", "recurrent"}) {
    CHECK_MESSAGE(std::any_of(forms.begin(), forms.end(),
                              [&](const Form& form) { return form.recipe == id; }),
                  id, " cannot run here");
  }
  REQUIRE_FALSE(forms.empty());
  std::vector<int> sizes(count);
  sizes[recipe] = static_cast<int>(forms.size());
  sizes[length] = static_cast<int>(lengths.size());
  sizes[head] = static_cast<int>(heads.size());
  sizes[dim] = 2;
  sizes[type] = 2;
  sizes[kind] = static_cast<int>(kinds.size());
  // All pairs of 256 sets of options with every length would be many rows for little: they are
  // drawn below, so that each option appears in half of the rows.
  sizes[options] = 1;
  sizes[state_type] = static_cast<int>(state_types.size());
  sizes[layout] = 2;
  sizes[mode] = 2;
  std::mt19937 random(3);
  int run = 0;
  int refused = 0;
  for (std::vector<int> row : rows_of(sizes)) {
    row[options] = static_cast<int>(random() % option_sets);
    const Case c = make_case(row, forms, lengths);
    if (!can_make_pipeline(c.form.recipe, c.problem, c.capacity(), device_info(gpu),
                           c.form.overrides)) {
      ++refused;
      continue;
    }
    ++run;
    std::string wrong;
    try {
      wrong = failure_of(c);
    } catch (const Error& error) {
      wrong = fmt::format("; {}", error.what());
    }
    CHECK_MESSAGE(wrong.empty(), c.text(), wrong);
  }
  std::printf("pipelines: %d cases of %zu forms run, %d refused\n", run, forms.size(), refused);
  // Kernels for sm_90a, with two tiles each, refuse head dim 64, which is that of half of the rows.
  CHECK(refused * 2 < run);
}

TEST_CASE("gates made ready inside a kernel have the bits of the stage's")
{
  GDNFLOW_REQUIRE_GPU();
  using Gates = std::pair<GateForm, BetaForm>;
  constexpr std::array<Gates, 4> forms_of_gates{{{GateForm::raw, BetaForm::logit},
                                                 {GateForm::raw, BetaForm::ready},
                                                 {GateForm::alpha, BetaForm::logit},
                                                 {GateForm::log_decay, BetaForm::logit}}};
  const auto outputs_of = [](const Case& c, bool inside) {
    const Tensors x(c);
    Pipeline pipeline =
        make_pipeline(c.form.recipe, c.problem, c.capacity(), device_info(gpu), c.form.overrides);
    CHECK((pipeline.node_index("gate") < 0) == inside);
    const auto executor = make_graph_executor(Plan(std::move(pipeline), {.poison = true}));
    executor->bind(x.bindings());
    executor->build();
    executor->run();
    std::vector<std::byte> bytes;
    for (const char* const name : {"o", "final_state"}) {
      const TensorView view = x.view(name);
      const std::size_t before = bytes.size();
      bytes.resize(before + static_cast<std::size_t>(view.bytes()));
      REQUIRE(cudaMemcpy(&bytes[before], view.data, bytes.size() - before,
                         cudaMemcpyDeviceToHost) == cudaSuccess);
    }
    return bytes;
  };
  int run = 0;
  for (const Form& form : runnable_forms()) {
    if (form.recipe != "one-pass" && form.recipe != "recurrent") continue;
    for (const Lengths& lengths : {Lengths{700, 1, 0, 64}, Lengths(40, 30), Lengths{4000, 200}}) {
      for (const Gates& gates : forms_of_gates) {
        for (const DType type : {DType::bf16, DType::f16}) {
          Case c{form, {}, lengths, Distribution::model, true};
          c.problem.qk_heads = 2;
          c.problem.v_heads = 8;
          c.problem.activation = type;
          c.problem.gate = gates.first;
          c.problem.beta = gates.second;
          c.problem.qk_norm = gates.first == GateForm::raw;
          CAPTURE(c.text());
          const std::vector<std::byte> inside = outputs_of(c, true);
          c.form.overrides["gate"] = {"naive", {}};
          CHECK(outputs_of(c, false) == inside);
          ++run;
        }
      }
    }
  }
  CHECK(run >= 16);  // recurrent runs everywhere
}
