// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/engine_pages.h"
#include "kernels/engine_pages_reference.h"
#include "kernels/gather.h"
#include "kernels/seal.h"

namespace kvtier::kernels::engine_pages_reference {
namespace {

// What the pages hold, [side][token][dim], element by element in FP32.
std::array<std::vector<float>, 2> ValuesOf(Memory* memory, const TileShape& shape,
                                           const GlobalScales& scales) {
  std::array<std::vector<float>, 2> values;
  values.fill(std::vector<float>(uint64_t{shape.block_tokens} * shape.head_dim));
  memory->ForEach([&](Side side, uint32_t token, uint32_t s) {
    uint8_t codes[8];
    std::memcpy(codes, memory->At(side, kCodes, token, s), sizeof(codes));
    const float block =
        DecodeE4m3Scale(std::to_integer<uint8_t>(*memory->At(side, kScaleBytes, token, s)));
    for (uint32_t i = 0; i < 16; ++i) {
      const auto code = static_cast<uint8_t>(i % 2 == 0 ? codes[i / 2] & 15U : codes[i / 2] >> 4U);
      values[side][token * shape.head_dim + s * 16 + i] =
          DecodeE2m1(code) * block * (side == kK ? scales.k : scales.v);
    }
  });
  return values;
}

ConstRows Fp32Rows(const std::vector<float>& values, uint32_t head_dim) {
  return {.type = ElementType::kFp32, .data = values.data(), .token_stride = head_dim};
}

TEST(RequantizeTile, SealsTheValuesOfThePages) {
  std::mt19937 random(kSeed);
  const GlobalScales foreign{.k = 20.16F / 2688, .v = 3.7F / 448};
  for (const Engine& engine : AllEngines()) {
    for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
      if (engine.interleaved && head_dim % 64 != 0) continue;
      for (const uint32_t block_tokens : {16U, 64U, 128U}) {
        const TileShape shape{.block_tokens = block_tokens, .head_dim = head_dim};
        Memory memory(engine, {2, head_dim, 32}, shape, 16, &random);
        std::vector<float> mean(head_dim, 0.25F);
        std::vector<float> smooth(head_dim, 1.5F);
        const SealOptions options{.g_k = 0x1p-7F,
                                  .g_v = 0x1p-5F,
                                  .search = ScaleSearch::kFourOverSix,
                                  .k_mean = mean,
                                  .k_smooth = smooth};
        const auto values = ValuesOf(&memory, shape, foreign);
        std::vector<std::byte> expected(TileBytes(shape));
        SealStats expected_stats;
        ASSERT_TRUE(SealTile(shape, Fp32Rows(values[kK], head_dim), Fp32Rows(values[kV], head_dim),
                             options, expected, &expected_stats)
                        .ok());
        std::vector<std::byte> tile(TileBytes(shape));
        SealStats stats;
        const Status status = RequantizeTile(shape, memory.layout(), memory.Pages().AsConst(),
                                             foreign, options, tile, &stats);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(tile, expected) << engine.name << " d " << head_dim;
        EXPECT_EQ(stats.saturated_count, expected_stats.saturated_count);
        EXPECT_EQ(stats.nonfinite_count, expected_stats.nonfinite_count);
      }
    }
  }
}

// How much the second quantization costs, on pages as an engine writes them from Gaussian values.
// The largest code of a vector is nearly always 6, so mostly the scale moves, to the nearest E4M3.
TEST(RequantizeTile, MovesValuesByTheStepOfTheScalesAndHardlyAddsToTheError) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  const TileShape shape{.block_tokens = 128, .head_dim = 128};
  const GlobalScales foreign{.k = 5.0F / 2688, .v = 5.0F / 448};
  Memory memory(AllEngines()[0], {1, 128, 128}, shape, 0, &random);
  std::array<std::vector<float>, 2> source;
  source.fill(std::vector<float>(size_t{128} * 128));
  memory.ForEach([&](Side side, uint32_t token, uint32_t s) {
    const float g = side == kK ? foreign.k : foreign.v;
    float x[16];
    float scaled[16];
    for (uint32_t i = 0; i < 16; ++i) {
      x[i] = normal(random);
      source[side][token * 128 + s * 16 + i] = x[i];
      scaled[i] = x[i] / g;
    }
    uint8_t codes[8];
    uint8_t scale = 0;
    Quantize16(scaled, 1.0F, codes, &scale);
    std::memcpy(memory.At(side, kCodes, token, s), codes, sizeof(codes));
    *memory.At(side, kScaleBytes, token, s) = static_cast<std::byte>(scale);
  });
  std::vector<std::byte> tile(TileBytes(shape));
  SealStats stats;
  const SealOptions options{.g_k = 0x1p-6F, .g_v = 0x1p-6F};
  ASSERT_TRUE(RequantizeTile(shape, memory.layout(), memory.Pages().AsConst(), foreign, options,
                             tile, &stats)
                  .ok());
  std::array<std::vector<float>, 2> out;
  out.fill(std::vector<float>(size_t{128} * 128));
  ASSERT_TRUE(GatherTile(shape, tile, 0x1p-6F, 0x1p-6F,
                         {.type = ElementType::kFp32, .data = out[kK].data(), .token_stride = 128},
                         {.type = ElementType::kFp32, .data = out[kV].data(), .token_stride = 128})
                  .ok());
  const auto first = ValuesOf(&memory, shape, foreign);
  const auto error = [](const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
      norm += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(difference / norm);
  };
  // The figures of docs/engine-pages.md. Two-sided: no error would mean nothing was compared.
  for (const Side side : kSides) {
    EXPECT_NEAR(error(first[side], source[side]), 0.095, 0.002) << "seed " << kSeed;
    EXPECT_NEAR(error(out[side], first[side]), side == kK ? 0.037 : 0.028, 0.002);
    EXPECT_NEAR(error(out[side], source[side]), side == kK ? 0.102 : 0.099, 0.002);
  }
}

// With the tile's own global scale a vector that uses code 6 comes back; one that does not is
// requantized to use it, which is why equal scales should import.
TEST(RequantizeTile, IsTheIdentityOnlyForVectorsThatReachSix) {
  std::mt19937 random(kSeed);
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  Memory memory(AllEngines()[0], {1, 64, 16}, shape, 0, &random);
  memory.ForEach([&](Side side, uint32_t token, uint32_t s) {
    memory.At(side, kCodes, token, s)[0] = std::byte{0x17};  // 6 and 0.5.
    // From the least normal scale on: with smaller ones the values do not determine it.
    *memory.At(side, kScaleBytes, token, s) = static_cast<std::byte>(8 + Below(0x7F - 8, &random));
  });
  std::vector<std::byte> imported(TileBytes(shape));
  ASSERT_TRUE(ImportTile(shape, memory.layout(), memory.Pages().AsConst(), kScales, imported).ok());
  std::vector<std::byte> requantized(TileBytes(shape));
  SealStats stats;
  const SealOptions options{.g_k = kScales.k, .g_v = kScales.v};
  const auto requantize = [&] {
    return RequantizeTile(shape, memory.layout(), memory.Pages().AsConst(), kScales, options,
                          requantized, &stats);
  };
  ASSERT_TRUE(requantize().ok());
  EXPECT_EQ(requantized, imported);
  std::memset(memory.At(kV, kCodes, 7, 2), 0x35, 8);  // Codes of 3 and 1.5.
  ASSERT_TRUE(requantize().ok());
  EXPECT_NE(requantized[VScaleByteOffset(shape, 7, 2)], *memory.At(kV, kScaleBytes, 7, 2));
}

TEST(RequantizeTile, RefusesBadScalesAndOptionsAndCountsWhatDoesNotFit) {
  std::mt19937 random(kSeed);
  const TileShape shape{.block_tokens = 32, .head_dim = 64};
  Memory memory(AllEngines()[0], {1, 64, 16}, shape, 0, &random);
  std::vector<std::byte> tile(TileBytes(shape), std::byte{0x2A});
  const std::vector<std::byte> before = tile;
  SealStats stats;
  const auto requantize = [&](const GlobalScales& scales, const SealOptions& options,
                              SealStats* out) {
    return RequantizeTile(shape, memory.layout(), memory.Pages().AsConst(), scales, options, tile,
                          out)
        .code();
  };
  const auto invalid = StatusCode::kInvalidArgument;
  for (const float bad : {0.0F, -1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(requantize({.k = bad, .v = 1.0F}, {}, &stats), invalid);
    EXPECT_EQ(requantize({.k = 1.0F, .v = bad}, {}, &stats), invalid);
  }
  EXPECT_EQ(requantize(kScales, {.g_k = 3.0F}, &stats), invalid);
  EXPECT_EQ(requantize(kScales, {}, nullptr), invalid);
  EXPECT_EQ(tile, before);
  EXPECT_EQ(stats.nonfinite_count, 0U);
  EXPECT_EQ(stats.saturated_count, 0U);
  *memory.At(kK, kScaleBytes, 31, 3) = std::byte{0x7E};
  memory.At(kK, kCodes, 31, 3)[0] = std::byte{0x77};
  ASSERT_EQ(requantize({.k = 1e38F, .v = 1e-3F}, {}, &stats), StatusCode::kOk);
  EXPECT_GT(stats.nonfinite_count, 0U);  // 6 * 448 * 1e38 is infinite.
  EXPECT_GT(stats.saturated_count, 0U);
}

}  // namespace
}  // namespace kvtier::kernels::engine_pages_reference
