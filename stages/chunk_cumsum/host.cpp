#include "host/chunk_table.hpp"
#include "host/matrix.hpp"
#include "host/parallel.hpp"
#include "host/variant.hpp"

// gc_r = sum of g over the chunk's tokens up to r.
//
// -inf - -inf is NaN, and a huge |g| would drown its neighbours, so g is cut off below where exp(g)
// rounds to zero in fp32 anyway: a reset stays a reset, and differences across it stay below the
// cut. g > 0 is left alone. Summed in fp64; what is stored carries fp32's rounding of gc, a
// relative error of the decay of about 2^-24 |gc|.

namespace gdnflow::stages::chunk_cumsum {
namespace {

constexpr float least_log_decay = -104.0F;

void run(const StageCall& call) {
  const host::ChunkTable table(call);
  const TensorView& g = call["g"];
  const TensorView& g_cumsum = call["g_cumsum"];
  const auto sum_chunk = [&](host::Vector& column, std::int64_t index) {
    const host::Chunk chunk = table[index];
    for (std::int64_t head = 0; head < call.problem.v_heads; ++head) {
      host::load(host::column_of(g, head, chunk.first, chunk.tokens), column);
      double sum = 0.0;
      for (float& x : column) {
        // Written so that NaN passes.
        sum += x < least_log_decay ? least_log_decay : x;
        x = static_cast<float>(sum);
      }
      host::store(column, host::column_of(g_cumsum, head, chunk.first, chunk.tokens));
    }
  };
  host::parallel_for(
      table.chunks(), [] { return host::Vector(); }, sum_chunk);
}

void steps(const StageCall& /*call*/, StepList& out) {
  out.push_back({"chunk_cumsum", HostCall{run}});
}

}  // namespace

Variant host() { return host::host_variant("summed in fp64, stored in fp32", steps); }

}  // namespace gdnflow::stages::chunk_cumsum
