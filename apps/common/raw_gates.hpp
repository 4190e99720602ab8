#pragma once

#include "common/tensors.hpp"

namespace gdnflow::apps {

/// Replaces the log decay of a workload by a, a_log and dt_bias that give about the same, and beta
/// by its logits, as far as the problem asks for it; what they give, from the rounded values, goes
/// to `ready`.
void hand_over_raw_gates(Workload& workload);

}  // namespace gdnflow::apps
