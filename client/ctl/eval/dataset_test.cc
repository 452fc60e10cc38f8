// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "client/ctl/eval/attention.h"
#include "client/ctl/eval/random.h"
#include "proto/base/crc32c.h"

namespace kvtier::ctl::eval {
namespace {

uint32_t Checksum(const Matrix& matrix) {
  std::vector<float> values(matrix.values().begin(), matrix.values().end());
  return Crc32c(std::as_bytes(std::span(values)));
}

std::vector<double> ChannelAmax(const Matrix& k) {
  std::vector<double> amax(k.cols(), 0.0);
  for (size_t t = 0; t < k.rows(); ++t) {
    for (size_t d = 0; d < k.cols(); ++d) amax[d] = std::max(amax[d], std::abs(k.Row(t)[d]));
  }
  return amax;
}

TEST(RandomTest, FixedFunctionsAreThoseOfTheLibrary) {
  for (double x = 1e-12; x < 1e12; x *= 1.37) {
    EXPECT_NEAR(FixedLog(x), std::log(x), 1e-14 * std::max(1.0, std::abs(std::log(x))));
  }
  for (double x = -40.0; x < 40.0; x += 0.173) {
    EXPECT_NEAR(FixedExp(x) / std::exp(x), 1.0, 2e-14);
  }
}

TEST(RandomTest, NormalsHaveTheirMoments) {
  Random random(3, 0);
  constexpr int kCount = 200'000;
  double sum = 0.0;
  double squares = 0.0;
  double fourths = 0.0;
  for (int i = 0; i < kCount; ++i) {
    const double x = random.Normal();
    sum += x;
    squares += x * x;
    fourths += x * x * x * x;
  }
  // Standard errors 0.0022, 0.0032 and 0.022.
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);
  EXPECT_NEAR(squares / kCount, 1.0, 0.015);
  EXPECT_NEAR(fourths / kCount, 3.0, 0.1);
}

TEST(RandomTest, StudentsTailsAreHeavy) {
  Random random(3, 0);
  constexpr int kCount = 100'000;
  int beyond = 0;
  for (int i = 0; i < kCount; ++i) beyond += std::abs(random.StudentT(4)) > 4.604 ? 1 : 0;
  // P(|t4| > 4.604) = 0.01.
  EXPECT_NEAR(beyond, 1000, 150);
}

// The checksums are those of a program in Python written from docs/accuracy.md.
TEST(DatasetTest, SyntheticDataIsTheSameBitsEverywhere) {
  const SyntheticShape shape{.token_count = 64, .head_dim = 64, .query_count = 4};
  const uint32_t kExpected[] = {0x197F4C0E, 0x107E60B1, 0x6BAD84D7, 0xD847E455, 0x61D447E6};
  for (size_t i = 0; i < std::size(kAllFamilies); ++i) {
    SCOPED_TRACE(FamilyName(kAllFamilies[i]));
    const Head head = MakeSynthetic(kAllFamilies[i], shape, 5);
    EXPECT_EQ(Checksum(head.k) ^ Checksum(head.v) ^ Checksum(head.q), kExpected[i]);
  }
}

TEST(DatasetTest, ScoresHaveADeviationOfThree) {
  const SyntheticShape shape{.token_count = 512, .head_dim = 64, .query_count = 4};
  const Matrix zeros(4, 512);
  for (const Family family : kAllFamilies) {
    for (const double sigma : {1.0, 0.01}) {
      SCOPED_TRACE(testing::Message() << FamilyName(family) << ", sigma " << sigma);
      SyntheticShape scaled = shape;
      scaled.sigma = sigma;
      const Head head = MakeSynthetic(family, scaled, 1);
      const Matrix scores = Scores(head.q, head.k, head.softmax_scale);
      double squares = 0.0;
      for (size_t i = 0; i < scores.rows(); ++i) {
        double mean = 0.0;
        for (const double score : scores.Row(i)) mean += score / 512;
        for (const double score : scores.Row(i)) squares += (score - mean) * (score - mean);
      }
      EXPECT_NEAR(std::sqrt(squares / (4 * 512)), 3.0, 1e-4);
    }
  }
}

TEST(DatasetTest, FourChannelsAreOutliersWhereTheFamilySaysSo) {
  // So few channels that the same one would often be drawn twice.
  const SyntheticShape shape{.token_count = 256, .head_dim = 8, .query_count = 1};
  for (const Family family : {Family::kGauss, Family::kOutZm, Family::kOutBias}) {
    SCOPED_TRACE(FamilyName(family));
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const std::vector<double> amax = ChannelAmax(MakeSynthetic(family, shape, seed).k);
      const auto large =
          std::count_if(amax.begin(), amax.end(), [](double size) { return size > 8.0; });
      EXPECT_EQ(large, family == Family::kGauss ? 0 : 4) << "seed " << seed;
    }
  }
}

TEST(DatasetTest, NamesOfFamiliesAreRead) {
  EXPECT_EQ(ParseFamilies("all")->size(), std::size(kAllFamilies));
  EXPECT_EQ(*ParseFamilies("t4,gauss"), (std::vector<Family>{Family::kStudent4, Family::kGauss}));
  for (const Family family : kAllFamilies) {
    EXPECT_EQ(ParseFamilies(FamilyName(family))->front(), family);
  }
  EXPECT_EQ(ParseFamilies("gaus").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseFamilies("").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::ctl::eval
