#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/problem.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow {

// What a forward pass should take, by a few numbers a form that were fitted to measurements. A form
// is a pipeline with the options that `auto` sets. Lengths are not known when a plan is made, so
// the model spreads the capacity's tokens evenly over its sequences.

/// The terms that the time of a form is a sum of, each with a factor in microseconds:
///
/// - launch: 1;
/// - round: rounds, the times that the multiprocessors are filled with blocks one after the other;
/// - step: rounds times steps a sequence, while a multiprocessor has one block;
/// - crowded_step: the same in place of `step` where several blocks share one;
/// - work: chunks times value heads, over the multiprocessors: what spreads over all of them;
/// - traffic: chunks times value heads: what goes through the card's memory and L2, which do not
///   shrink with the multiprocessors that a program is given;
/// - segments: 1 where sequences may be cut, for the stage that finds out where.
inline constexpr std::array<std::string_view, 7> cost_terms{
    "launch", "round", "step", "crowded_step", "work", "traffic", "segments"};
using CostFactors = std::array<double, cost_terms.size()>;

/// A measurement beside what the fitted numbers give for it.
struct CostPoint {
  std::int64_t tokens = 0;     ///< of a sequence
  std::int64_t sequences = 0;  ///< equally long
  std::int32_t qk_heads = 0;
  std::int32_t v_heads = 0;
  std::int32_t multiprocessors = 0;
  double ratio = 1;  ///< measured forward time over the sum of terms
};

/// The fitted numbers of a pipeline with its options.
struct CostForm {
  std::string pipeline;  ///< the recipe's id
  std::string options;   ///< those that `auto` sets: "fused_prefill:value_tile=64"; empty: none
  bool whole = false;    ///< the time is of a whole forward; else of its core, without the front
  std::int32_t columns = 128;     ///< value columns of a block
  std::int32_t step_tokens = 64;  ///< tokens of a step of a sequence
  std::int32_t resident = 1;      ///< blocks that a multiprocessor holds at once
  std::int64_t least_tokens = 0;  ///< of a sequence, the fewest that were measured
  bool cut = false;               ///< sequences of few heads are cut: see the stage `segments`
  bool shares = false;            ///< blocks stay and take equal shares of all chunks
  CostFactors us{};               ///< in the order of `cost_terms`
  std::int32_t rows = 0;          ///< measurements that it was fitted to
  double rms = 0;                 ///< relative residual of the fit, root mean square
  double worst = 0;               ///< the largest
  std::vector<CostPoint> points;  ///< the measurements
};

/// The forms of one GPU.
struct CostTable {
  std::string gpu;                   ///< as DeviceInfo::name
  std::int32_t capability = 0;       ///< as DeviceInfo::capability
  std::int32_t multiprocessors = 0;  ///< of the whole card
  CostForm front;                    ///< what precedes the core; `launch` and `work` alone
  std::vector<CostForm> forms;

  /// The form, or null.
  GDNFLOW_API const CostForm* find(std::string_view pipeline,
                                   std::string_view options) const noexcept;
};

/// The terms of a form, before their factors. `traffic` says how many of the table's cards a
/// device's memory stands for: see `predicted_us`.
GDNFLOW_API CostFactors terms_of(const CostForm& form, const Problem& problem,
                                 const Capacity& capacity, std::int32_t multiprocessors,
                                 double traffic = 1.0);

/// The time of a forward in microseconds: the sum of terms, and on the table's own GPU times what
/// measurements near by say of it. A measurement counts by the inverse fourth power of its
/// distance, in octaves of tokens, sequences, heads and multiprocessors; the sum alone counts as
/// one at an octave. So a problem that was measured gets its own time, and far from all the sum is
/// left. Another GPU than the table's has its own number of multiprocessors, and memory in
/// proportion to it; the table's own GPU has its whole memory even where a program is given a part
/// of the multiprocessors. For sequences shorter than any that were measured, the time of the
/// shortest measured: a bound from above. Head dims other than 128 are given the times of 128, so
/// their order alone means something.
GDNFLOW_API double predicted_us(const CostTable& table, const CostForm& form,
                                const Problem& problem, const Capacity& capacity,
                                const DeviceInfo& device);

/// The tables compiled into the library.
GDNFLOW_API std::span<const CostTable> builtin_cost_tables();

/// The table for a device: the one of its name; else the first of its capability; else the one
/// with the highest capability below the device's; else the one with the lowest above. Null where
/// there is no table, and for the host.
GDNFLOW_API const CostTable* cost_table_for(const DeviceInfo& device,
                                            std::span<const CostTable> tables);

/// Reads a table from JSON. Errors: format, naming `name`, what is expected and what was got.
GDNFLOW_API CostTable parse_cost_table(std::string_view name, std::string_view json);
/// Reads a file that `gdnflow-ablate --tune` wrote. Errors: io; format.
GDNFLOW_API CostTable read_cost_table(const std::string& path);
/// As JSON; factors to four digits.
GDNFLOW_API std::string to_json(const CostTable& table);

}  // namespace gdnflow
