#include "replay/settings.hpp"

#include "common/arguments.hpp"

#include <algorithm>
#include <cmath>

namespace gdnflow::apps::replay {

std::int64_t count_or(const po::variables_map& arguments, const char* name, std::int64_t least,
                      std::int64_t fallback) {
  return has(arguments, name) ? count(arguments, name, least) : fallback;
}

Problem problem_from(const po::variables_map& arguments, Device device) {
  Problem problem;
  apply_problem_options(arguments, device, problem);
  const Heads heads = has(arguments, "heads") ? parse_heads("heads", text(arguments, "heads"))
                      : device.type == DeviceType::host ? Heads{2, 4}
                                                        : Heads{16, 64};
  problem.qk_heads = heads.qk;
  problem.v_heads = heads.v;
  constexpr std::int64_t most_dim = 1 << 20;
  problem.qk_dim = problem.v_dim =
      static_cast<std::int32_t>(std::min(count(arguments, "head-dim", 1), most_dim));
  return problem;
}

Problem engine_problem_from(const po::variables_map& arguments, Device device) {
  Problem problem = problem_from(arguments, device);
  problem.initial_state = problem.state_indices = problem.has_initial_state = true;
  problem.prefix_lens = true;
  return problem;
}

PrefillOptions prefill_options_from(const po::variables_map& arguments, const Problem& problem,
                                    const Capacity& largest, const DeviceInfo& info) {
  const bool chooses = !has(arguments, "pipeline") || text(arguments, "pipeline") == "auto";
  if (chooses && !has(arguments, "costs")) return {"auto", overrides_from(arguments)};
  const PipelineRequest request = pipeline_from(arguments, problem, largest, info);
  return {request.recipe, request.overrides};
}

Draw draw_from(const po::variables_map& arguments) {
  return {
      parse_choice<Distribution>("distribution", text(arguments, "distribution"), distributions()),
      arguments["seed"].as<std::uint64_t>()};
}

Bounds bounds_from(const po::variables_map& arguments, const Problem& problem) {
  if (!has(arguments, "bound")) {
    return bounds_for(problem, draw_from(arguments).distribution == Distribution::correlated);
  }
  const auto bound = arguments["bound"].as<double>();
  if (!(bound >= 0)) {
    throw UsageError(fmt::format("--bound: expected a number of at least 0, got {}", bound));
  }
  return {bound, bound};
}

double worse(double a, double b) { return std::isnan(a) || b <= a ? a : b; }

Json to_json(const Percentiles& p) { return {{"p50", p.p50}, {"p95", p.p95}, {"p99", p.p99}}; }

}  // namespace gdnflow::apps::replay
