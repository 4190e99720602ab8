#pragma once

#include <gdnflow/compare.hpp>
#include <gdnflow/oracle.hpp>

#include "common/device.hpp"

#include <optional>

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
