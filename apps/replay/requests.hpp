#pragma once

#include "common/csv.hpp"

#include <cstdint>
#include <vector>

namespace gdnflow::apps::replay {

/// A prompt to be computed behind a prefix that is cached.
struct Request {
  double arrival_ms = 0;
  std::int64_t prompt = 0;  ///< tokens
  std::int64_t cached = 0;  ///< of them whose state is there already; less than the prompt
  std::uint64_t seed = 0;   ///< of that state

  std::int64_t computed() const { return prompt - cached; }
};

struct RequestOptions {
  std::int64_t most = 0;                 ///< requests; 0: all
  double scale = 1;                      ///< of lengths
  std::int64_t checkpoint_interval = 1;  ///< cached tokens are a multiple of this
  std::uint64_t seed = 0;
};

/// The requests of a table with the columns arrival_ms, prompt_tokens, output_tokens and
/// cached_tokens. At least the last token of a prompt is computed. Errors: gdnflow::Error (format)
/// with file and line, for no requests, arrival times that fall, or more cached than there is.
std::vector<Request> requests_from(const Csv& csv, const RequestOptions& options);

}  // namespace gdnflow::apps::replay
