#pragma once

#include "host/matrix.hpp"

// The formulas of one chunk of l tokens and one value head. gc: prefix sum of the log decay within
// the chunk, gamma = exp(gc), S: [Dk, Dv]. Rows are the chunk's own tokens and no others, so what
// stands behind its end can reach nothing.

namespace gdnflow::stages::host {

/// gamma = exp(gc). Not by Eigen's exponential, which stops at the smallest normal number: a hard
/// reset has to give an exact zero.
Vector gamma_of(const Vector& gc);

/// scores(i, j) *= exp(gc_i - gc_j) where j <= i, zero where j > i. The mask comes before the
/// exponential, whose argument would be positive above the diagonal and could overflow.
void apply_decay(const Vector& gc, Matrix& scores);

/// The inverse of a unit lower triangular matrix; `m`'s diagonal and upper part are not read, the
/// inverse's upper part is exactly zero.
void invert_unit_lower(const Matrix& m, Matrix& inverse);

/// V' = A (beta .* (V - gamma .* (K S))); `residual` is scratch.
void residual_new_values(const Matrix& k, const Matrix& v, const Vector& beta, const Vector& gc,
                         const Matrix& a, const Matrix& state, Matrix& residual,
                         Matrix& new_values);

/// S <- exp(gc_l) S + (exp(gc_l - gc) .* K)^T V'; `decayed` is scratch.
void advance_state(const Matrix& k, const Vector& gc, const Matrix& new_values, Matrix& decayed,
                   Matrix& state);

/// O = scale (gamma .* (Q S) + P V'), with `p` = Q K^T after apply_decay.
void output_rows(const Matrix& q, const Matrix& p, const Vector& gc, const Matrix& state,
                 const Matrix& new_values, float scale, Matrix& out);

}  // namespace gdnflow::stages::host
