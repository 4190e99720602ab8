#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/session.hpp>

#include "bound_plan.hpp"
#include "executor_base.hpp"
#include "prefill_tensors.hpp"
#include "workspace.hpp"

#if GDNFLOW_WITH_CUDA
#include "cuda.hpp"
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>

namespace gdnflow {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, "prefill session: " + message);
}

/// Which number of rows a tensor's first extent follows.
enum class Rows { fixed, tokens, sequences };

struct RowRule {
  Rows rows = Rows::fixed;
  std::int64_t offset = 0;
};

using RowRules = std::array<RowRule, tensor_names.size()>;

RowRules row_rules(const Pipeline& pipeline, const TensorEdges& edges) {
  RowRules rules;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    if (edges[i] < 0) continue;
    const Extent& first = pipeline.edges()[edges[i]].extents.front();
    // A pool that the caller indexes has as many rows as it has, whatever is in the batch.
    if (!evaluate(first, pipeline.problem(), pipeline.capacity())) continue;
    if (first.symbol == "T") rules[i] = {Rows::tokens, first.offset};
    if (first.symbol == "N" || first.symbol == "PI" || first.symbol == "PO") {
      rules[i] = {Rows::sequences, first.offset};
    }
  }
  return rules;
}

std::int64_t free_device_memory([[maybe_unused]] Device device) {
#if GDNFLOW_WITH_CUDA
  if (device.type == DeviceType::cuda) {
    const cuda::DeviceGuard guard(device.index);
    const cuda::RelaxedCaptureGuard relaxed;
    std::size_t free = 0;
    std::size_t total = 0;
    cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free);
  }
#endif
  return 0;
}

std::unique_ptr<Executor> make_one(const Plan& plan, bool graphs, ExecutorOptions options) {
  const bool on_host = plan.pipeline().device().device.type == DeviceType::host;
  if (on_host || !graphs) return make_executor(plan, std::move(options));
  return make_graph_executor(plan, std::move(options));
}

}  // namespace

struct PrefillSession::Impl {
  struct Bucket {
    Plan plan;
    std::unique_ptr<Executor> executor{};  ///< null until something is built
    Bindings bound{};                      ///< in force
    Bindings next{};                       ///< for the call that is being prepared; no allocation
  };

  Device device;
  SessionOptions options;
  std::vector<Capacity> capacities;
  std::vector<Bucket> buckets;
  TensorEdges edges{};  ///< only which there are; pipelines of several buckets may number them
                        ///< differently
  RowRules rules{};
  std::int64_t arena_bytes = 0;
  ArenaMemory own{nullptr, nullptr};
  void* arena = nullptr;
  SessionStats stats;

  bool any_built() const {
    return std::any_of(buckets.begin(), buckets.end(),
                       [](const Bucket& bucket) { return bucket.executor != nullptr; });
  }

  void check_presence(const PrefillTensors& tensors) const {
    gdnflow::check_presence(buckets.front().plan.pipeline(), edges, tensors, "prefill session");
  }

  /// The fewest rows of the tensors under a rule. Errors: invalid_argument where one has less than
  /// `least`.
  std::int64_t shared_rows(const PrefillTensors& tensors, Rows rows, std::int64_t least) const {
    std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    for (std::size_t i = 0; i < rules.size(); ++i) {
      if (edges[i] < 0 || rules[i].rows != rows) continue;
      const TensorView& tensor = tensors.*tensor_names[i].member;
      const bool countable = tensor.rank > 0 && tensor.rank <= TensorView::max_rank;
      const std::int64_t there = countable ? tensor.extents[0] - rules[i].offset : -1;
      if (there < least) {
        refuse(fmt::format("{}: expected at least {} rows for the {} of the call, got {}",
                           tensor_names[i].edge, least + rules[i].offset,
                           rows == Rows::tokens ? "tokens" : "sequences", describe(tensor)));
      }
      fewest = std::min(fewest, there);
    }
    return fewest;
  }

  /// What a bucket is to be bound to, in its `next`.
  void propose(Bucket& bucket, const PrefillTensors& tensors, std::int64_t token_rows,
               std::int64_t sequence_rows) const {
    std::size_t at = 0;
    for (std::size_t i = 0; i < rules.size(); ++i) {
      if (edges[i] < 0) continue;
      if (at == bucket.next.size()) bucket.next.emplace_back(tensor_names[i].edge, TensorView{});
      TensorView& view = bucket.next[at++].second;
      view = tensors.*tensor_names[i].member;
      if (rules[i].rows == Rows::fixed) continue;
      view.extents[0] =
          (rules[i].rows == Rows::tokens ? token_rows : sequence_rows) + rules[i].offset;
    }
  }

  void build(Bucket& bucket) {
    // Tensors are looked at before memory is asked for.
    BoundPlan probe(bucket.plan, bucket.plan.pipeline().id(), {.fewer_rows = true});
    EdgeTensors resolved;
    probe.resolve(bucket.next, resolved);
    probe.propose(resolved);
    if (arena == nullptr && arena_bytes > 0) {
      own = allocate_arena(std::max_element(buckets.begin(), buckets.end(),
                                            [](const Bucket& a, const Bucket& b) {
                                              return a.plan.arena_bytes() < b.plan.arena_bytes();
                                            })
                               ->plan,
                           arena_bytes);
      arena = own.get();
    }
    const std::int64_t free_before = free_device_memory(device);
    std::unique_ptr<Executor> executor = make_one(
        bucket.plan, options.graphs,
        {arena, arena_bytes, {}, true, options.programmatic, options.prefill.behind_callers});
    executor->bind(bucket.next);
    executor->build();
    stats.graph_bytes += std::max<std::int64_t>(free_before - free_device_memory(device), 0);
    bucket.executor = std::move(executor);
    bucket.bound = bucket.next;
    ++stats.captures;
  }

  void bind(Bucket& bucket) {
    const auto same = [](const auto& a, const auto& b) { return same_tensor(a.second, b.second); };
    if (std::equal(bucket.bound.begin(), bucket.bound.end(), bucket.next.begin(), same)) return;
    bucket.executor->bind(bucket.next);
    std::swap(bucket.bound, bucket.next);
    ++stats.rebinds;
  }
};

std::vector<Capacity> capacity_ladder(const Capacity& most, std::int64_t least_tokens,
                                      double factor) {
  if (most.max_tokens < 1 || most.max_sequences < 1) {
    throw Error(ErrorCode::invalid_argument,
                "capacity ladder: expected a capacity of at least 1 token and 1 sequence, got " +
                    to_string(most));
  }
  if (least_tokens < 1 || !(factor > 1)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("capacity ladder: expected at least 1 token, growing by a factor above "
                            "1, got {} and {}",
                            least_tokens, factor));
  }
  std::vector<Capacity> ladder;
  auto tokens = static_cast<double>(least_tokens);
  while (tokens < static_cast<double>(most.max_tokens)) {
    const auto chunks = static_cast<std::int64_t>(std::ceil(tokens / chunk_tokens));
    const Capacity rung{chunks * chunk_tokens, most.max_sequences};
    if (rung.max_tokens >= most.max_tokens) break;
    if (ladder.empty() || rung != ladder.back()) ladder.push_back(rung);
    tokens *= factor;
  }
  ladder.push_back(most);
  return ladder;
}

PrefillSession::PrefillSession(const Problem& problem, std::vector<Capacity> buckets, Device device,
                               SessionOptions options)
    : impl_(std::make_unique<Impl>()) {
  if (buckets.empty()) refuse("buckets: expected at least one capacity, got none");
  if (!problem.cu_seqlens) {
    refuse("expected a problem with cu_seqlens, got dense sequences");
  }
  if (options.prefill.behind_callers && !options.programmatic) {
    refuse("behind_callers: expected programmatic launches with it, got them switched off");
  }
  for (const Capacity& capacity : buckets) validate(problem, capacity);
  const auto order = [](const Capacity& c) { return std::tie(c.max_tokens, c.max_sequences); };
  std::sort(buckets.begin(), buckets.end(),
            [&](const Capacity& a, const Capacity& b) { return order(a) < order(b); });
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());

  Impl& session = *impl_;
  session.device = device;
  session.options = std::move(options);
  const PrefillOptions& prefill = session.options.prefill;
  const DeviceInfo info = device_info(device);
  for (const Capacity& capacity : buckets) {
    session.buckets.push_back(
        {Plan(make_pipeline(prefill.recipe, problem, capacity, info, prefill.overrides))});
    session.arena_bytes = std::max(session.arena_bytes, session.buckets.back().plan.arena_bytes());
  }
  session.capacities = std::move(buckets);
  session.edges = tensor_edges(session.buckets.front().plan.pipeline());
  session.rules = row_rules(session.buckets.front().plan.pipeline(), session.edges);
  session.stats.workspace_bytes = workspace_bytes_for(session.arena_bytes);
}

PrefillSession::~PrefillSession() = default;
PrefillSession::PrefillSession(PrefillSession&&) noexcept = default;
PrefillSession& PrefillSession::operator=(PrefillSession&&) noexcept = default;

std::span<const Capacity> PrefillSession::buckets() const noexcept { return impl_->capacities; }

std::size_t PrefillSession::bucket_for(std::int64_t tokens, std::int64_t sequences) const {
  if (tokens < 0 || sequences < 0) {
    refuse(fmt::format("expected at least 0 tokens and 0 sequences, got {} and {}", tokens,
                       sequences));
  }
  const std::vector<Capacity>& all = impl_->capacities;
  const auto found = std::find_if(all.begin(), all.end(), [&](const Capacity& capacity) {
    return capacity.max_tokens >= tokens && capacity.max_sequences >= sequences;
  });
  if (found == all.end()) {
    refuse(
        fmt::format("expected what a bucket holds, the largest {}, got {} tokens and {} "
                    "sequences",
                    to_string(all.back()), tokens, sequences));
  }
  return static_cast<std::size_t>(found - all.begin());
}

std::int64_t PrefillSession::workspace_bytes(std::size_t bucket) const {
  if (bucket >= impl_->buckets.size()) {
    refuse(
        fmt::format("bucket: expected a number below {}, got {}", impl_->buckets.size(), bucket));
  }
  return workspace_bytes_for(impl_->buckets[bucket].plan.arena_bytes());
}

std::int64_t PrefillSession::workspace_bytes() const noexcept {
  return impl_->stats.workspace_bytes;
}

void PrefillSession::set_workspace(void* memory, std::int64_t bytes) {
  Impl& session = *impl_;
  if (session.any_built()) refuse("workspace: expected it before anything is built");
  if (const std::string wrong = workspace_refusal(session.arena_bytes, memory, bytes);
      !wrong.empty()) {
    refuse(wrong);
  }
  session.arena = session.arena_bytes == 0 ? nullptr : aligned_arena(memory);
}

void PrefillSession::prepare(const PrefillTensors& tensors) {
  Impl& session = *impl_;
  session.check_presence(tensors);
  const std::int64_t tokens = session.shared_rows(tensors, Rows::tokens, 0);
  const std::int64_t sequences = session.shared_rows(tensors, Rows::sequences, 0);
  for (std::size_t i = 0; i < session.buckets.size(); ++i) {
    Impl::Bucket& bucket = session.buckets[i];
    if (bucket.executor != nullptr) continue;
    session.propose(bucket, tensors, std::min(tokens, session.capacities[i].max_tokens),
                    std::min(sequences, session.capacities[i].max_sequences));
    session.build(bucket);
  }
}

const Capacity& PrefillSession::run(const PrefillTensors& tensors, std::int64_t tokens,
                                    std::int64_t sequences, Stream stream) {
  Impl& session = *impl_;
  const std::size_t index = bucket_for(tokens, sequences);
  const Capacity& capacity = session.capacities[index];
  Impl::Bucket& bucket = session.buckets[index];
  session.check_presence(tensors);
  const std::int64_t rows = session.shared_rows(tensors, Rows::tokens, tokens);
  (void)session.shared_rows(tensors, Rows::sequences, sequences);
  session.propose(bucket, tensors, std::min(rows, capacity.max_tokens), sequences);
  if (bucket.executor == nullptr) {
    session.build(bucket);
  } else {
    session.bind(bucket);
    ++session.stats.hits;
  }
  bucket.executor->run(stream);
  ++session.stats.calls;
  return capacity;
}

SessionStats PrefillSession::stats() const noexcept { return impl_->stats; }

}  // namespace gdnflow
