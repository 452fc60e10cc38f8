// SPDX-License-Identifier: Apache-2.0
#include "kernels/nvfp4.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/nvfp4_cases.h"

namespace kvtier::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// The oracles below search for the nearest value in FP64 and share nothing with the encoder.

double E4m3Oracle(uint32_t byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15);
  const int mantissa = static_cast<int>(byte & 7);
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

// Index of the nearest of `count` ascending values, a tie to the even index. Distances of the
// inputs used here are exact in FP64, or far from a tie.
template <typename ValueOf>
uint8_t NearestEven(double a, uint32_t count, const ValueOf& value_of) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < count; ++i) {
    const double gain = std::fabs(a - value_of(best)) - std::fabs(a - value_of(i));
    if (gain > 0 || (gain == 0 && i % 2 == 0)) best = i;
    if (value_of(i) > a) break;
  }
  return static_cast<uint8_t>(best);
}

uint8_t E2m1Oracle(float x, double step) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  if (std::isnan(x)) return 7;
  // Far above the last code FP64 could not tell the distances apart.
  const double a = std::fmin(std::fabs(static_cast<double>(x)), 8 * step);
  const uint8_t magnitude = NearestEven(a, 8, [&](uint32_t i) { return kMagnitudes[i] * step; });
  return static_cast<uint8_t>(magnitude | (std::signbit(x) ? 8 : 0));
}

uint8_t E4m3EncodeOracle(float s) {
  if (std::isnan(s)) return 0x7F;
  if (s >= 448) return 0x7E;
  return NearestEven(s, 127, E4m3Oracle);
}

uint8_t CodeAt(const uint8_t codes[kVectorCodeBytes], uint32_t i) {
  return static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4) & 0xF);
}

TEST(E2m1, DecodesAllCodes) {
  const float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (uint8_t code = 0; code < 16; ++code) {
    EXPECT_EQ(std::fabs(DecodeE2m1(code)), magnitudes[code & 7]);
    EXPECT_EQ(std::signbit(DecodeE2m1(code)), code >= 8);
  }
}

TEST(E2m1, EncodesEveryBf16LikeANearestSearch) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float x = Bf16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(EncodeE2m1(x), E2m1Oracle(x, 1.0)) << bits;
  }
}

TEST(E2m1, RoundsTiesToEvenAndNeighboursAway) {
  const float ties[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  for (uint8_t low = 0; low < 7; ++low) {
    const float tie = ties[low];
    const uint8_t even = static_cast<uint8_t>(low + (low & 1));
    EXPECT_EQ(EncodeE2m1(tie), even);
    EXPECT_EQ(EncodeE2m1(-tie), even | 8);
    EXPECT_EQ(EncodeE2m1(std::nextafter(tie, 0.0F)), low);
    EXPECT_EQ(EncodeE2m1(std::nextafter(tie, 9.0F)), low + 1);
  }
}

TEST(E2m1, EncodesSpecialValues) {
  EXPECT_EQ(EncodeE2m1(0.0F), 0x0);
  EXPECT_EQ(EncodeE2m1(-0.0F), 0x8);
  EXPECT_EQ(EncodeE2m1(-0.1F), 0x8);
  EXPECT_EQ(EncodeE2m1(std::numeric_limits<float>::denorm_min()), 0x0);
  EXPECT_EQ(EncodeE2m1(1e30F), 0x7);
  EXPECT_EQ(EncodeE2m1(kInfinity), 0x7);
  EXPECT_EQ(EncodeE2m1(-kInfinity), 0xF);
  EXPECT_EQ(EncodeE2m1(kNan), 0x7);
  EXPECT_EQ(EncodeE2m1(-kNan), 0x7);
}

TEST(E4m3Scale, DecodesAll256Bytes) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const float value = DecodeE4m3Scale(static_cast<uint8_t>(byte));
    EXPECT_EQ(std::signbit(value), byte >= 0x80) << byte;
    if ((byte & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << byte;
    } else {
      EXPECT_EQ(std::fabs(value), E4m3Oracle(byte & 0x7F)) << byte;
    }
    EXPECT_EQ(IsValidScaleByte(static_cast<uint8_t>(byte)), byte < 0x7F);
  }
}

TEST(E4m3Scale, EncodesEveryNonNegativeBf16LikeANearestSearch) {
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const float s = Bf16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(EncodeE4m3Scale(s), E4m3EncodeOracle(s)) << bits;
  }
}

TEST(E4m3Scale, EncodesFloatsAroundEveryMidpointAndValue) {
  for (uint32_t byte = 0; byte < 0x7E; ++byte) {
    const auto midpoint = static_cast<float>((E4m3Oracle(byte) + E4m3Oracle(byte + 1)) / 2);
    for (const float centre : {static_cast<float>(E4m3Oracle(byte)), midpoint}) {
      const auto bits = static_cast<int64_t>(std::bit_cast<uint32_t>(centre));
      for (int64_t ulp = bits < 64 ? 0 : -64; ulp <= 64; ++ulp) {
        const float s = std::bit_cast<float>(static_cast<uint32_t>(bits + ulp));
        ASSERT_EQ(EncodeE4m3Scale(s), E4m3EncodeOracle(s)) << s;
      }
    }
  }
}

TEST(E4m3Scale, EncodesADenseSweepOfFloats) {
  // A prime stride over all floats from 0 to 512 reaches every binade about 2800 times.
  for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(512.0F); bits += 2999) {
    const float s = std::bit_cast<float>(bits);
    ASSERT_EQ(EncodeE4m3Scale(s), E4m3EncodeOracle(s)) << s;
  }
}

TEST(E4m3Scale, EncodesSpecialValues) {
  EXPECT_EQ(EncodeE4m3Scale(0x1p-10F), 0x00);  // A tie between 0 and 2^-9.
  EXPECT_EQ(EncodeE4m3Scale(std::nextafter(0x1p-10F, 1.0F)), 0x01);
  EXPECT_EQ(EncodeE4m3Scale(464.0F), 0x7E);  // Would round to NaN without saturation.
  EXPECT_EQ(EncodeE4m3Scale(kInfinity), 0x7E);
  EXPECT_EQ(EncodeE4m3Scale(kNan), 0x7F);
  EXPECT_EQ(EncodeE4m3Scale(-0.0F), 0x00);
  EXPECT_EQ(EncodeE4m3Scale(-1.0F), 0x00);
}

// Every (BF16 value, scale byte) pair that can occur, for global scales over the allowed range.
void CheckEveryBf16UnderScales(float g, uint32_t scale_step) {
  uint64_t mismatch_count = 0;
  uint64_t case_count = 0;
  for (uint32_t byte = 0; byte <= kScaleByteMax; byte += scale_step) {
    const double step = E4m3Oracle(byte) * static_cast<double>(g);
    const auto check = [&](float x, uint8_t, uint8_t code) {
      ++case_count;
      if (code != (byte == 0 ? 0 : E2m1Oracle(x, step))) ++mismatch_count;
    };
    ASSERT_TRUE(ForEachBf16UnderScale(static_cast<uint8_t>(byte), g, check)) << byte;
  }
  EXPECT_EQ(mismatch_count, 0U) << "of " << case_count << " cases, g = " << g;
  EXPECT_GT(case_count, 100000U);
}

TEST(Quantize16, EncodesEveryBf16UnderEveryScale) { CheckEveryBf16UnderScales(1.0F, 1); }
TEST(Quantize16, EncodesEveryBf16UnderEveryScaleWithSmallG) {
  CheckEveryBf16UnderScales(0x1p-9F, 1);
}
TEST(Quantize16, EncodesEveryBf16WithTheSmallestG) { CheckEveryBf16UnderScales(0x1p-100F, 9); }
TEST(Quantize16, EncodesEveryBf16WithTheLargestG) { CheckEveryBf16UnderScales(0x1p+100F, 9); }
TEST(Quantize16, EncodesEveryBf16WithG2) { CheckEveryBf16UnderScales(2.0F, 7); }

TEST(Quantize16, ChoosesTheCorrectlyRoundedScaleOfEveryBf16Maximum) {
  for (const float g : {1.0F, 0x1p-12F, 0x1p+20F, 0x1p-100F, 0x1p+100F}) {
    for (uint32_t bits = 0; bits <= 0x7F80; ++bits) {
      float x[kVectorDims] = {};
      x[bits % kVectorDims] = Bf16ToFloat(static_cast<uint16_t>(bits | (bits & 1) << 15));
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale = 0xFF;
      const QuantizeFlags flags = Quantize16(x, g, codes, &scale);
      const double amax = std::fabs(static_cast<double>(x[bits % kVectorDims]));
      const double z = std::fmin(amax / static_cast<double>(g), 2688.0);
      // FP64 then FP32 rounding of a quotient of FP32 numbers equals direct FP32 rounding.
      ASSERT_EQ(scale, E4m3EncodeOracle(static_cast<float>(z / 6.0))) << bits << " g " << g;
      ASSERT_EQ(flags.saturated, scale == 0x7E);
      ASSERT_EQ(flags.nonfinite, bits == 0x7F80);
    }
  }
}

TEST(Quantize16, PacksTheFirstValueInTheLowNibble) {
  float x[kVectorDims] = {1.0F, -6.0F};
  uint8_t codes[kVectorCodeBytes];
  uint8_t scale = 0;
  Quantize16(x, 1.0F, codes, &scale);
  EXPECT_EQ(codes[0], 0xF2);
  EXPECT_EQ(scale, 0x38);
}

TEST(Quantize16, MatchesGoldenBytes) {
  const float x[kVectorDims] = {0.0F,  -0.0F, 0.5F,  -0.5F, 1.0F, -1.25F, 1.5F, 1.75F,
                                -2.0F, 2.5F,  -3.0F, 3.5F,  4.0F, 5.0F,   6.0F, -0.25F};
  uint8_t codes[kVectorCodeBytes];
  uint8_t scale = 0;
  const QuantizeFlags flags = Quantize16(x, 1.0F, codes, &scale);
  const uint8_t expected[kVectorCodeBytes] = {0x80, 0x91, 0xA2, 0x43, 0x4C, 0x6D, 0x66, 0x87};
  for (uint32_t i = 0; i < kVectorCodeBytes; ++i) EXPECT_EQ(codes[i], expected[i]) << i;
  EXPECT_EQ(scale, 0x38);
  EXPECT_FALSE(flags.nonfinite);
  EXPECT_FALSE(flags.saturated);
}

TEST(Quantize16, ZeroScaleMeansZeroCodes) {
  for (const float tiny : {0.0F, -0.0F, 0x1p-133F, -0x1p-126F, 6 * 0x1p-10F}) {
    float x[kVectorDims];
    for (uint32_t i = 0; i < kVectorDims; ++i) x[i] = i % 2 == 0 ? tiny : -tiny;
    uint8_t codes[kVectorCodeBytes];
    uint8_t scale = 0xFF;
    EXPECT_FALSE(Quantize16(x, 1.0F, codes, &scale).nonfinite);
    EXPECT_EQ(scale, 0);
    for (const uint8_t byte : codes) EXPECT_EQ(byte, 0);
  }
}

TEST(Quantize16, InfinitySaturatesItsVector) {
  float x[kVectorDims] = {448.0F, -kInfinity, 3000.0F, -0.0F, kInfinity};
  uint8_t codes[kVectorCodeBytes];
  uint8_t scale = 0;
  const QuantizeFlags flags = Quantize16(x, 1.0F, codes, &scale);
  EXPECT_TRUE(flags.nonfinite);
  EXPECT_TRUE(flags.saturated);
  EXPECT_EQ(scale, 0x7E);
  EXPECT_EQ(CodeAt(codes, 0), 0x2);
  EXPECT_EQ(CodeAt(codes, 1), 0xF);
  EXPECT_EQ(CodeAt(codes, 2), 0x7);
  EXPECT_EQ(CodeAt(codes, 3), 0x8);
  EXPECT_EQ(CodeAt(codes, 4), 0x7);
}

TEST(Quantize16, NanBecomesCode7AndStaysOutOfTheMaximum) {
  const float signaling_nan = std::bit_cast<float>(0x7F810000U);
  for (const float nan : {kNan, -kNan, signaling_nan}) {
    for (uint32_t position = 0; position < kVectorDims; ++position) {
      float x[kVectorDims];
      for (uint32_t i = 0; i < kVectorDims; ++i) x[i] = i % 3 == 0 ? -6.0F : 1.0F;
      x[position] = nan;
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale = 0;
      const QuantizeFlags flags = Quantize16(x, 1.0F, codes, &scale);
      EXPECT_TRUE(flags.nonfinite);
      EXPECT_FALSE(flags.saturated);
      EXPECT_EQ(scale, 0x38);
      for (uint32_t i = 0; i < kVectorDims; ++i) {
        EXPECT_EQ(CodeAt(codes, i), i == position ? 0x7 : i % 3 == 0 ? 0xF : 0x2);
      }
    }
  }
}

TEST(Quantize16, VectorOfNansOnlyIsFlaggedZero) {
  float x[kVectorDims];
  for (float& value : x) value = kNan;
  uint8_t codes[kVectorCodeBytes];
  uint8_t scale = 0xFF;
  EXPECT_TRUE(Quantize16(x, 1.0F, codes, &scale).nonfinite);
  EXPECT_EQ(scale, 0);
  for (const uint8_t byte : codes) EXPECT_EQ(byte, 0);
}

TEST(Quantize16, FourOverSixTakesTheSmallerError) {
  constexpr uint32_t kSeed = 20261106;
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  uint32_t four_count = 0;
  for (uint32_t round = 0; round < 2000; ++round) {
    float x[kVectorDims];
    for (float& value : x) value = Bf16ToFloat(FloatToBf16(normal(random)));
    double amax = 0;
    for (const float value : x) amax = std::fmax(amax, std::fabs(static_cast<double>(value)));
    const auto error_of = [&](uint8_t scale) {
      double sum = 0;
      for (const float value : x) {
        const double step = E4m3Oracle(scale) * 0x1p-6;
        const uint8_t code = E2m1Oracle(value, step);
        const double error =
            static_cast<double>(value) - static_cast<double>(DecodeE2m1(code)) * step;
        sum += error * error;
      }
      return sum;
    };
    const uint8_t six = E4m3EncodeOracle(static_cast<float>(amax * 64 / 6));
    const uint8_t four = E4m3EncodeOracle(static_cast<float>(amax * 64 / 4));
    uint8_t codes[kVectorCodeBytes];
    uint8_t scale = 0;
    Quantize16(x, 0x1p-6F, codes, &scale, ScaleSearch::kFourOverSix);
    const double difference = error_of(four) - error_of(six);
    if (std::fabs(difference) < 1e-5 * error_of(six)) continue;  // FP32 sums decide near ties.
    ASSERT_EQ(scale, difference < 0 ? four : six) << "seed " << kSeed << " round " << round;
    four_count += scale == four ? 1 : 0;
    for (uint32_t i = 0; i < kVectorDims; ++i) {
      ASSERT_EQ(CodeAt(codes, i), E2m1Oracle(x[i], E4m3Oracle(scale) * 0x1p-6));
    }
  }
  EXPECT_GT(four_count, 200U);
  EXPECT_LT(four_count, 1800U);
}

TEST(Quantize16, FourOverSixKeepsTheUsualScaleForNonfiniteErrors) {
  float x[kVectorDims] = {kNan, 1.0F, 4.0F};
  uint8_t codes[kVectorCodeBytes];
  uint8_t scale = 0;
  Quantize16(x, 1.0F, codes, &scale, ScaleSearch::kFourOverSix);
  EXPECT_EQ(scale, E4m3EncodeOracle(4.0F / 6.0F));
}

TEST(Quantize16, FourOverSixKeepsTheUsualScaleOnATie) {
  const float x[kVectorDims] = {6.0F};  // Exact as 6 * 1 and as 4 * 1.5.
  uint8_t codes[kVectorCodeBytes];
  uint8_t scale = 0;
  Quantize16(x, 1.0F, codes, &scale, ScaleSearch::kFourOverSix);
  EXPECT_EQ(scale, 0x38);
}

TEST(Dequantize16, IsExactForEveryScaleAndCodeAndExactInBf16) {
  for (const float g : {1.0F, 0x1p-100F, 0x1p+100F, 0x1p-9F}) {
    for (uint32_t byte = 0; byte <= kScaleByteMax; ++byte) {
      uint8_t codes[kVectorCodeBytes];
      for (uint32_t i = 0; i < kVectorCodeBytes; ++i) {
        codes[i] = static_cast<uint8_t>(2 * i | (2 * i + 1) << 4);
      }
      float out[kVectorDims];
      Dequantize16(codes, static_cast<uint8_t>(byte), g, out);
      for (uint8_t code = 0; code < 16; ++code) {
        const double exact =
            static_cast<double>(DecodeE2m1(code)) * E4m3Oracle(byte) * static_cast<double>(g);
        ASSERT_EQ(static_cast<double>(out[code]), exact);
        ASSERT_EQ(Bf16ToFloat(FloatToBf16(out[code])), out[code]);
      }
    }
  }
}

TEST(GlobalScale, IsTheCeilingPowerOfTwo) {
  const auto scale_of = [](float amax) {
    float g = 0;
    EXPECT_TRUE(GlobalScaleFromAmax(amax, &g).ok());
    return g;
  };
  EXPECT_EQ(scale_of(448.0F), 1.0F);
  EXPECT_EQ(scale_of(std::nextafter(448.0F, 1000.0F)), 2.0F);
  EXPECT_EQ(scale_of(std::nextafter(448.0F, 0.0F)), 1.0F);
  EXPECT_EQ(scale_of(224.0F), 0.5F);
  EXPECT_EQ(scale_of(6.0F), 0x1p-6F);
  EXPECT_EQ(scale_of(0.0F), 1.0F);
  EXPECT_EQ(scale_of(-0.0F), 1.0F);
  EXPECT_EQ(scale_of(std::numeric_limits<float>::denorm_min()), 0x1p-100F);
  EXPECT_EQ(scale_of(std::numeric_limits<float>::max()), 0x1p+100F);
  for (uint32_t bits = 0x0080; bits < 0x7F80; ++bits) {
    const float amax = Bf16ToFloat(static_cast<uint16_t>(bits));
    const float g = scale_of(amax);
    ASSERT_TRUE(IsValidGlobalScale(g));
    const bool limited = g == 0x1p-100F || g == 0x1p+100F;
    if (!limited) {
      ASSERT_LE(static_cast<double>(amax), 448.0 * static_cast<double>(g));
      ASSERT_GT(static_cast<double>(amax), 224.0 * static_cast<double>(g));
    }
  }
}

TEST(GlobalScale, RefusesWhatIsNotAnAmax) {
  for (const float amax : {-1.0F, kInfinity, -kInfinity, kNan}) {
    float g = 42.0F;
    EXPECT_EQ(GlobalScaleFromAmax(amax, &g).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(g, 42.0F);
  }
}

TEST(GlobalScale, ValidMeansPowerOfTwoInRange) {
  for (const float g : {1.0F, 0.5F, 0x1p-100F, 0x1p+100F}) EXPECT_TRUE(IsValidGlobalScale(g));
  for (const float g : {0.0F, -1.0F, 1.5F, 0x1p-101F, 0x1p+101F, kInfinity, kNan}) {
    EXPECT_FALSE(IsValidGlobalScale(g)) << g;
  }
}

TEST(Bf16, RoundTripsEveryPatternAndRoundsToNearestEven) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(value))));
      continue;
    }
    ASSERT_EQ(FloatToBf16(value), bits);
  }
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3F808000U)), 0x3F80);  // Tie to even, down.
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3F818000U)), 0x3F82);  // Tie to even, up.
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3F808001U)), 0x3F81);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7F800001U)))));
}

TEST(Fp16, RoundTripsEveryPatternAndMatchesTheDefinition) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = Fp16ToFloat(static_cast<uint16_t>(bits));
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const int mantissa = static_cast<int>(bits & 1023);
    if (exponent == 31 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(value));
      ASSERT_TRUE(std::isnan(Fp16ToFloat(FloatToFp16(value))));
      continue;
    }
    const double magnitude = exponent == 31  ? std::numeric_limits<double>::infinity()
                             : exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(static_cast<double>(value), bits >= 0x8000 ? -magnitude : magnitude);
    ASSERT_EQ(std::signbit(value), bits >= 0x8000);
    ASSERT_EQ(FloatToFp16(value), bits);
  }
}

TEST(Fp16, RoundsMidpointsToEven) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const float low = Fp16ToFloat(static_cast<uint16_t>(bits));
    const float high = Fp16ToFloat(static_cast<uint16_t>(bits + 1));
    const float midpoint = low + (high - low) / 2;
    ASSERT_EQ(FloatToFp16(midpoint), bits + (bits & 1));
    ASSERT_EQ(FloatToFp16(std::nextafter(midpoint, 0.0F)), bits);
    ASSERT_EQ(FloatToFp16(std::nextafter(midpoint, kInfinity)), bits + 1);
  }
  EXPECT_EQ(FloatToFp16(65520.0F), 0x7C00);
  EXPECT_EQ(FloatToFp16(std::nextafter(65520.0F, 0.0F)), 0x7BFF);
}

}  // namespace
}  // namespace kvtier::kernels
