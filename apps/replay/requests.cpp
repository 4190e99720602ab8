#include "replay/requests.hpp"

#include <gdnflow/error.hpp>

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

namespace gdnflow::apps::replay {
namespace {

std::int64_t scaled(std::int64_t tokens, double scale) {
  return std::llround(std::floor(static_cast<double>(tokens) * scale));
}

}  // namespace

std::vector<Request> requests_from(const Csv& csv, const RequestOptions& options) {
  std::vector<Request> requests;
  std::map<std::int64_t, std::size_t> latest_of;  // by the prompt's length
  double latest = 0;
  for (const Csv::Row& row : csv.rows) {
    // All of the file is checked, also what is not served.
    constexpr std::int64_t most_tokens = 1 << 24;
    const double arrival = csv.number(row, "arrival_ms", 0);
    const std::int64_t prompt = csv.integer(row, "prompt_tokens", 1);
    const std::int64_t cached = csv.integer(row, "cached_tokens", 0);
    (void)csv.integer(row, "output_tokens", 0);
    if (arrival < latest) {
      csv.refuse(row, fmt::format("arrival_ms: expected at least the {} of the row before, got {}",
                                  latest, arrival));
    }
    if (prompt > most_tokens) {
      csv.refuse(row,
                 fmt::format("prompt_tokens: expected at most {}, got {}", most_tokens, prompt));
    }
    if (cached > prompt) {
      csv.refuse(row, fmt::format("cached_tokens: expected at most the prompt's {}, got {}", prompt,
                                  cached));
    }
    if (static_cast<double>(prompt) * options.scale > static_cast<double>(most_tokens)) {
      csv.refuse(row, fmt::format("prompt_tokens: expected at most {} when scaled, got {} times {}",
                                  most_tokens, prompt, options.scale));
    }
    latest = arrival;
    if (options.most > 0 && std::ssize(requests) == options.most) continue;
    Request request;
    request.arrival_ms = arrival;
    request.prompt = std::max<std::int64_t>(scaled(prompt, options.scale), 1);
    const std::int64_t shared = std::min(scaled(cached, options.scale), request.prompt - 1);
    const auto parent = latest_of.lower_bound(shared);
    if (shared > 0 && parent != latest_of.end()) {
      request.shared = shared;
      request.parent = parent->second;
    }
    latest_of[request.prompt] = requests.size();
    requests.push_back(request);
  }
  if (requests.empty()) {
    throw gdnflow::Error(gdnflow::ErrorCode::format,
                         csv.name + ":1: expected at least one request, got none");
  }
  return requests;
}

std::vector<Run> runs_of(std::span<const Request> requests, std::size_t request, std::int64_t begin,
                         std::int64_t end) {
  std::vector<Run> runs;
  while (end > begin) {
    const std::int64_t shared = requests[request].shared;
    if (end > shared) {
      runs.push_back({request, std::max(begin, shared), end});
      end = runs.back().begin;
    }
    request = requests[request].parent;
  }
  std::reverse(runs.begin(), runs.end());
  return runs;
}

std::size_t owner_of(std::span<const Request> requests, std::size_t request, std::int64_t token) {
  while (token < requests[request].shared) request = requests[request].parent;
  return request;
}

}  // namespace gdnflow::apps::replay
