#pragma once

#include <gdnflow/compare.hpp>
#include <gdnflow/oracle.hpp>

#include "common/tensors.hpp"

#include <cstdint>

namespace gdnflow::apps {

/// The fp64 oracle's result for a set of inputs, where the inputs are: on the host or on a GPU.
class Reference {
 public:
  Reference(const Problem& problem, const OracleInputs& inputs);

  /// Compares the rows that sequences own.
  Comparison o(const TensorView& got) const;
  Comparison final_state(const TensorView& got) const;

 private:
  std::int64_t tokens_;
  bool on_device_;
  OracleResult host_;
  Memory device_o_;
  Memory device_state_;
};

/// The oracle taken along one sequence, some tokens at a time: the outputs of all of them, and the
/// state behind the last ones, so that states in the middle can be compared, too. It starts from a
/// state of zero; from one call to the next the state is handed on in fp32, the widest type that
/// the oracle starts from.
class RunningReference {
 public:
  /// For a sequence of at most this many tokens.
  RunningReference(const Problem& problem, std::int64_t most_tokens, Device device);

  /// Goes on by the rows of q, k, v, g and beta; the other inputs are set here.
  void advance(OracleInputs rows);
  std::int64_t tokens() const { return tokens_; }

  /// Compares the outputs from token `first` on.
  Comparison o(std::int64_t first, const TensorView& got) const;
  /// Compares the state behind the tokens so far with one of [1, Hv, r, c].
  Comparison state(const TensorView& got) const;

 private:
  Comparison compare_with(const TensorView& got, const double* expected) const;

  Problem problem_;
  Device device_;
  std::int64_t tokens_ = 0;
  std::int64_t o_row_;  ///< elements of o of a token
  Memory o_;
  Memory state_;
  OwnedTensor carried_;  ///< the same in fp32
};

/// How far a result may be from what is expected, as relative RMS.
struct Bounds {
  double o = 0;
  double state = 0;
};

/// The bounds for results of a problem computed on a device: 1e-5 where everything is fp32 on the
/// host; with bf16 tensors 5e-3 (8e-3 for o on `correlated` keys, whose inverse magnifies
/// rounding), with fp16 1e-3.
Bounds bounds_for(const Problem& problem, bool correlated);

/// The comparison as reports give it: measures are NaN (null in JSON) where elements are finite on
/// one side only. The comparison's own leave such pairs out, so a result of NaN would show as 0.
Comparison for_report(Comparison comparison);

}  // namespace gdnflow::apps
