#pragma once

#include <gdnflow/executor.hpp>
#include <gdnflow/prefill.hpp>
#include <gdnflow/session.hpp>

#include "replay/settings.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gdnflow::apps::replay {

/// An engine's tensors by name, with as many rows.
Bindings bindings_of(const PrefillTensors& tensors, std::int64_t tokens, std::int64_t sequences);

/// A way to serve a step's layers.
class Server {
 public:
  virtual ~Server() = default;

  virtual std::string name() const = 0;
  /// One layer. Gives the tokens that it was planned for.
  virtual std::int64_t call(const PrefillTensors& tensors, std::int64_t tokens,
                            std::int64_t sequences, Stream stream) = 0;
  /// Hits, captures and bytes.
  virtual Json counts() const = 0;
};

/// A session over buckets: graphs, or on a GPU launched kernel by kernel. Prepared.
std::unique_ptr<Server> make_session_server(const Problem& problem, std::vector<Capacity> buckets,
                                            Device device, const SessionOptions& options,
                                            const PrefillTensors& tensors);
/// A graph a shape, made when the shape comes and kept among the last ones.
std::unique_ptr<Server> make_shape_server(const Problem& problem, Device device,
                                          const PrefillOptions& options);

}  // namespace gdnflow::apps::replay
