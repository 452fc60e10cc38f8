// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "client/ctl/eval/random.h"

namespace kvtier::ctl::eval {
namespace {

constexpr uint64_t kMatrixSeed = 7;

Matrix RandomMatrix(size_t rows, size_t cols, uint64_t stream) {
  Random random(kMatrixSeed, stream);
  Matrix matrix(rows, cols);
  for (double& value : matrix.values()) value = random.Normal();
  return matrix;
}

TEST(AttentionTest, IsTheTextbookSum) {
  RecordProperty("seed", static_cast<int>(kMatrixSeed));
  // Counts on both sides of the lanes that the loops unroll.
  for (const size_t query_count : {1U, 7U, 8U, 9U}) {
    for (const size_t token_count : {1U, 4U, 5U, 11U}) {
      SCOPED_TRACE(testing::Message() << query_count << " queries, " << token_count << " tokens");
      constexpr size_t kDims = 6;
      const Matrix q = RandomMatrix(query_count, kDims, 1);
      const Matrix k = RandomMatrix(token_count, kDims, 2);
      const Matrix v = RandomMatrix(token_count, kDims, 3);
      const Matrix out = WeightedSum(Softmax(Scores(q, k, 0.5)), v);
      for (size_t i = 0; i < query_count; ++i) {
        std::vector<double> expected(kDims, 0.0);
        double sum = 0.0;
        for (size_t t = 0; t < token_count; ++t) {
          double score = 0.0;
          for (size_t d = 0; d < kDims; ++d) score += 0.5 * q.Row(i)[d] * k.Row(t)[d];
          sum += std::exp(score);
          for (size_t d = 0; d < kDims; ++d) expected[d] += std::exp(score) * v.Row(t)[d];
        }
        for (size_t d = 0; d < kDims; ++d) {
          EXPECT_NEAR(out.Row(i)[d], expected[d] / sum, 1e-13);
        }
      }
    }
  }
}

TEST(AttentionTest, SoftmaxSurvivesLargeScores) {
  Matrix scores(1, 2);
  scores.Row(0)[0] = 5000.0;
  scores.Row(0)[1] = 5000.0 - std::log(3.0);
  const Matrix weights = Softmax(scores);
  EXPECT_NEAR(weights.Row(0)[0], 0.75, 1e-12);
  EXPECT_NEAR(weights.Row(0)[1], 0.25, 1e-12);
}

TEST(AttentionTest, RelativeErrorsAreRatiosOfNorms) {
  Matrix exact(1, 2);
  exact.Row(0)[0] = 3.0;
  exact.Row(0)[1] = -4.0;
  Matrix approximate = exact;
  approximate.Row(0)[1] = -4.5;
  EXPECT_DOUBLE_EQ(RelativeError(approximate, exact), 0.1);
  EXPECT_DOUBLE_EQ(RelativeMaxError(approximate, exact), 0.125);
  const Matrix zeros(1, 2);
  EXPECT_EQ(RelativeError(zeros, zeros), 0.0);
  EXPECT_EQ(RelativeError(exact, zeros), std::numeric_limits<double>::infinity());
}

TEST(AttentionTest, ScoreErrorIgnoresWhatSoftmaxIgnores) {
  const Matrix exact = RandomMatrix(3, 9, 4);
  Matrix shifted = exact;
  for (size_t i = 0; i < shifted.rows(); ++i) {
    for (double& value : shifted.Row(i)) value += 10.0 * static_cast<double>(i + 1);
  }
  EXPECT_LT(RelativeScoreError(shifted, exact), 1e-13);
  EXPECT_GT(RelativeError(shifted, exact), 1.0);
  shifted.Row(1)[2] += 0.5;
  EXPECT_GT(RelativeScoreError(shifted, exact), 0.05);
}

}  // namespace
}  // namespace kvtier::ctl::eval
