#pragma once

#include "common/csv.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gdnflow::apps::replay {

/// A prompt. It begins as an earlier one does, and goes on with tokens of its own; so prompts make
/// up a tree.
struct Request {
  double arrival_ms = 0;
  std::int64_t prompt = 0;  ///< tokens
  std::int64_t shared = 0;  ///< of them that it begins with and `parent` had; less than the prompt
  std::size_t parent = 0;   ///< an earlier request, where `shared` is not 0
};

struct RequestOptions {
  std::int64_t most = 0;  ///< requests; 0: all
  double scale = 1;       ///< of lengths
};

/// The requests of a table with the columns arrival_ms, prompt_tokens, output_tokens and
/// cached_tokens. What is cached of a prompt somebody had before it: the earlier prompt that ends
/// soonest behind it, as that of a conversation's last turn would, and of several the latest. Where
/// none is as long, its bearer came before the trace began, and it counts as the prompt's own. At
/// least the last token of a prompt is its own. Errors: gdnflow::Error (format) with file and line,
/// for no requests, arrival times that fall, more cached than there is, or too long a prompt.
std::vector<Request> requests_from(const Csv& csv, const RequestOptions& options);

/// Tokens [begin, end) of a prompt, by the request that was the first to have them.
struct Run {
  std::size_t owner = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The runs that tokens [begin, end) of a prompt consist of, in order.
std::vector<Run> runs_of(std::span<const Request> requests, std::size_t request, std::int64_t begin,
                         std::int64_t end);
/// The request that was the first to have this token.
std::size_t owner_of(std::span<const Request> requests, std::size_t request, std::int64_t token);

}  // namespace gdnflow::apps::replay
