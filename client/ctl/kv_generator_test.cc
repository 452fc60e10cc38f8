// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/kv_generator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "proto/base/crc32c.h"

namespace kvtier::ctl {
namespace {

Key KeyFrom(uint8_t first) {
  Key key;
  for (size_t i = 0; i < key.bytes.size(); ++i) key.bytes[i] = static_cast<uint8_t>(first + i);
  return key;
}

struct Tile {
  explicit Tile(const kernels::BlockShape& shape)
      : k(size_t{shape.block_tokens} * shape.head_dim), v(k.size()) {}
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
};

// docs/replay.md prints these: another implementation must reproduce them.
TEST(KvGeneratorTest, MatchesItsDocumentedVectors) {
  EXPECT_EQ(SplitMix64(0, 0), 0xE220A8397B1DCDAFULL);
  EXPECT_EQ(SplitMix64(0, 1), 0x6E789E6AA1B965F4ULL);
  EXPECT_EQ(TokensOfHashId(7, 16)[0], 1674306020U);

  const KvGenerator generator(LayoutPresets()[0].shape);
  Tile tile(generator.shape());
  generator.GenerateTile(KeyFrom(0), 0, 0, tile.k, tile.v);
  tile.k.resize(8);
  tile.v.resize(8);
  EXPECT_EQ(tile.k, (std::vector<uint16_t>{0xBEDC, 0x3F8E, 0xBF21, 0x3FA8, 0x3F61, 0x3EFF, 0x4190,
                                           0x3E7B}));
  EXPECT_EQ(tile.v, (std::vector<uint16_t>{0xC02B, 0x3F85, 0xBF4A, 0xBF0D, 0xBFE3, 0x4001, 0x3FC2,
                                           0x3FB3}));

  std::vector<std::byte> block(generator.block_bytes());
  generator.SealBlock(KeyFrom(0), block);
  EXPECT_EQ(block.size(), 2304U);
  EXPECT_EQ(Crc32c(block), 281891396U);
}

TEST(KvGeneratorTest, EveryPartOfABlockDependsOnTheKey) {
  const KvGenerator generator(LayoutPresets()[0].shape);
  Tile a(generator.shape());
  Tile b(generator.shape());
  for (size_t byte = 0; byte < Key::kBytes; ++byte) {
    Key key = KeyFrom(0);
    generator.GenerateTile(key, 0, 0, a.k, a.v);
    key.bytes[byte] ^= 1;
    generator.GenerateTile(key, 0, 0, b.k, b.v);
    EXPECT_TRUE(a.k != b.k && a.v != b.v) << "byte " << byte;
  }
  generator.GenerateTile(KeyFrom(0), 1, 0, b.k, b.v);
  EXPECT_NE(a.k, b.k);
  EXPECT_NE(a.v, b.v);
}

TEST(KvGeneratorTest, ValuesAreNormalWithOutlierChannelsInK) {
  const kernels::BlockShape shape = LayoutPresets()[1].shape;
  const KvGenerator generator(shape);
  Tile tile(shape);
  std::vector<double> k_mean(shape.head_dim);
  double v_sum = 0;
  double v_square = 0;
  const uint32_t block_count = 20;
  for (uint8_t n = 0; n < block_count; ++n) {
    generator.GenerateTile(KeyFrom(n), 3, 1, tile.k, tile.v);
    for (size_t i = 0; i < tile.k.size(); ++i) {
      k_mean[i % shape.head_dim] += kernels::Bf16ToFloat(tile.k[i]);
      const double value = kernels::Bf16ToFloat(tile.v[i]);
      v_sum += value;
      v_square += value * value;
    }
  }
  const double v_count = static_cast<double>(tile.v.size()) * block_count;
  EXPECT_NEAR(v_sum / v_count, 0.0, 0.02);
  EXPECT_NEAR(std::sqrt(v_square / v_count), 1.156, 0.02);
  uint32_t outlier_count = 0;
  for (double& mean : k_mean) {
    mean = std::abs(mean / (shape.block_tokens * block_count));
    if (mean > 9.5) {
      ++outlier_count;
      EXPECT_LT(mean, 20.5);
    } else {
      EXPECT_LT(mean, 0.2);
    }
  }
  EXPECT_EQ(outlier_count, KvGenerator::kOutlierChannelCount);
}

TEST(KvGeneratorTest, SealedValuesAreCloseToTheGeneratedOnes) {
  const KvGenerator generator(LayoutPresets()[0].shape);
  const kernels::TileShape shape = kernels::TileOf(generator.shape());
  std::vector<std::byte> block(generator.block_bytes());
  generator.SealBlock(KeyFrom(9), block);
  Tile tile(generator.shape());
  generator.GenerateTile(KeyFrom(9), 1, 0, tile.k, tile.v);
  std::vector<float> k(tile.k.size());
  std::vector<float> v(tile.v.size());
  const auto sealed = std::span(block).subspan(kernels::TileOffset(generator.shape(), 1, 0),
                                               kernels::TileBytes(shape));
  ASSERT_TRUE(kernels::GatherTile(shape, sealed, KvGenerator::kGlobalScaleK,
                                  KvGenerator::kGlobalScaleV,
                                  {kernels::ElementType::kFp32, k.data(), shape.head_dim},
                                  {kernels::ElementType::kFp32, v.data(), shape.head_dim})
                  .ok());
  double error = 0;
  double power = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    const double value = kernels::Bf16ToFloat(tile.v[i]);
    error += (v[i] - value) * (v[i] - value);
    power += value * value;
  }
  EXPECT_LT(std::sqrt(error / power), 0.12);
  EXPECT_GT(error, 0.0);
}

TEST(LayoutPresetTest, ShapesAreValidAndSized) {
  const std::vector<uint64_t> sizes = {2'304, 73'728, 589'824};
  ASSERT_EQ(LayoutPresets().size(), sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const LayoutPreset& preset = LayoutPresets()[i];
    EXPECT_EQ(kernels::BlockBytes(preset.shape), sizes[i]) << preset.name;
    const Layout layout = LayoutOf(preset);
    EXPECT_TRUE(layout.Validate().ok()) << preset.name;
    EXPECT_EQ(layout.BlockBytes(), sizes[i]) << preset.name;
    EXPECT_TRUE(FindLayoutPreset(preset.name).ok());
  }
  EXPECT_EQ(FindLayoutPreset("tiny").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::ctl
