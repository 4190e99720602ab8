#pragma once

#include <gdnflow/inputs.hpp>
#include <gdnflow/problem.hpp>

#include "common/csv.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gdnflow::apps {

/// A benchmark case: sequences, heads and the distribution of the inputs.
struct Case {
  std::string name;
  std::vector<std::int64_t> lengths;  ///< of the sequences
  std::int32_t qk_heads = 0;
  std::int32_t v_heads = 0;
  bool initial_state = false;
  Distribution distribution = Distribution::random_decay;

  std::int64_t tokens() const;
};

/// The head counts that a model leaves on one GPU of `tensor_parallel`.
struct ModelHeads {
  std::string model;
  std::int32_t tensor_parallel = 1;
  std::int32_t qk_heads = 0;
  std::int32_t v_heads = 0;
};

/// The eight standard cases, apps/cases/seed.csv.
std::vector<Case> standard_cases();
/// What costs are fitted to, apps/cases/tuning.csv.
std::vector<Case> tuning_cases();
/// Head counts of real models, apps/cases/models.csv.
std::vector<ModelHeads> model_heads();

/// Cases of a table with the columns name,batch,tokens,qk_heads,v_heads,initial_state,gate (as
/// apps/cases/seed.csv), or with lengths,qk_heads,v_heads, where lengths is "28672+4096" and the
/// case is then called "28672+4096_2_8"; other columns are not looked at. Errors: gdnflow::Error
/// (format) with file and line.
std::vector<Case> cases_from(const Csv& csv);

/// "N,N,...", the value of --lengths. Errors: UsageError, also for more tokens than can be run.
std::vector<std::int64_t> parse_lengths(std::string_view value);

/// "B,T,QK_HEADS,V_HEADS[,state]", the value of --case. Errors: UsageError.
Case parse_case(std::string_view value);
/// Sequences of the given lengths for the given heads, named "28672+4096_2_8".
Case case_of(std::span<const std::int64_t> lengths, std::int32_t qk_heads, std::int32_t v_heads);

/// The case cut down to what a host does in a moment, in the same proportions: whole chunks of 64
/// tokens are scaled so that all sequences together have about `most_tokens` (at least one chunk
/// stays where there was one), a tail shorter than a chunk is kept, and heads are divided by a
/// common factor so that at most `most_v_heads` value heads remain where the ratio allows it.
Case scaled_down(const Case& original, std::int64_t most_tokens, std::int32_t most_v_heads);

bool equal_lengths(std::span<const std::int64_t> lengths);
/// "8192", "4x8192" for equal lengths, "28672+4096".
std::string lengths_text(std::span<const std::int64_t> lengths);

}  // namespace gdnflow::apps
