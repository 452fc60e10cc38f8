// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "client/ctl/eval/quantizers.h"
#include "proto/base/check.h"

namespace kvtier::ctl::eval {
namespace {

// Queries whose sums over the dims are in registers at the same time.
constexpr size_t kQueryLanes = 8;
// Tokens that one pass over an output row adds.
constexpr size_t kTokenLanes = 4;

double Ratio(double difference, double exact) {
  if (exact > 0.0) return difference / exact;
  return difference > 0.0 ? std::numeric_limits<double>::infinity() : 0.0;
}

double Mean(std::span<const double> x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

}  // namespace

Matrix Scores(const Matrix& q, const Matrix& k, double softmax_scale) {
  KVT_CHECK(q.cols() == k.cols());
  Matrix scores(q.rows(), k.rows());
  std::vector<std::array<double, kQueryLanes>> lanes(q.cols());
  for (size_t begin = 0; begin < q.rows(); begin += kQueryLanes) {
    const size_t count = std::min(kQueryLanes, q.rows() - begin);
    for (size_t d = 0; d < q.cols(); ++d) {
      for (size_t i = 0; i < kQueryLanes; ++i) lanes[d][i] = i < count ? q.Row(begin + i)[d] : 0.0;
    }
    for (size_t t = 0; t < k.rows(); ++t) {
      const std::span<const double> row = k.Row(t);
      std::array<double, kQueryLanes> sums{};
      for (size_t d = 0; d < row.size(); ++d) {
        for (size_t i = 0; i < kQueryLanes; ++i) sums[i] += row[d] * lanes[d][i];
      }
      for (size_t i = 0; i < count; ++i) scores.Row(begin + i)[t] = sums[i] * softmax_scale;
    }
  }
  return scores;
}

Matrix Softmax(const Matrix& scores) {
  Matrix weights(scores.rows(), scores.cols());
  for (size_t i = 0; i < scores.rows(); ++i) {
    const std::span<const double> in = scores.Row(i);
    const std::span<double> out = weights.Row(i);
    const double peak = *std::max_element(in.begin(), in.end());
    double sum = 0.0;
    for (size_t t = 0; t < in.size(); ++t) {
      out[t] = std::exp(in[t] - peak);
      sum += out[t];
    }
    for (double& weight : out) weight /= sum;
  }
  return weights;
}

Matrix WeightedSum(const Matrix& weights, const Matrix& v) {
  KVT_CHECK(weights.cols() == v.rows());
  Matrix result(weights.rows(), v.cols());
  const size_t full_count = v.rows() / kTokenLanes * kTokenLanes;
  for (size_t t = 0; t < full_count; t += kTokenLanes) {
    const double* rows = v.Row(t).data();
    const size_t dims = v.cols();
    for (size_t i = 0; i < weights.rows(); ++i) {
      const double* w = weights.Row(i).data() + t;
      double* out = result.Row(i).data();
      for (size_t d = 0; d < dims; ++d) {
        out[d] += w[0] * rows[d] + w[1] * rows[dims + d] + w[2] * rows[2 * dims + d] +
                  w[3] * rows[3 * dims + d];
      }
    }
  }
  for (size_t t = full_count; t < v.rows(); ++t) {
    for (size_t i = 0; i < weights.rows(); ++i) {
      for (size_t d = 0; d < v.cols(); ++d) result.Row(i)[d] += weights.Row(i)[t] * v.Row(t)[d];
    }
  }
  return result;
}

double RelativeError(const Matrix& approximate, const Matrix& exact) {
  KVT_CHECK(approximate.rows() == exact.rows() && approximate.cols() == exact.cols());
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < exact.values().size(); ++i) {
    const double x = exact.values()[i];
    const double error = approximate.values()[i] - x;
    difference += error * error;
    norm += x * x;
  }
  return Ratio(std::sqrt(difference), std::sqrt(norm));
}

double RelativeScoreError(const Matrix& approximate, const Matrix& exact) {
  KVT_CHECK(approximate.rows() == exact.rows() && approximate.cols() == exact.cols());
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < exact.rows(); ++i) {
    const double shift = Mean(approximate.Row(i));
    const double centre = Mean(exact.Row(i));
    for (size_t t = 0; t < exact.cols(); ++t) {
      const double x = exact.Row(i)[t] - centre;
      const double error = approximate.Row(i)[t] - shift - x;
      difference += error * error;
      norm += x * x;
    }
  }
  return Ratio(std::sqrt(difference), std::sqrt(norm));
}

double RelativeMaxError(const Matrix& approximate, const Matrix& exact) {
  KVT_CHECK(approximate.rows() == exact.rows() && approximate.cols() == exact.cols());
  double difference = 0.0;
  for (size_t i = 0; i < exact.values().size(); ++i) {
    difference = std::max(difference, std::abs(approximate.values()[i] - exact.values()[i]));
  }
  return Ratio(difference, Amax(exact));
}

}  // namespace kvtier::ctl::eval
