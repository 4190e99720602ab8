#pragma once

namespace gdnflow::stages::qk_norm {

/// Added to a row's sum of squares, inside the root.
inline constexpr float epsilon = 1e-6F;

}  // namespace gdnflow::stages::qk_norm
