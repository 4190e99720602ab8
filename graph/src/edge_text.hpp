#pragma once

#include <gdnflow/pipeline.hpp>

#include <span>
#include <string>

namespace gdnflow {

/// Extents under a problem and capacity, free ones by their symbol: "[1025,2,128]", "[PI,4,64,64]".
std::string shape_text(std::span<const Extent> extents, const Problem& problem,
                       const Capacity& capacity);

/// Type and shape of an edge: "bf16[1025,2,128]".
std::string type_text(const Edge& edge, const Pipeline& pipeline);

/// All users of an edge in order: the writer, those that change it, the readers.
std::vector<int> users_of(const Edge& edge);

}  // namespace gdnflow
