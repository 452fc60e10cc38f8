// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/quantizers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "client/ctl/eval/attention.h"
#include "client/ctl/eval/random.h"
#include "kernels/nvfp4.h"

namespace kvtier::ctl::eval {
namespace {

constexpr uint64_t kSeed = 11;

Matrix RowOf(std::initializer_list<double> values) {
  Matrix row(1, values.size());
  std::copy(values.begin(), values.end(), row.Row(0).begin());
  return row;
}

std::vector<double> ValuesOf(const Matrix& matrix) {
  return {matrix.values().begin(), matrix.values().end()};
}

Matrix RandomMatrix(size_t rows, size_t cols) {
  Random random(kSeed, 0);
  Matrix matrix(rows, cols);
  for (double& value : matrix.values()) value = static_cast<float>(random.Normal());
  return matrix;
}

TEST(QuantizersTest, Bf16KeepsEightBits) {
  EXPECT_EQ(ValuesOf(RoundToBf16(RowOf({1.0, -1.00390625, 1.01171875, 3.14159}))),
            (std::vector<double>{1.0, -1.0, 1.015625, 3.140625}));
}

TEST(QuantizersTest, Fp8RoundsToNearestEvenAndSaturates) {
  // Steps of 1/8 from 1 to 2, of 2^-9 below 2^-6.
  EXPECT_EQ(ValuesOf(Fp8(RowOf({1.0625, -1.1875, 500.0, -1e9, 0x1p-10, 0x1.8p-9}), 1.0F)),
            (std::vector<double>{1.0, -1.25, 448.0, -448.0, 0.0, 0x1p-8}));
  EXPECT_EQ(ValuesOf(Fp8(RowOf({2.0, 896.0}), 2.0F)), (std::vector<double>{2.0, 896.0}));
}

TEST(QuantizersTest, Fp8PerRowScalesEachRowByItself) {
  Matrix x(3, 2);
  x.Row(0)[0] = 448.0 * 1024;
  x.Row(0)[1] = 1024.0;
  x.Row(1)[0] = -448.0 / 1024;
  x.Row(1)[1] = 1.0 / 1024;
  EXPECT_EQ(ValuesOf(Fp8PerRow(x)), ValuesOf(x));  // a row of zeros too
}

TEST(QuantizersTest, Mxfp4FloorSaturatesWhereCeilDoesNot) {
  // amax 7: floor has scale 1 and cuts 7 to 6, ceil has scale 2 and rounds 3.5 to the even 4.
  EXPECT_EQ(ValuesOf(Mxfp4(RowOf({7.0, 1.0, -0.5}), E8m0Rule::kFloor)),
            (std::vector<double>{6.0, 1.0, -0.5}));
  EXPECT_EQ(ValuesOf(Mxfp4(RowOf({7.0, 1.0, -0.5}), E8m0Rule::kCeil)),
            (std::vector<double>{8.0, 1.0, 0.0}));
  EXPECT_EQ(ValuesOf(Mxfp4(RowOf({6.0, 0.5}), E8m0Rule::kCeil)), (std::vector<double>{6.0, 0.5}));
  EXPECT_EQ(ValuesOf(Mxfp4(RowOf({0x1.8p-30, 0.0}), E8m0Rule::kFloor)),
            (std::vector<double>{0x1.8p-30, 0.0}));
}

TEST(QuantizersTest, Mxfp4SharesScalesWithinThirtyTwoValues) {
  Matrix x(1, 33);
  x.Row(0)[31] = 4.0;
  x.Row(0)[0] = 0.1;
  x.Row(0)[32] = 0.0625;
  const Matrix stored = Mxfp4(x, E8m0Rule::kFloor);
  EXPECT_EQ(stored.Row(0)[0], 0.0);
  EXPECT_EQ(stored.Row(0)[32], 0.0625);
}

TEST(QuantizersTest, IntegersKeepTheEndsOfTheirGroup) {
  EXPECT_EQ(ValuesOf(IntAsymmetric(RowOf({-3.0, 0.0, 0.4, 0.6, 12.0, 5.0}), {.bits = 4})),
            (std::vector<double>{-3.0, 0.0, 0.0, 1.0, 12.0, 5.0}));
  // Groups of two: 1.9 rounds to 2 of 0..3, the last group has one value.
  EXPECT_EQ(ValuesOf(IntAsymmetric(RowOf({0.0, 3.0, 7.0, 7.0, 0.5}), {.bits = 2, .group = 2})),
            (std::vector<double>{0.0, 3.0, 7.0, 7.0, 0.5}));
}

TEST(QuantizersTest, IntegersAreWithinHalfAStep) {
  RecordProperty("seed", static_cast<int>(kSeed));
  const Matrix x = RandomMatrix(64, 32);
  const Matrix stored = IntAsymmetric(x, {.bits = 4, .group = 32, .fp16_metadata = false});
  for (size_t row = 0; row < x.rows(); ++row) {
    const auto [low, high] = std::minmax_element(x.Row(row).begin(), x.Row(row).end());
    const double step = (*high - *low) / 15;
    for (size_t i = 0; i < x.cols(); ++i) {
      EXPECT_LE(std::abs(stored.Row(row)[i] - x.Row(row)[i]), step / 2 * (1 + 1e-5));
    }
  }
}

TEST(QuantizersTest, MetadataOfIntegersIsRoundedToFp16) {
  const Matrix x = RowOf({1.0, 1.0 + 0x1p-12, 2.0, 0x1.004p1});
  EXPECT_EQ(IntAsymmetric(RowOf({0x1.001p0, 2.0}), {.bits = 4}).Row(0)[0], 1.0);
  EXPECT_EQ(IntAsymmetric(RowOf({0x1.001p0, 2.0}), {.bits = 4, .fp16_metadata = false}).Row(0)[0],
            0x1.001p0);
  EXPECT_LT(RelativeError(IntAsymmetric(x, {.bits = 8}), x), 2e-3);
}

TEST(QuantizersTest, PerChannelIsPerTokenOfTheTransposed) {
  const Matrix x = RandomMatrix(40, 8);
  const Matrix stored = IntAsymmetricPerChannel(x, {.bits = 2});
  for (size_t d = 0; d < x.cols(); ++d) {
    // 40 tokens: a group of 32 and one of 8.
    Matrix group(1, 8);
    for (size_t t = 0; t < 8; ++t) group.Row(0)[t] = x.Row(32 + t)[d];
    const Matrix expected = IntAsymmetric(group, {.bits = 2});
    for (size_t t = 0; t < 8; ++t) EXPECT_EQ(stored.Row(32 + t)[d], expected.Row(0)[t]);
  }
}

TEST(QuantizersTest, StochasticRoundingIsUnbiasedAndStaysBetweenNeighbours) {
  RecordProperty("seed", static_cast<int>(kSeed));
  Matrix x(1, 16);
  for (size_t i = 0; i < 16; ++i) x.Row(0)[i] = 0.4 * static_cast<double>(i) - 2.9;
  x.Row(0)[15] = 6.0;  // scale byte 1.0
  std::vector<double> sums(16, 0.0);
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    const Matrix stored = Nvfp4Stochastic(x, 1.0F, kSeed + static_cast<uint64_t>(round));
    for (size_t i = 0; i < 16; ++i) {
      const double error = stored.Row(0)[i] - x.Row(0)[i];
      EXPECT_LT(std::abs(error), std::abs(x.Row(0)[i]) > 2.0 ? 1.0 : 0.5);
      sums[i] += error;
    }
  }
  // Standard error of a mean of coin tosses of one step: at most 0.5 / sqrt(2000) = 0.011.
  for (const double sum : sums) EXPECT_NEAR(sum / kRounds, 0.0, 0.05);
  const Matrix zeros(1, 16);
  EXPECT_EQ(Amax(Nvfp4Stochastic(zeros, 1.0F, kSeed)), 0.0);
}

TEST(QuantizersTest, RotationIsOrthogonalAndSpreadsOneValue) {
  for (const size_t dims : {64U, 96U, 128U}) {
    SCOPED_TRACE(dims);
    const Matrix x = RandomMatrix(3, dims);
    const Matrix rotated = Rotated(x, kSeed);
    EXPECT_LT(RelativeError(RotatedBack(rotated, kSeed), x), 1e-14);
    EXPECT_GT(RelativeError(rotated, x), 0.5);
    Matrix spike(1, dims);
    spike.Row(0)[5] = 8.0;
    const double run = dims == 96 ? 32.0 : static_cast<double>(dims);
    EXPECT_NEAR(Amax(Rotated(spike, kSeed)), 8.0 / std::sqrt(run), 1e-12);
  }
}

}  // namespace
}  // namespace kvtier::ctl::eval
