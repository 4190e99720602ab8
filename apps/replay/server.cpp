#include "replay/server.hpp"

#include <gdnflow/cache.hpp>

#include "common/tensors.hpp"

#include <utility>

namespace gdnflow::apps::replay {
namespace {

class SessionServer final : public Server {
 public:
  SessionServer(const Problem& problem, std::vector<Capacity> buckets, Device device,
                const SessionOptions& options, const PrefillTensors& tensors)
      : name_(device.type == DeviceType::host ? "session"
              : options.graphs                ? "graph"
                                              : "eager"),
        session_(problem, std::move(buckets), device, options) {
    session_.prepare(tensors);
  }

  std::string name() const override { return name_; }

  std::int64_t call(const PrefillTensors& tensors, std::int64_t tokens, std::int64_t sequences,
                    Stream stream) override {
    return session_.run(tensors, tokens, sequences, stream).max_tokens;
  }

  Json counts() const override {
    const SessionStats stats = session_.stats();
    return {{"calls", stats.calls},
            {"hits", stats.hits},
            {"captures", stats.captures},
            {"rebinds", stats.rebinds},
            {"workspace_bytes", stats.workspace_bytes},
            {"graph_bytes", stats.graph_bytes}};
  }

 private:
  std::string name_;
  PrefillSession session_;
};

class ShapeServer final : public Server {
 public:
  ShapeServer(const Problem& problem, Device device, const PrefillOptions& options)
      : key_{options.recipe, problem, {}, options.overrides, device}, cache_(most_shapes) {}

  std::string name() const override { return "per-shape"; }

  std::int64_t call(const PrefillTensors& t, std::int64_t tokens, std::int64_t sequences,
                    Stream stream) override {
    key_.capacity = {tokens, sequences};
    const Bindings bindings = bindings_of(t, tokens, sequences);
    // A step waits for its end, so what is evicted here does not run any more.
    cache_.get(key_, bindings)->run(stream);
    return tokens;
  }

  Json counts() const override {
    const GraphCacheStats stats = cache_.stats();
    return {{"calls", stats.hits + stats.misses},
            {"hits", stats.hits},
            {"captures", stats.misses},
            {"evictions", stats.evictions},
            {"workspace_bytes", stats.arena_bytes}};
  }

 private:
  static constexpr std::size_t most_shapes = 16;

  GraphKey key_;
  GraphCache cache_;
};

}  // namespace

Bindings bindings_of(const PrefillTensors& t, std::int64_t tokens, std::int64_t sequences) {
  Bindings bindings{{"q", first_rows(t.q, tokens)},
                    {"k", first_rows(t.k, tokens)},
                    {"v", first_rows(t.v, tokens)},
                    {"g", first_rows(t.g, tokens)},
                    {"beta", first_rows(t.beta, tokens)},
                    {"o", first_rows(t.o, tokens)},
                    {"cu_seqlens", first_rows(t.cu_seqlens, sequences + 1)},
                    {"prefix_lens", first_rows(t.prefix_lens, sequences)},
                    {"state_indices", first_rows(t.state_indices, sequences)},
                    {"has_initial_state", first_rows(t.has_initial_state, sequences)},
                    {"initial_state", t.initial_state},
                    {"final_state", t.final_state}};
  if (t.output_state_indices.data != nullptr) {
    bindings.emplace_back("output_state_indices", first_rows(t.output_state_indices, sequences));
  }
  if (t.checkpoints.data != nullptr) {
    bindings.emplace_back("checkpoints", t.checkpoints);
    bindings.emplace_back("checkpoint_state_indices", t.checkpoint_state_indices);
  }
  return bindings;
}

std::unique_ptr<Server> make_session_server(const Problem& problem, std::vector<Capacity> buckets,
                                            Device device, const SessionOptions& options,
                                            const PrefillTensors& tensors) {
  return std::make_unique<SessionServer>(problem, std::move(buckets), device, options, tensors);
}

std::unique_ptr<Server> make_shape_server(const Problem& problem, Device device,
                                          const PrefillOptions& options) {
  return std::make_unique<ShapeServer>(problem, device, options);
}

}  // namespace gdnflow::apps::replay
