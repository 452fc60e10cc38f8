// SPDX-License-Identifier: Apache-2.0
#include "kernels/engine_pages_scale.h"

#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"
#include "kernels/nvfp4.h"

namespace kvtier::kernels {
namespace {

using Convention = GlobalScaleConvention;

constexpr Convention kAll[] = {Convention::kDequantMultiplier, Convention::kAmaxOver2688,
                               Convention::kAmaxOver448, Convention::kAmaxOver6,
                               Convention::kEncodeScale};

float Multiplier(float value, Convention convention) {
  float g = -1.0F;
  EXPECT_TRUE(ToDequantMultiplier(value, convention, &g).ok());
  return g;
}

float Convert(float value, Convention from, Convention to) {
  float converted = -1.0F;
  EXPECT_TRUE(ConvertGlobalScale(value, from, to, &converted).ok());
  return converted;
}

TEST(ToDequantMultiplier, IsTheNumberTheKernelsWereGivenOrItsInverse) {
  for (const Convention convention : kAll) {
    const bool inverse = convention == Convention::kEncodeScale;
    EXPECT_EQ(Multiplier(0.0078125F, convention), inverse ? 128.0F : 0.0078125F);
    EXPECT_EQ(Multiplier(3.0F, convention), inverse ? 1.0F / 3.0F : 3.0F);
  }
}

// What all of it is for: the writer of a page divides by what this function returns. The writers'
// rule, block scale = amax_of_block / 6 / g, is restated here from their sources.
TEST(ToDequantMultiplier, UndoesTheWriterOfEachConvention) {
  const double amax = 20.16;
  const double block_amax = 5.25;
  const struct {
    Convention convention;
    double value;
    double top_scale;  // The block scale of a block that holds amax.
  } cases[] = {{Convention::kAmaxOver2688, amax / 2688, 448},
               {Convention::kAmaxOver448, amax / 448, 448.0 / 6},
               {Convention::kAmaxOver6, amax / 6, 1},
               {Convention::kEncodeScale, 2688 / amax, 448}};
  for (const auto& c : cases) {
    const auto value = static_cast<float>(c.value);
    const bool encode = c.convention == Convention::kEncodeScale;
    const auto block_scale = [&](double block) {
      return encode ? block / 6 * static_cast<double>(value)
                    : block / 6 / static_cast<double>(value);
    };
    EXPECT_NEAR(block_scale(amax), c.top_scale, 1e-4 * c.top_scale);
    const auto g = static_cast<double>(Multiplier(value, c.convention));
    EXPECT_NEAR(6 * block_scale(block_amax) * g, block_amax, 1e-5);
  }
}

TEST(ToDequantMultiplier, PowersOfTwoGoThroughEveryConventionAndBackExactly) {
  for (int exponent = -100; exponent <= 100; ++exponent) {
    const float g = std::ldexp(1.0F, exponent);
    for (const Convention convention : kAll) {
      float value = 0;
      ASSERT_TRUE(FromDequantMultiplier(g, convention, &value).ok());
      ASSERT_EQ(Multiplier(value, convention), g);
      ASSERT_TRUE(IsValidGlobalScale(value));
    }
  }
}

TEST(ConvertGlobalScale, KeepsAmax) {
  const float amax = 21.0F;  // All quotients below round, so each is compared with its own formula.
  const float values[] = {amax / 2688, amax / 448, amax / 6, 2688 / amax};
  for (int from = 1; from < 5; ++from) {
    for (int to = 1; to < 5; ++to) {
      const float converted = Convert(values[from - 1], kAll[from], kAll[to]);
      EXPECT_NEAR(converted / values[to - 1], 1.0F, 2e-7F) << from << " to " << to;
    }
  }
}

TEST(ConvertGlobalScale, MatchesTheFactorsOfEnginesThatRescale) {
  std::mt19937 random(20261129);
  std::lognormal_distribution<float> scales(-4, 3);
  for (int i = 0; i < 1000; ++i) {
    const float value = scales(random);
    // SGLang on SM100, and TRT-LLM in some versions, load amax / 2688 and multiply by 6.
    EXPECT_EQ(Convert(value, Convention::kAmaxOver2688, Convention::kAmaxOver448), 6.0F * value);
    EXPECT_EQ(Convert(value, Convention::kAmaxOver6, Convention::kAmaxOver2688), value / 448.0F);
    EXPECT_EQ(Convert(value, Convention::kEncodeScale, Convention::kEncodeScale), value);
    EXPECT_EQ(Convert(value, Convention::kAmaxOver2688, Convention::kEncodeScale),
              static_cast<float>(1.0 / static_cast<double>(value)));
  }
}

TEST(GlobalScaleErrors, AreInvalidArgumentAndWriteNothing) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
  const auto unknown = static_cast<Convention>(5);
  float out = 7.0F;
  for (const float value : {0.0F, -0.0F, -1.0F, kInfinity, -kInfinity, std::nanf("")}) {
    for (const Convention convention : kAll) {
      EXPECT_EQ(ToDequantMultiplier(value, convention, &out).code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(FromDequantMultiplier(value, convention, &out).code(),
                StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(
        ConvertGlobalScale(value, Convention::kAmaxOver6, Convention::kAmaxOver448, &out).code(),
        StatusCode::kInvalidArgument);
  }
  const auto invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(ToDequantMultiplier(1.0F, unknown, &out).code(), invalid);
  EXPECT_EQ(FromDequantMultiplier(1.0F, unknown, &out).code(), invalid);
  EXPECT_EQ(ConvertGlobalScale(1.0F, unknown, Convention::kAmaxOver6, &out).code(), invalid);
  EXPECT_EQ(ConvertGlobalScale(1.0F, Convention::kAmaxOver6, unknown, &out).code(), invalid);
  EXPECT_EQ(
      ConvertGlobalScale(1.0F, Convention::kDequantMultiplier, Convention::kAmaxOver6, &out).code(),
      invalid);
  EXPECT_EQ(
      ConvertGlobalScale(1.0F, Convention::kAmaxOver6, Convention::kDequantMultiplier, &out).code(),
      invalid);
  // Results that FP32 does not hold.
  EXPECT_EQ(ToDequantMultiplier(kDenormal, Convention::kEncodeScale, &out).code(), invalid);
  EXPECT_EQ(
      ConvertGlobalScale(kDenormal, Convention::kAmaxOver6, Convention::kAmaxOver448, &out).code(),
      invalid);
  EXPECT_EQ(
      ConvertGlobalScale(3e38F, Convention::kAmaxOver2688, Convention::kAmaxOver448, &out).code(),
      invalid);
  EXPECT_EQ(ToDequantMultiplier(1.0F, Convention::kAmaxOver6, nullptr).code(), invalid);
  EXPECT_EQ(out, 7.0F);
}

}  // namespace
}  // namespace kvtier::kernels
