// SPDX-License-Identifier: Apache-2.0
#include "kernels/calibrate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261129;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Stats = std::vector<ChannelStats>;

// [token][dim], BF16, every magnitude different: channel d has a bias and a range of its own.
std::vector<uint16_t> MakeRows(uint32_t tokens, uint32_t dims, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> rows(size_t{tokens} * dims);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto d = static_cast<float>(i % dims);
    rows[i] = FloatToBf16((normal(random) + std::sin(d)) * std::exp2(std::fmod(d, 9.0F) - 4.0F));
  }
  return rows;
}

ConstRows Bf16Rows(const std::vector<uint16_t>& rows, uint32_t dims, uint32_t first_token = 0) {
  return {.type = ElementType::kBf16,
          .data = rows.data() + size_t{first_token} * dims,
          .token_stride = dims};
}

Stats ObserveAll(const ConstRows& rows, uint32_t tokens, uint32_t dims) {
  Stats stats(dims);
  const Status status = Observe(rows, tokens, stats);
  EXPECT_TRUE(status.ok()) << status.message();
  return stats;
}

// The mean of channel d, and the mean magnitude, in extended precision.
std::pair<double, double> ReferenceMeans(const std::vector<uint16_t>& rows, uint32_t dims,
                                         uint32_t d) {
  long double sum = 0;
  long double magnitude = 0;
  size_t count = 0;
  for (size_t i = d; i < rows.size(); i += dims, ++count) {
    sum += Bf16ToFloat(rows[i]);
    magnitude += std::fabs(Bf16ToFloat(rows[i]));
  }
  const auto n = static_cast<long double>(count);
  return {static_cast<double>(sum / n), static_cast<double>(magnitude / n)};
}

TEST(CalibrateTest, CountsExtremesAndMeansOfEveryChannel) {
  const std::vector<uint16_t> rows = MakeRows(1'000, 80, kSeed);
  const Stats stats = ObserveAll(Bf16Rows(rows, 80), 1'000, 80);
  for (uint32_t d = 0; d < 80; ++d) {
    float low = kInf;
    float high = -kInf;
    for (size_t i = d; i < rows.size(); i += 80) {
      low = std::min(low, Bf16ToFloat(rows[i]));
      high = std::max(high, Bf16ToFloat(rows[i]));
    }
    EXPECT_EQ(stats[d].count, 1'000U);
    EXPECT_EQ(stats[d].min, low);
    EXPECT_EQ(stats[d].max, high);
    const auto [mean, magnitude] = ReferenceMeans(rows, 80, d);
    EXPECT_NEAR(MeanOf(stats[d]), mean, 1e-15 * magnitude);
  }
}

TEST(CalibrateTest, TypesStridesAndPagesGiveTheSameStats) {
  // 60 tokens of 64 channels whose values FP8, FP16 and BF16 all hold.
  constexpr uint32_t kTokens = 60;
  constexpr uint32_t kDims = 64;
  std::mt19937 random(kSeed);
  std::vector<float> values(size_t{kTokens} * kDims);
  for (float& value : values) value = DecodeE4m3Scale(static_cast<uint8_t>(random() % 0x7F));
  const Stats expected = ObserveAll(
      {.type = ElementType::kFp32, .data = values.data(), .token_stride = kDims}, kTokens, kDims);

  std::vector<uint8_t> fp8(values.size());
  std::vector<uint16_t> fp16(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    fp8[i] = EncodeE4m3Scale(values[i] * 4.0F > 448.0F ? 448.0F : values[i]);
    fp16[i] = FloatToFp16(values[i]);
  }
  EXPECT_EQ(ObserveAll({.type = ElementType::kFp16, .data = fp16.data(), .token_stride = kDims},
                       kTokens, kDims),
            expected);
  // FP8 with a scale of 1/2 is the same as values halved.
  std::vector<float> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) halves[i] = DecodeE4m3Scale(fp8[i]) * 0.5F;
  EXPECT_EQ(
      ObserveAll(
          {.type = ElementType::kFp8E4m3, .data = fp8.data(), .token_stride = kDims, .scale = 0.5F},
          kTokens, kDims),
      ObserveAll({.type = ElementType::kFp32, .data = halves.data(), .token_stride = kDims},
                 kTokens, kDims));

  // Pages of 16 tokens in another order, two heads a token, the second one observed, from slot 3.
  constexpr uint64_t kStride = 2 * kDims;
  const uint32_t table[] = {3, 0, 4, 1};
  std::vector<uint16_t> paged(5 * 16 * kStride, FloatToFp16(9999.0F));
  for (uint32_t t = 0; t < kTokens; ++t) {
    const uint32_t slot = t + 3;
    std::copy_n(&fp16[size_t{t} * kDims], kDims,
                &paged[(table[slot / 16] * 16 + slot % 16) * kStride + kDims]);
  }
  EXPECT_EQ(ObserveAll({.type = ElementType::kFp16,
                        .data = paged.data() + kDims,
                        .token_stride = kStride,
                        .paging = {.page_table = table,
                                   .page_table_count = 4,
                                   .page_tokens = 16,
                                   .page_stride = 16 * kStride,
                                   .first_slot = 3}},
                       kTokens, kDims),
            expected);
}

TEST(CalibrateTest, LeavesOutWhatIsNotFinite) {
  // The last one is finite in FP32, but BF16 rounds it to infinity.
  const float rows[] = {1, kNan, 3, -kInf, -2, 5, 6, 0x1.FFp127F};
  Stats stats = ObserveAll({.type = ElementType::kFp32, .data = rows, .token_stride = 4}, 2, 4);
  EXPECT_EQ(stats[0], (ChannelStats{.count = 2, .min = -2, .max = 1, .sum = -1}));
  EXPECT_EQ(stats[1],
            (ChannelStats{.count = 1, .nonfinite_count = 1, .min = 5, .max = 5, .sum = 5}));
  EXPECT_EQ(stats[2], (ChannelStats{.count = 2, .min = 3, .max = 6, .sum = 9}));
  EXPECT_EQ(stats[3], (ChannelStats{.nonfinite_count = 2}));
  EXPECT_EQ(MeanOf(stats[3]), 0.0);
  float amax = -1.0F;
  ASSERT_TRUE(AmaxOf(stats, {}, {}, &amax).ok());
  EXPECT_EQ(amax, 6.0F);
}

TEST(CalibrateTest, SignsOfZeroDoNotShow) {
  const float a[] = {0.0F, -0.0F};
  const float b[] = {-0.0F, 0.0F};
  for (const float* rows : {a, b}) {
    const Stats stats =
        ObserveAll({.type = ElementType::kFp32, .data = rows, .token_stride = 1}, 2, 1);
    EXPECT_FALSE(std::signbit(stats[0].min));
    EXPECT_FALSE(std::signbit(stats[0].max));
  }
}

// Observes `rows` in parts of random sizes, and merges the parts in a random tree.
Stats MergeRandomly(const std::vector<uint16_t>& rows, uint32_t dims, std::mt19937* random) {
  const auto tokens = static_cast<uint32_t>(rows.size() / dims);
  std::vector<Stats> parts;
  for (uint32_t begin = 0; begin < tokens;) {
    const uint32_t count = std::min(1 + static_cast<uint32_t>((*random)() % 700), tokens - begin);
    parts.push_back(ObserveAll(Bf16Rows(rows, dims, begin), count, dims));
    begin += count;
  }
  while (parts.size() > 1) {
    std::swap(parts[(*random)() % parts.size()], parts.back());
    const Stats last = parts.back();
    parts.pop_back();
    EXPECT_TRUE(Merge(last, parts[(*random)() % parts.size()]).ok());
  }
  return parts[0];
}

TEST(CalibrateTest, MergesDoNotDependOnOrder) {
  constexpr uint32_t kTokens = 20'000;
  std::mt19937 random(kSeed);
  std::vector<uint16_t> rows = MakeRows(kTokens, 16, kSeed);
  // Channel 0 cancels: huge values, positive in the first half and negative in the second, around a
  // small mean. FP64 cannot hold the sum of a half to the last bit.
  for (uint32_t t = 0; t < kTokens; ++t) {
    const float huge = t < kTokens / 2 ? 0x1p44F : -0x1p44F;
    rows[size_t{t} * 16] = FloatToBf16(t % 4 == 0 ? 1.5F : huge);
  }
  const Stats whole = ObserveAll(Bf16Rows(rows, 16), kTokens, 16);
  for (int round = 0; round < 20; ++round) {
    const Stats merged = MergeRandomly(rows, 16, &random);
    for (uint32_t d = 0; d < 16; ++d) {
      EXPECT_EQ(merged[d].count, whole[d].count);
      EXPECT_EQ(merged[d].min, whole[d].min);
      EXPECT_EQ(merged[d].max, whole[d].max);
      const auto [mean, magnitude] = ReferenceMeans(rows, 16, d);
      EXPECT_NEAR(MeanOf(merged[d]), mean, 1e-15 * magnitude) << "channel " << d;
      EXPECT_NEAR(MeanOf(merged[d]), MeanOf(whole[d]), 1e-12 * std::fabs(mean))
          << "channel " << d << " round " << round << " seed " << kSeed;
    }
  }
}

TEST(CalibrateTest, WorkersObserveOnTheirOwn) {
  constexpr uint32_t kWorkers = 4;
  const std::vector<uint16_t> rows = MakeRows(kWorkers * 256, 64, kSeed);
  std::vector<Stats> parts(kWorkers, Stats(64));
  {
    std::vector<std::jthread> workers;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      workers.emplace_back([&, w] { (void)Observe(Bf16Rows(rows, 64, w * 256), 256, parts[w]); });
    }
  }
  for (uint32_t w = 1; w < kWorkers; ++w) ASSERT_TRUE(Merge(parts[w], parts[0]).ok());
  EXPECT_EQ(parts[0], ObserveAll(Bf16Rows(rows, 64), kWorkers * 256, 64));
}

TEST(CalibrateTest, ChangesNothingWhenItRefuses) {
  const float row[] = {1, 2};
  Stats stats(2);
  EXPECT_FALSE(
      Observe({.type = ElementType::kFp32, .data = nullptr, .token_stride = 2}, 1, stats).ok());
  EXPECT_FALSE(
      Observe({.type = ElementType::kFp32, .data = row, .token_stride = 1}, 1, stats).ok());
  Stats large(257);
  EXPECT_FALSE(
      Observe({.type = ElementType::kFp32, .data = row, .token_stride = 257}, 0, large).ok());
  EXPECT_FALSE(Merge(Stats(3), stats).ok());
  EXPECT_EQ(stats, Stats(2));
  float amax = -1.0F;
  EXPECT_FALSE(AmaxOf(stats, std::vector<float>(3), {}, &amax).ok());
  EXPECT_EQ(amax, -1.0F);
}

TEST(CalibrateTest, AmaxIsThatOfTheTransformedValues) {
  for (uint32_t seed = kSeed; seed < kSeed + 20; ++seed) {
    const std::vector<uint16_t> rows = MakeRows(300, 64, seed);
    const Stats stats = ObserveAll(Bf16Rows(rows, 64), 300, 64);
    std::vector<float> mean(64);
    std::vector<float> smooth(64);
    ASSERT_TRUE(ChooseTransform(stats, {.mean = true, .smooth_alpha = 0.75F}, mean, smooth).ok());
    float largest = 0.0F;
    for (size_t i = 0; i < rows.size(); ++i) {
      const float x = (Bf16ToFloat(rows[i]) - mean[i % 64]) * (1.0F / smooth[i % 64]);
      largest = std::max(largest, std::fabs(Bf16ToFloat(FloatToBf16(x))));
    }
    float amax = 0.0F;
    ASSERT_TRUE(AmaxOf(stats, mean, smooth, &amax).ok());
    EXPECT_EQ(amax, largest) << "seed " << seed;
  }
}

// Stats of a channel that lay within [-amax, amax].
ChannelStats Symmetric(float amax) { return {.count = 1'000, .min = -amax, .max = amax, .sum = 0}; }

TEST(CalibrateTest, SmoothingIsByPowersOfTwoAroundOne) {
  const Stats stats = {Symmetric(16), Symmetric(1), Symmetric(4), Symmetric(4)};
  std::vector<float> smooth(4);
  ASSERT_TRUE(ChooseTransform(stats, {.smooth_alpha = 0.5F}, {}, smooth).ok());
  EXPECT_EQ(smooth, (std::vector<float>{2, 0.5F, 1, 1}));
  ASSERT_TRUE(ChooseTransform(stats, {.smooth_alpha = 1.0F}, {}, smooth).ok());
  EXPECT_EQ(smooth, (std::vector<float>{4, 0.25F, 1, 1}));
}

TEST(CalibrateTest, SilentChannelsAreNotMagnifiedWithoutBound) {
  // As if the silent ones had 64 / 64 = 1.
  const Stats stats = {Symmetric(64), Symmetric(0), Symmetric(1e-30F), Symmetric(64)};
  std::vector<float> smooth(4);
  ASSERT_TRUE(ChooseTransform(stats, {.smooth_alpha = 1.0F}, {}, smooth).ok());
  EXPECT_EQ(smooth, (std::vector<float>{8, 0.125F, 0.125F, 8}));
  ASSERT_TRUE(ChooseTransform(Stats(4, Symmetric(0)), {.smooth_alpha = 1.0F}, {}, smooth).ok());
  EXPECT_EQ(smooth, (std::vector<float>{1, 1, 1, 1}));
}

TEST(CalibrateTest, RefusesTransformsOfFewTokens) {
  Stats stats(2, Symmetric(1));
  stats[1].count = 255;
  std::vector<float> mean(2, 7.0F);
  std::vector<float> smooth(2, 7.0F);
  EXPECT_FALSE(ChooseTransform(stats, {.mean = true, .smooth_alpha = 1}, mean, smooth).ok());
  EXPECT_FALSE(ChooseTransform(stats, {.mean = true, .token_count_min = 2}, mean, smooth).ok());
  for (const float alpha : {-0.5F, 1.5F, kNan}) {
    EXPECT_FALSE(
        ChooseTransform(stats, {.smooth_alpha = alpha, .token_count_min = 2}, {}, smooth).ok());
  }
  EXPECT_EQ(mean, std::vector<float>(2, 7.0F));
  EXPECT_EQ(smooth, std::vector<float>(2, 7.0F));
  EXPECT_TRUE(ChooseTransform(stats, {.mean = true, .token_count_min = 255}, mean, {}).ok());
}

TEST(CalibrateTest, SealedDataSaturateOnlyFarBeyondCalibration) {
  constexpr TileShape kShape{.block_tokens = 64, .head_dim = 64};
  const std::vector<uint16_t> rows = MakeRows(256, 64, kSeed);
  const Stats stats = ObserveAll(Bf16Rows(rows, 64), 256, 64);
  std::vector<float> mean(64);
  std::vector<float> smooth(64);
  ASSERT_TRUE(ChooseTransform(stats, {.mean = true, .smooth_alpha = 0.5F}, mean, smooth).ok());
  SealOptions options{.k_mean = mean, .k_smooth = smooth};
  float amax = 0.0F;
  ASSERT_TRUE(AmaxOf(stats, mean, smooth, &amax).ok());
  ASSERT_TRUE(GlobalScaleFromAmax(amax, &options.g_k).ok());
  ASSERT_TRUE(AmaxOf(stats, {}, {}, &amax).ok());
  ASSERT_TRUE(GlobalScaleFromAmax(amax, &options.g_v).ok());
  // Times 32 puts the largest value, and with it some vectors, beyond 2688 * g = 6 to 12 amax.
  for (const float factor : {1.0F, 32.0F}) {
    std::vector<uint16_t> scaled(rows);
    for (uint16_t& value : scaled) value = FloatToBf16(Bf16ToFloat(value) * factor);
    std::vector<std::byte> tile(TileBytes(kShape));
    SealStats seal_stats;
    for (uint32_t t = 0; t < 256; t += kShape.block_tokens) {
      ASSERT_TRUE(SealTile(kShape, Bf16Rows(scaled, 64, t), Bf16Rows(scaled, 64, t), options, tile,
                           &seal_stats)
                      .ok());
    }
    EXPECT_EQ(seal_stats.saturated_count > 0, factor > 1.0F);
  }
}

}  // namespace
}  // namespace kvtier::kernels
