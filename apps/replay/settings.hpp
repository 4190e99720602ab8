#pragma once

#include <gdnflow/inputs.hpp>
#include <gdnflow/prefill.hpp>
#include <gdnflow/problem.hpp>

#include "common/program.hpp"
#include "common/reference.hpp"
#include "common/timing.hpp"

#include <cstdint>

#include <nlohmann/json.hpp>

namespace gdnflow::apps::replay {

using Json = nlohmann::ordered_json;

/// What the program does with its batches; each is a file of its own.
int run_batches(const po::variables_map& arguments);
int run_trace(const po::variables_map& arguments);
int run_soak(const po::variables_map& arguments);
int run_host_cost(const po::variables_map& arguments);

/// A count that may be left out.
std::int64_t count_or(const po::variables_map& arguments, const char* name, std::int64_t least,
                      std::int64_t fallback);

/// Heads, dims and types: 2/4 heads on the host and 16/64 on a GPU where none are given.
Problem problem_from(const po::variables_map& arguments, Device device);

/// The same for a batch of an engine: states in a pool, by slot, in place; flags of who has one;
/// prefixes, so that chunks fall where they fell when a state was made.
Problem engine_problem_from(const po::variables_map& arguments, Device device);

/// --pipeline and --variant for a session: `auto` chooses bucket by bucket, but with --costs once,
/// for the largest.
PrefillOptions prefill_options_from(const po::variables_map& arguments, const Problem& problem,
                                    const Capacity& largest, const DeviceInfo& info);

/// What inputs and lengths are drawn from.
struct Draw {
  Distribution distribution = Distribution::random_decay;  ///< of q, k, v and gates
  std::uint64_t seed = 0;

  /// The `i`th of several that differ.
  Draw next(std::int64_t i) const { return {distribution, seed + static_cast<std::uint64_t>(i)}; }
};
/// --distribution and --seed.
Draw draw_from(const po::variables_map& arguments);

/// The bounds of right results: --bound for both where it is given, else by type.
Bounds bounds_from(const po::variables_map& arguments, const Problem& problem);

/// Whether number `i` of `all` is one of `chosen` that are spread evenly over them.
inline bool is_chosen(std::int64_t i, std::int64_t chosen, std::int64_t all) {
  return (i + 1) * chosen / all != i * chosen / all;
}

/// The larger of two errors; NaN is the worst.
double worse(double a, double b);

Json to_json(const Percentiles& percentiles);

}  // namespace gdnflow::apps::replay
