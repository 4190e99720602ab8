#include "host/chunk_math.hpp"

#include <cmath>

namespace gdnflow::stages::host {

Vector gamma_of(const Vector& gc) {
  return gc.unaryExpr([](float x) { return std::exp(x); });
}

void apply_decay(const Vector& gc, Matrix& scores) {
  for (Eigen::Index i = 0; i < scores.rows(); ++i) {
    for (Eigen::Index j = 0; j <= i; ++j) scores(i, j) *= std::exp(gc[i] - gc[j]);
    scores.row(i).tail(scores.cols() - i - 1).setZero();
  }
}

void invert_unit_lower(const Matrix& m, Matrix& inverse) {
  inverse.setIdentity(m.rows(), m.cols());
  // Row i of M A = I: A_i = e_i - sum over j < i of M_ij A_j, and A_j is zero past column j.
  for (Eigen::Index i = 1; i < m.rows(); ++i) {
    inverse.row(i).head(i).noalias() = -m.row(i).head(i) * inverse.topLeftCorner(i, i);
  }
}

void residual_new_values(const Matrix& k, const Matrix& v, const Vector& beta, const Vector& gc,
                         const Matrix& a, const Matrix& state, Matrix& residual,
                         Matrix& new_values) {
  residual.noalias() = k * state;
  for (Eigen::Index i = 0; i < residual.rows(); ++i) {
    residual.row(i) = beta[i] * (v.row(i) - std::exp(gc[i]) * residual.row(i));
  }
  new_values.noalias() = a * residual;
}

void advance_state(const Matrix& k, const Vector& gc, const Matrix& new_values, Matrix& decayed,
                   Matrix& state) {
  const float last = gc[gc.size() - 1];
  decayed.resize(k.rows(), k.cols());
  for (Eigen::Index i = 0; i < k.rows(); ++i) decayed.row(i) = std::exp(last - gc[i]) * k.row(i);
  state *= std::exp(last);
  state.noalias() += decayed.transpose() * new_values;
}

void output_rows(const Matrix& q, const Matrix& p, const Vector& gc, const Matrix& state,
                 const Matrix& new_values, float scale, Matrix& out) {
  out.noalias() = q * state;
  for (Eigen::Index i = 0; i < out.rows(); ++i) out.row(i) *= std::exp(gc[i]);
  out.noalias() += p * new_values;
  out *= scale;
}

}  // namespace gdnflow::stages::host
