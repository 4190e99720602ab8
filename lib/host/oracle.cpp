#include <gdnflow/oracle.hpp>

#include "host/convert.hpp"
#include "host/cuda_build.hpp"
#include "host/oracle_inputs.hpp"

#if GDNFLOW_WITH_CUDA
#include "device/oracle.hpp"
#endif

#include <algorithm>
#include <cmath>

namespace gdnflow {
namespace {

using host::offset_of;

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

// One sequence of one value head, in double.
struct Lane {
  std::int64_t sequence = 0;
  std::int32_t head = 0;
  std::int32_t qk_head = 0;
  std::int64_t first = 0;
  std::int64_t tokens = 0;
};

void load_qk(const TensorView& view, std::int64_t token, const Lane& lane, bool normalize,
             double* out) {
  const std::int64_t dim = view.extents[2];
  host::load(view, offset_of(view, token, lane.qk_head), dim, out);
  if (!normalize) return;
  double squares = 0;
  for (std::int64_t i = 0; i < dim; ++i) squares += out[i] * out[i];
  const double root = std::sqrt(squares + 1e-6);
  for (std::int64_t i = 0; i < dim; ++i) out[i] /= root;
}

double gate_at(const TensorView& view, std::int64_t token, const Lane& lane) {
  return static_cast<double>(view.as<const float>()[offset_of(view, token, lane.head)]);
}

// The state as [Dk, Dv], whatever the layout outside.
Matrix load_state(const Problem& problem, const OracleInputs& in, const Lane& lane) {
  if (in.initial_state.data == nullptr) return Matrix::Zero(problem.qk_dim, problem.v_dim);
  const TensorView& view = in.initial_state;
  Matrix state(view.extents[2], view.extents[3]);
  for (std::int64_t row = 0; row < state.rows(); ++row) {
    host::load(view, offset_of(view, lane.sequence, lane.head, row), state.cols(),
               state.row(row).data());
  }
  if (problem.state_layout == StateLayout::vk) state.transposeInPlace();
  return state;
}

void store_state(const Problem& problem, const Lane& lane, const Matrix& state,
                 std::vector<double>& out) {
  const bool kv = problem.state_layout == StateLayout::kv;
  double* destination = out.data() + (lane.sequence * problem.v_heads + lane.head) * state.size();
  Eigen::Map<Matrix>(destination, kv ? state.rows() : state.cols(),
                     kv ? state.cols() : state.rows()) = kv ? state : Matrix(state.transpose());
}

// S = alpha (S - beta k (k^T S)) + beta k v^T, o = scale S^T q.
void recur(const Problem& problem, const OracleInputs& in, const OracleShape& shape,
           const Lane& lane, OracleResult& out) {
  const std::int64_t rows = problem.qk_dim;
  const std::int64_t columns = problem.v_dim;
  Matrix state = load_state(problem, in, lane);
  std::vector<double> q(rows), k(rows), v(columns), change(columns);
  for (std::int64_t t = lane.first; t < lane.first + lane.tokens; ++t) {
    load_qk(in.q, t, lane, problem.qk_norm, q.data());
    load_qk(in.k, t, lane, problem.qk_norm, k.data());
    host::load(in.v, offset_of(in.v, t, lane.head), columns, v.data());
    const double alpha = std::exp(gate_at(in.g, t, lane));
    const double beta = gate_at(in.beta, t, lane);

    std::fill(change.begin(), change.end(), 0.0);
    for (std::int64_t i = 0; i < rows; ++i) {
      double* s = state.row(i).data();
      for (std::int64_t j = 0; j < columns; ++j) {
        s[j] *= alpha;
        change[j] += k[i] * s[j];
      }
    }
    for (std::int64_t j = 0; j < columns; ++j) change[j] = beta * (v[j] - change[j]);

    double* o = out.o.data() + (t * problem.v_heads + lane.head) * columns;
    for (std::int64_t i = 0; i < rows; ++i) {
      double* s = state.row(i).data();
      for (std::int64_t j = 0; j < columns; ++j) {
        s[j] += k[i] * change[j];
        o[j] += q[i] * s[j];
      }
    }
    for (std::int64_t j = 0; j < columns; ++j) o[j] *= shape.scale;
  }
  store_state(problem, lane, state, out.final_state);
}

// A chunk of at most 64 tokens in the document form. Decays are products of alpha, not
// exponentials of differences of sums: then -inf is an alpha of 0 and needs no case of its own.
void advance(const Problem& problem, const OracleInputs& in, const OracleShape& shape,
             const Lane& lane, std::int64_t first, std::int64_t length, Matrix& state,
             OracleResult& out) {
  Matrix q(length, problem.qk_dim), k(length, problem.qk_dim), v(length, problem.v_dim);
  Vector alpha(length), beta(length);
  for (std::int64_t i = 0; i < length; ++i) {
    load_qk(in.q, first + i, lane, problem.qk_norm, q.row(i).data());
    load_qk(in.k, first + i, lane, problem.qk_norm, k.row(i).data());
    host::load(in.v, offset_of(in.v, first + i, lane.head), problem.v_dim, v.row(i).data());
    alpha[i] = std::exp(gate_at(in.g, first + i, lane));
    beta[i] = gate_at(in.beta, first + i, lane);
  }

  // decay(i, j), j <= i: what token i sees of token j's write; gamma: of the chunk's first state.
  Matrix decay = Matrix::Zero(length, length);
  Vector gamma(length);
  for (std::int64_t i = 0; i < length; ++i) {
    gamma[i] = i == 0 ? alpha[0] : gamma[i - 1] * alpha[i];
    for (std::int64_t j = 0; j < i; ++j) decay(i, j) = decay(i - 1, j) * alpha[i];
    decay(i, i) = 1.0;
  }

  const Matrix keys = k * k.transpose();
  Matrix m = Matrix::Identity(length, length);
  for (std::int64_t i = 0; i < length; ++i) {
    for (std::int64_t j = 0; j < i; ++j) m(i, j) = beta[i] * decay(i, j) * keys(i, j);
  }
  const auto inverse = m.triangularView<Eigen::UnitLower>();
  const Matrix u = inverse.solve(Matrix(beta.asDiagonal() * v));
  const Matrix w = inverse.solve(Matrix(beta.cwiseProduct(gamma).asDiagonal() * k));
  const Matrix v_new = u - w * state;

  // Masked by the product with decay, whose upper triangle is zero; a non-finite score there is
  // kept out by looking at the lower triangle only.
  Matrix scores = q * k.transpose();
  for (std::int64_t i = 0; i < length; ++i) {
    for (std::int64_t j = 0; j < length; ++j) {
      scores(i, j) = j <= i ? decay(i, j) * scores(i, j) : 0.0;
    }
  }
  const Matrix o = shape.scale * (gamma.asDiagonal() * (q * state) + scores * v_new);
  for (std::int64_t i = 0; i < length; ++i) {
    double* row = out.o.data() + ((first + i) * problem.v_heads + lane.head) * problem.v_dim;
    Eigen::Map<Eigen::RowVectorXd>(row, problem.v_dim) = o.row(i);
  }

  const Vector to_end = decay.row(length - 1).transpose();
  state = gamma[length - 1] * state + (to_end.asDiagonal() * k).transpose() * v_new;
}

void chunk_by_chunk(const Problem& problem, const OracleInputs& in, const OracleShape& shape,
                    const Lane& lane, OracleResult& out) {
  Matrix state = load_state(problem, in, lane);
  for (std::int64_t done = 0; done < lane.tokens; done += chunk_tokens) {
    advance(problem, in, shape, lane, lane.first + done, std::min(chunk_tokens, lane.tokens - done),
            state, out);
  }
  store_state(problem, lane, state, out.final_state);
}

template <class Body>
OracleResult for_each_lane(const Problem& problem, const OracleInputs& in, Body body) {
  const OracleShape shape = check_oracle_inputs(problem, in, DeviceType::host);
  const std::int64_t heads = problem.v_heads;
  OracleResult out;
  out.o.assign(static_cast<std::size_t>(shape.tokens * heads * problem.v_dim), 0.0);
  out.final_state.assign(
      static_cast<std::size_t>(shape.sequences * heads * problem.qk_dim * problem.v_dim), 0.0);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic)
#endif
  for (std::int64_t item = 0; item < shape.sequences * heads; ++item) {
    Lane lane;
    lane.sequence = item / heads;
    lane.head = static_cast<std::int32_t>(item % heads);
    lane.qk_head = problem.qk_head_of(lane.head);
    lane.first = in.cu_seqlens[lane.sequence];
    lane.tokens = in.cu_seqlens[lane.sequence + 1] - lane.first;
    body(problem, in, shape, lane, out);
  }
  return out;
}

}  // namespace

OracleResult oracle_recurrent(const Problem& problem, const OracleInputs& inputs) {
  return for_each_lane(problem, inputs, recur);
}

OracleResult oracle_chunked(const Problem& problem, const OracleInputs& inputs) {
  return for_each_lane(problem, inputs, chunk_by_chunk);
}

void oracle_on_device(const Problem& problem, const OracleInputs& inputs, double* o,
                      double* final_state, [[maybe_unused]] Stream stream) {
  const OracleShape shape = check_oracle_inputs(problem, inputs, DeviceType::cuda);
  if (o == nullptr && shape.tokens != 0) {
    throw Error(ErrorCode::invalid_argument, "oracle_on_device: o has no data");
  }
  constexpr std::int32_t most_dim = 256;
  if (problem.qk_dim > most_dim) {
    throw Error(ErrorCode::unsupported, "oracle_on_device: expected a qk_dim of at most " +
                                            std::to_string(most_dim) + ", got " +
                                            std::to_string(problem.qk_dim));
  }
#if GDNFLOW_WITH_CUDA
  device::oracle(problem, inputs, shape, o, final_state, stream);
#else
  static_cast<void>(final_state);
  refuse_without_cuda("oracle_on_device");
#endif
}

}  // namespace gdnflow
