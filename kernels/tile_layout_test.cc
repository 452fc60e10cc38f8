// SPDX-License-Identifier: Apache-2.0
#include "kernels/tile_layout.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace kvtier::kernels {
namespace {

std::vector<TileShape> AllShapes() {
  std::vector<TileShape> shapes;
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 16) {
      shapes.push_back({.block_tokens = block_tokens, .head_dim = head_dim});
    }
  }
  return shapes;
}

TEST(TileLayout, AddressesCoverEveryByteOfTheTileOnce) {
  for (const TileShape& shape : AllShapes()) {
    ASSERT_TRUE(Validate(shape).ok());
    std::vector<uint32_t> use_count(TileBytes(shape), 0);
    for (uint32_t token = 0; token < shape.block_tokens; ++token) {
      for (uint32_t vector = 0; vector < VectorsPerToken(shape); ++vector) {
        const uint64_t k_code = KCodeOffset(shape, token, vector);
        const uint64_t v_code = VCodeOffset(shape, token, vector);
        const uint64_t k_scale = KScaleByteOffset(shape, token, vector);
        const uint64_t v_scale = VScaleByteOffset(shape, token, vector);
        ASSERT_LT(k_code, KScaleOffset(shape));
        ASSERT_TRUE(k_scale >= KScaleOffset(shape) && k_scale < VDataOffset(shape));
        ASSERT_TRUE(v_code >= VDataOffset(shape) && v_code < VScaleOffset(shape));
        ASSERT_TRUE(v_scale >= VScaleOffset(shape) && v_scale < TileBytes(shape));
        ASSERT_EQ(k_code % kVectorCodeBytes, 0U);
        ASSERT_EQ(v_code % kVectorCodeBytes, 0U);
        for (uint32_t i = 0; i < kVectorCodeBytes; ++i) {
          ++use_count[k_code + i];
          ++use_count[v_code + i];
        }
        ++use_count[k_scale];
        ++use_count[v_scale];
      }
    }
    for (const uint32_t count : use_count) ASSERT_EQ(count, 1U);
  }
}

TEST(TileLayout, SectionsAreAlignedAndHave4Point5BitsPerValue) {
  for (const TileShape& shape : AllShapes()) {
    EXPECT_EQ(KScaleOffset(shape) % 16, 0U);
    EXPECT_EQ(VDataOffset(shape) % 16, 0U);
    EXPECT_EQ(VScaleOffset(shape) % 16, 0U);
    EXPECT_EQ(TileBytes(shape) % 16, 0U);
    EXPECT_EQ(TileBytes(shape), uint64_t{2} * shape.block_tokens * shape.head_dim * 9 / 16);
  }
}

// Golden addresses, computed by hand from FORMAT.md: a change of the map fails here.
TEST(TileLayout, MatchesGoldenAddresses) {
  const TileShape d128{.block_tokens = 64, .head_dim = 128};
  EXPECT_EQ(KCodeOffset(d128, 3, 5), 3U * 64 + 40);
  EXPECT_EQ(KScaleByteOffset(d128, 3, 5), 4096U + 3 * 8 + 5);
  EXPECT_EQ(VCodeOffset(d128, 0, 0), 4608U);
  EXPECT_EQ(VCodeOffset(d128, 1, 0), 4608U + 8);
  EXPECT_EQ(VCodeOffset(d128, 2, 0), 4608U + 16);
  EXPECT_EQ(VCodeOffset(d128, 2, 1), 4608U + 128);  // Odd vectors swap the token pairs.
  EXPECT_EQ(VCodeOffset(d128, 0, 1), 4608U + 128 + 16);
  EXPECT_EQ(VCodeOffset(d128, 37, 7), 4608U + 2 * 1024 + 7 * 128 + 32 + 16 + 8);
  EXPECT_EQ(VScaleByteOffset(d128, 37, 7), 8704U + 9 * 32 + 7 * 4 + 1);
  const TileShape d64{.block_tokens = 16, .head_dim = 64};
  EXPECT_EQ(KCodeOffset(d64, 15, 3), 15U * 32 + 24);
  EXPECT_EQ(VCodeOffset(d64, 15, 3), 576U + 3 * 128 + 96 + 0 + 8);
  const TileShape d96{.block_tokens = 32, .head_dim = 96};
  EXPECT_EQ(KCodeOffset(d96, 2, 5), 2U * 48 + 40);
  const TileShape d192{.block_tokens = 64, .head_dim = 192};
  EXPECT_EQ(KCodeOffset(d192, 10, 7), 10U * 64 + 56);
  EXPECT_EQ(KCodeOffset(d192, 10, 9), 4096U + 10 * 32 + 8);
  const TileShape d256{.block_tokens = 128, .head_dim = 256};
  EXPECT_EQ(KCodeOffset(d256, 127, 15), 8192U + 127 * 64 + 56);
  EXPECT_EQ(kTileFormatVersion, 1U);
}

TEST(TileLayout, RefusesOtherShapes) {
  for (const uint32_t block_tokens : {0U, 1U, 8U, 48U, 256U}) {
    EXPECT_FALSE(Validate(TileShape{.block_tokens = block_tokens, .head_dim = 128}).ok());
  }
  for (const uint32_t head_dim : {0U, 16U, 48U, 100U, 272U, 512U}) {
    EXPECT_FALSE(Validate(TileShape{.block_tokens = 64, .head_dim = head_dim}).ok());
  }
}

TEST(BlockLayout, TilesAreOrderedByLayerThenKvHead) {
  const BlockShape shape{.layer_count = 3, .kv_head_count = 2, .block_tokens = 64, .head_dim = 128};
  ASSERT_TRUE(Validate(shape).ok());
  uint64_t expected = 0;
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
      EXPECT_EQ(TileOffset(shape, layer, head), expected);
      expected += 9216;
    }
  }
  EXPECT_EQ(BlockBytes(shape), expected);
}

TEST(BlockLayout, SizesDoNotOverflow) {
  const BlockShape shape{
      .layer_count = 65536, .kv_head_count = 65536, .block_tokens = 128, .head_dim = 256};
  ASSERT_TRUE(Validate(shape).ok());
  EXPECT_EQ(BlockBytes(shape), uint64_t{36864} << 32);
}

TEST(BlockLayout, RefusesZeroAndHugeCounts) {
  const BlockShape good{.layer_count = 1, .kv_head_count = 1, .block_tokens = 64, .head_dim = 128};
  for (const uint32_t count : {0U, 65537U}) {
    BlockShape bad = good;
    bad.layer_count = count;
    EXPECT_FALSE(Validate(bad).ok());
    bad = good;
    bad.kv_head_count = count;
    EXPECT_FALSE(Validate(bad).ok());
  }
}

}  // namespace
}  // namespace kvtier::kernels
