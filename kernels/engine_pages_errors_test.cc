// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/engine_pages.h"
#include "kernels/engine_pages_layouts.h"
#include "kernels/engine_pages_reference.h"

namespace kvtier::kernels::engine_pages_reference {
namespace {

class EnginePagesErrors : public testing::Test {
 protected:
  static constexpr TileShape kTile{.block_tokens = 32, .head_dim = 128};
  static constexpr EnginePageShape kPage{.kv_head_count = 2, .head_dim = 128, .page_tokens = 16};

  EnginePagesErrors() {
    for (auto& buffer : buffers_) buffer.resize(size_t{4} * 16 * 2 * 64);
    pages_ = {.k_codes = buffers_[0],
              .k_scales = std::span(buffers_[1]).first(size_t{4} * 16 * 2 * 8),
              .v_codes = buffers_[2],
              .v_scales = std::span(buffers_[3]).first(size_t{4} * 16 * 2 * 8),
              .page_table = table_,
              .first_slot = 16};
    tile_.assign(TileBytes(kTile), std::byte{0x2A});
  }

  // Both directions refuse in the same way and touch nothing.
  void ExpectInvalid(const TileShape& shape, const EnginePageLayout& layout,
                     const MutableEnginePages& pages) {
    const std::vector<std::byte> tile_before = tile_;
    const auto buffers_before = buffers_;
    EXPECT_EQ(ImportTile(shape, layout, pages.AsConst(), kScales, tile_).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(ExportTile(shape, tile_, layout, pages).code(), StatusCode::kInvalidArgument);
    SealStats stats;
    EXPECT_EQ(RequantizeTile(shape, layout, pages.AsConst(), kScales, {}, tile_, &stats).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(tile_, tile_before);
    EXPECT_EQ(buffers_, buffers_before);
  }
  void ExpectInvalidLayout(const EnginePageLayout& layout) {
    EXPECT_EQ(Validate(layout).code(), StatusCode::kInvalidArgument);
    ExpectInvalid(kTile, layout, pages_);
  }

  const EnginePageLayout layout_ = TrtLlm(kPage);
  std::array<std::vector<std::byte>, 4> buffers_;
  std::vector<uint32_t> table_ = {2, 0, 3};
  MutableEnginePages pages_;
  std::vector<std::byte> tile_;
};

TEST_F(EnginePagesErrors, GoodArgumentsAreGood) {
  EXPECT_TRUE(ImportTile(kTile, layout_, pages_.AsConst(), kScales, tile_).ok());
  EXPECT_TRUE(ExportTile(kTile, tile_, layout_, pages_).ok());
}

TEST_F(EnginePagesErrors, BadShapesAndLayouts) {
  ExpectInvalid({.block_tokens = 24, .head_dim = 128}, layout_, pages_);
  ExpectInvalid({.block_tokens = 16, .head_dim = 128}, layout_, pages_);  // Tile size.
  ExpectInvalid({.block_tokens = 32, .head_dim = 64}, layout_, pages_);
  EnginePageLayout bad = layout_;
  bad.kv_head_count = 0;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.page_tokens = 0;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.page_tokens = 65537;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.head_dim = 100;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.v.scale_order = static_cast<ScaleOrder>(2);
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.k.codes.page_stride -= 1;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.v.scales.token_stride = 7;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.v.codes.head_stride -= 1;  // Head 1 would begin in the last row of head 0.
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.k.scales.offset = (uint64_t{1} << 40) + 1;
  ExpectInvalidLayout(bad);
  bad = layout_;
  bad.k.codes.page_stride = ~uint64_t{0};
  ExpectInvalidLayout(bad);
  // Interleaved scales of 6 bytes a row, or with pages that are not whole groups.
  ExpectInvalidLayout(TrtLlm({.kv_head_count = 2, .head_dim = 96, .page_tokens = 16}));
  ExpectInvalidLayout(TrtLlm({.kv_head_count = 2, .head_dim = 128, .page_tokens = 18}));
  EXPECT_TRUE(Validate(FlashInferHnd({2, 96, 18}, kLinear)).ok());
}

TEST_F(EnginePagesErrors, ViewsThatDoNotHoldTheTokens) {
  MutableEnginePages bad = pages_;
  bad.kv_head_idx = 2;
  ExpectInvalid(kTile, layout_, bad);
  bad = pages_;
  bad.first_slot = 20;  // 20 + 32 tokens need a fourth page.
  ExpectInvalid(kTile, layout_, bad);
  bad = pages_;
  bad.first_slot = 14;  // Not a whole group of interleaved scales.
  ExpectInvalid(kTile, layout_, bad);
  bad = pages_;
  bad.first_slot = ~uint64_t{0} - 27;
  ExpectInvalid(kTile, layout_, bad);
  bad.page_table = {};
  ExpectInvalid(kTile, layout_, bad);
  bad = pages_;
  for (std::span<std::byte>* buffer : {&bad.k_codes, &bad.k_scales, &bad.v_codes, &bad.v_scales}) {
    const std::span<std::byte> whole = *buffer;
    *buffer = whole.first(whole.size() * 3 / 4);  // Page 3, the last of the tile, is missing.
    ExpectInvalid(kTile, layout_, bad);
    *buffer = {};
    ExpectInvalid(kTile, layout_, bad);
    *buffer = whole;
  }
  table_[2] = 4;
  ExpectInvalid(kTile, layout_, pages_);
  table_[2] = 0xFFFFFFFF;  // -1 in an engine's table of int32.
  ExpectInvalid(kTile, layout_, pages_);
  table_[2] = 3;
  const uint32_t v_table[] = {0, 1};
  bad = pages_;
  bad.v_page_table = v_table;
  ExpectInvalid(kTile, layout_, bad);
}

// The last byte of the buffer may be the last of the tile; one less is refused.
TEST_F(EnginePagesErrors, BoundsAreExact) {
  const EnginePageLayout nhd = FlashInferNhd(kPage, kLinear);
  MutableEnginePages pages = pages_;
  pages.kv_head_idx = 0;
  // Head 1 of the last token of page 3 is not read.
  pages.k_codes = pages.k_codes.first(pages.k_codes.size() - 64);
  pages.v_scales = pages.v_scales.first(pages.v_scales.size() - 8);
  EXPECT_TRUE(ImportTile(kTile, nhd, pages.AsConst(), kScales, tile_).ok());
  pages.k_codes = pages.k_codes.first(pages.k_codes.size() - 1);
  ExpectInvalid(kTile, nhd, pages);
}

TEST_F(EnginePagesErrors, ForeignGlobalScalesAreRefusedByName) {
  for (const float bad : {3.0F, 0.0F, -1.0F, 20.0F / 2688, 0x1p101F, std::nanf("")}) {
    const std::vector<std::byte> before = tile_;
    const Status k = ImportTile(kTile, layout_, pages_.AsConst(), {.k = bad, .v = 1.0F}, tile_);
    EXPECT_EQ(k.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(k.message()).find("scales.k"), std::string::npos);
    const Status v = ImportTile(kTile, layout_, pages_.AsConst(), {.k = 1.0F, .v = bad}, tile_);
    EXPECT_EQ(v.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(v.message()).find("scales.v"), std::string::npos);
    EXPECT_EQ(tile_, before);
  }
}

TEST_F(EnginePagesErrors, EveryBadScaleByteIsDataLossAndNothingIsWritten) {
  const std::vector<std::byte> before = tile_;
  for (uint32_t value = 0; value < 256; ++value) {
    for (const uint32_t buffer : {1U, 3U}) {
      for (const uint64_t position : {uint64_t{0}, uint64_t{127}, uint64_t{3} * 256 + 127}) {
        // Head 0 of pages 0 and 3, which are the tile's.
        buffers_[buffer][position] = static_cast<std::byte>(value);
        tile_ = before;
        SealStats stats;
        const StatusCode expected = value <= 0x7E ? StatusCode::kOk : StatusCode::kDataLoss;
        ASSERT_EQ(ImportTile(kTile, layout_, pages_.AsConst(), kScales, tile_).code(), expected);
        ASSERT_EQ(tile_ == before, expected == StatusCode::kDataLoss);
        if (value > 0x7E) {
          ASSERT_EQ(
              RequantizeTile(kTile, layout_, pages_.AsConst(), kScales, {}, tile_, &stats).code(),
              expected);
          ASSERT_EQ(tile_, before);
        }
        buffers_[buffer][position] = std::byte{0};
      }
      // Poison that is not the tile's is none of its business: head 1, and page 1.
      buffers_[buffer][128] = buffers_[buffer][256] = static_cast<std::byte>(value);
      ASSERT_TRUE(ImportTile(kTile, layout_, pages_.AsConst(), kScales, tile_).ok());
      buffers_[buffer][128] = buffers_[buffer][256] = std::byte{0};
    }
    std::vector<std::byte> bad_tile = before;
    bad_tile[VScaleOffset(kTile) + 3] = static_cast<std::byte>(value);
    const auto buffers_before = buffers_;
    const bool ok = ExportTile(kTile, bad_tile, layout_, pages_).ok();
    ASSERT_EQ(ok, value <= 0x7E);
    ASSERT_EQ(buffers_ == buffers_before, !ok);
    buffers_ = buffers_before;
  }
}

// Scales are checked in words of 8 and then byte by byte: every position of a row of 13.
TEST(EnginePagesScales, AreCheckedAtEveryPositionOfARow) {
  const TileShape shape{.block_tokens = 16, .head_dim = 208};
  const EnginePageLayout layout =
      FlashInferNhd({.kv_head_count = 1, .head_dim = 208, .page_tokens = 16}, ScaleOrder::kLinear);
  std::vector<std::byte> codes(DataBytes(shape), std::byte{0xFF});
  std::vector<std::byte> scales(ScaleBytes(shape), std::byte{0x7E});
  std::vector<std::byte> tile(TileBytes(shape));
  const ConstEnginePages pages{
      .k_codes = codes, .k_scales = scales, .v_codes = codes, .v_scales = scales};
  ASSERT_TRUE(ImportTile(shape, layout, pages, kScales, tile).ok());
  for (std::byte& scale : scales) {
    for (const uint32_t bad : {0x7FU, 0x80U, 0xFEU, 0xFFU}) {
      scale = static_cast<std::byte>(bad);
      ASSERT_EQ(ImportTile(shape, layout, pages, kScales, tile).code(), StatusCode::kDataLoss);
    }
    scale = std::byte{0x7E};
  }
}

// Encoders differ for tiny vectors: scale 0 with codes +-6 is what some write, and stays.
TEST_F(EnginePagesErrors, ScaleZeroWithCodesIsKept) {
  std::fill(buffers_[0].begin(), buffers_[0].end(), std::byte{0xF7});
  ASSERT_TRUE(ImportTile(kTile, layout_, pages_.AsConst(), kScales, tile_).ok());
  EXPECT_EQ(tile_[0], std::byte{0xF7});
  EXPECT_EQ(tile_[KScaleOffset(kTile)], std::byte{0});
}

}  // namespace
}  // namespace kvtier::kernels::engine_pages_reference
