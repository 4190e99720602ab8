#pragma once

#include <gdnflow/costs.hpp>

#include "common/cost_rows.hpp"

#include <string>
#include <vector>

namespace gdnflow::apps {

/// Fits the factors of every form that enough rows are of: least squares of relative residuals,
/// over rows whose sequences are equally long, as the model has them, with factors of at least 0.
/// The number of blocks that a multiprocessor holds is the one that leaves the least. Rows that
/// leave `value_tile` to the variant, where others set it, and rows with other options are left
/// out. Errors: gdnflow::Error (invalid_argument) for rows of several GPUs, or too few.
CostTable fit_costs(const std::vector<CostRow>& rows);

/// A line a form with factors and residuals, and how far the one that the table would choose among
/// those measured is from the best of them, over the cases of the rows: of equal lengths and of
/// others.
std::string describe_fit(const CostTable& table, const std::vector<CostRow>& rows);

}  // namespace gdnflow::apps
