// SPDX-License-Identifier: Apache-2.0
//
// Attention in FP64, without a mask: the reference, and what a method's K and V are put through.
#pragma once

#include "client/ctl/eval/matrix.h"

namespace kvtier::ctl::eval {

// [query][token]: softmax_scale * q.k.
Matrix Scores(const Matrix& q, const Matrix& k, double softmax_scale);
// Of each row.
Matrix Softmax(const Matrix& scores);
// [query][dim]: weights [query][token] times v [token][dim].
Matrix WeightedSum(const Matrix& weights, const Matrix& v);

// |approximate - exact| / |exact|, Frobenius norms; 0 if both are zero, infinity if only `exact`
// is.
double RelativeError(const Matrix& approximate, const Matrix& exact);
// The same of scores after the mean of each row is taken off: softmax does not see it.
double RelativeScoreError(const Matrix& approximate, const Matrix& exact);
// The largest difference of an element, relative to the largest magnitude of `exact`.
double RelativeMaxError(const Matrix& approximate, const Matrix& exact);

}  // namespace kvtier::ctl::eval
