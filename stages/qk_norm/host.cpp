#include "host/matrix.hpp"
#include "host/parallel.hpp"
#include "host/variant.hpp"
#include "qk_norm/epsilon.hpp"

#include <cmath>

// x / sqrt(sum of x^2 + 1e-6) for every row of q and k.

namespace gdnflow::stages::qk_norm {
namespace {

void normalize(const TensorView& in, const TensorView& out) {
  const std::int64_t heads = in.extents[1];
  host::parallel_for_tokens(in.extents[0], [&](std::int64_t first, std::int64_t count) {
    host::Matrix rows;
    for (std::int64_t head = 0; head < heads; ++head) {
      host::load(host::rows_of(in, head, first, count), rows);
      for (Eigen::Index i = 0; i < rows.rows(); ++i) {
        rows.row(i) /= std::sqrt(rows.row(i).squaredNorm() + epsilon);
      }
      host::store(rows, host::rows_of(out, head, first, count));
    }
  });
}

void run(const StageCall& call) {
  normalize(call["q"], call["q_normalized"]);
  normalize(call["k"], call["k_normalized"]);
}

void steps(const StageCall& /*call*/, StepList& out) { out.push_back({"qk_norm", HostCall{run}}); }

}  // namespace

Variant host() { return host::host_variant("row by row in fp32", steps); }

}  // namespace gdnflow::stages::qk_norm
