// SPDX-License-Identifier: Apache-2.0
#include "kernels/engine_pages.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/engine_pages_layouts.h"
#include "kernels/engine_pages_reference.h"
#include "kernels/gather.h"

namespace kvtier::kernels::engine_pages_reference {
namespace {

// Import gives the reference's tile; export changes exactly the reference's bytes; import after
// export is the identity.
void CheckBothWays(const Engine& engine, const EnginePageShape& shape, const TileShape& tile_shape,
                   uint64_t first_slot, std::mt19937* random) {
  Memory memory(engine, shape, tile_shape, first_slot, random);
  std::vector<std::byte> tile(TileBytes(tile_shape), std::byte{0xEE});
  const Status status =
      ImportTile(tile_shape, memory.layout(), memory.Pages().AsConst(), kScales, tile);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(tile, memory.Tile());

  Memory target(engine, shape, tile_shape, first_slot, random);
  std::array<std::vector<std::byte>, 4> expected = target.buffers();
  ASSERT_NE(target.Tile(), tile);
  ASSERT_TRUE(ExportTile(tile_shape, tile, target.layout(), target.Pages()).ok());
  // Only the bytes of the tile's tokens may differ from before.
  std::swap(expected, target.buffers());  // The target has the old bytes again,
  memory.ForEach([&](Side side, uint32_t token, uint32_t s) {
    std::memcpy(target.At(side, kCodes, token, s), memory.At(side, kCodes, token, s), 8);
    *target.At(side, kScaleBytes, token, s) = *memory.At(side, kScaleBytes, token, s);
  });  // and now the reference's, to compare with what ExportTile made.
  ASSERT_EQ(target.buffers(), expected);

  std::vector<std::byte> again(TileBytes(tile_shape));
  ASSERT_TRUE(
      ImportTile(tile_shape, target.layout(), target.Pages().AsConst(), kScales, again).ok());
  ASSERT_EQ(again, tile);
}

TEST(EnginePages, MatchTheFormulasForEveryEngineAndShape) {
  std::mt19937 random(kSeed);
  for (const Engine& engine : AllEngines()) {
    for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
      for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 16) {
        if (engine.interleaved && head_dim % 64 != 0) continue;
        for (const uint32_t page_tokens : {16U, 32U, 64U}) {
          SCOPED_TRACE(engine.name + " T " + std::to_string(block_tokens) + " d " +
                       std::to_string(head_dim) + " P " + std::to_string(page_tokens));
          // A block begins anywhere that a multiple of T tokens can be in a page.
          const uint64_t first_slot = uint64_t{Below(3, &random)} * block_tokens;
          CheckBothWays(engine, {2, head_dim, page_tokens},
                        {.block_tokens = block_tokens, .head_dim = head_dim}, first_slot, &random);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Sizes and starts that no engine uses today: one token a page, pages that T is no multiple of.
TEST(EnginePages, MatchTheFormulasForRandomPages) {
  std::mt19937 random(kSeed);
  const std::vector<Engine> engines = AllEngines();
  for (uint32_t i = 0; i < 400; ++i) {
    const Engine& engine = engines[Below(static_cast<uint32_t>(engines.size()), &random)];
    const uint32_t unit = engine.interleaved ? 4 : 1;
    const EnginePageShape shape{.kv_head_count = 1 + Below(4, &random),
                                .head_dim = engine.interleaved ? 64 * (1 + Below(4, &random))
                                                               : 16 * (4 + Below(13, &random)),
                                .page_tokens = unit * (1 + Below(80 / unit, &random))};
    const uint32_t block_tokens = 16U << Below(4, &random);
    const uint64_t first_slot = uint64_t{unit} * Below(100, &random);
    SCOPED_TRACE("seed " + std::to_string(kSeed) + " case " + std::to_string(i) + " " +
                 engine.name);
    CheckBothWays(engine, shape, {.block_tokens = block_tokens, .head_dim = shape.head_dim},
                  first_slot, &random);
    if (HasFatalFailure()) return;
  }
}

// One element decoded from the definition: e2m1 and e4m3 as sums of powers of two.
double Element(uint8_t codes, bool high, uint8_t scale, double g) {
  const unsigned code = high ? codes >> 4U : codes & 15U;
  const unsigned exponent = code >> 1U & 3U;
  const double half = code & 1U ? 0.5 : 0.0;
  const double magnitude =
      exponent == 0 ? half : std::ldexp(1.0 + half, static_cast<int>(exponent) - 1);
  const unsigned e = scale >> 3U;
  const double mantissa = (scale & 7U) / 8.0;
  const double block =
      e == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1.0 + mantissa, static_cast<int>(e) - 7);
  return (code & 8U ? -magnitude : magnitude) * block * g;
}

TEST(EnginePages, GatheredTileHasTheValuesOfThePages) {
  std::mt19937 random(kSeed);
  for (const Engine& engine : AllEngines()) {
    const TileShape tile_shape{.block_tokens = 32, .head_dim = 192};
    Memory memory(engine, {3, 192, 16}, tile_shape, 32, &random);
    std::vector<std::byte> tile(TileBytes(tile_shape));
    ASSERT_TRUE(
        ImportTile(tile_shape, memory.layout(), memory.Pages().AsConst(), kScales, tile).ok());
    std::array<std::vector<float>, 2> values;
    std::array<MutableRows, 2> rows;
    for (const Side side : kSides) {
      values[side].resize(size_t{32} * 192);
      rows[side] = {.type = ElementType::kFp32, .data = values[side].data(), .token_stride = 192};
    }
    ASSERT_TRUE(GatherTile(tile_shape, tile, kScales.k, kScales.v, rows[kK], rows[kV]).ok());
    memory.ForEach([&](Side side, uint32_t token, uint32_t s) {
      const auto g = static_cast<double>(side == kK ? kScales.k : kScales.v);
      const auto scale = std::to_integer<uint8_t>(*memory.At(side, kScaleBytes, token, s));
      for (uint32_t i = 0; i < 16; ++i) {
        const auto codes = std::to_integer<uint8_t>(memory.At(side, kCodes, token, s)[i / 2]);
        const double expected = Element(codes, i % 2 == 1, scale, g);
        ASSERT_EQ(static_cast<double>(values[side][token * 192 + s * 16 + i]), expected)
            << engine.name;
      }
    });
  }
}

// Addresses worked out by hand from the published formulas; a change of a named layout fails here.
TEST(EnginePageLayouts, HaveGoldenAddresses) {
  const EnginePageShape shape{.kv_head_count = 8, .head_dim = 128, .page_tokens = 16};
  const TileShape tile_shape{.block_tokens = 16, .head_dim = 128};
  const struct {
    const char* name;
    EnginePageLayout layout;
    uint64_t k_code, k_scale, v_code, v_scale;
  } cases[] = {
      // Page 3, head 2, token 5, vector 7.
      {"NHD", FlashInferNhd(shape, kLinear), ((3 * 16 + 5) * 8 + 2) * 64 + 56,
       ((3 * 16 + 5) * 8 + 2) * 8 + 7, ((3 * 16 + 5) * 8 + 2) * 64 + 56,
       ((3 * 16 + 5) * 8 + 2) * 8 + 7},
      // Scale (5, 7) moves to row 4 + 7 / 2, column 7 % 2 * 4 + 5 % 4.
      {"NHD interleaved", FlashInferNhd(shape, kInterleaved), ((3 * 16 + 5) * 8 + 2) * 64 + 56,
       ((3 * 16 + 5) * 8 + 2) * 8 + 7, ((3 * 16 + 5) * 8 + 2) * 64 + 56,
       ((3 * 16 + 7) * 8 + 2) * 8 + 5},
      {"HND", FlashInferHnd(shape, kLinear), ((3 * 8 + 2) * 16 + 5) * 64 + 56,
       ((3 * 8 + 2) * 16 + 5) * 8 + 7, ((3 * 8 + 2) * 16 + 5) * 64 + 56,
       ((3 * 8 + 2) * 16 + 5) * 8 + 7},
      // (5 / 4) * 4 * 8 + 7 * 4 + 5 % 4 = 32 + 28 + 1.
      {"TRT-LLM", TrtLlm(shape), ((3 * 8 + 2) * 16 + 5) * 64 + 56, ((3 * 8 + 2) * 16 + 5) * 8 + 7,
       ((3 * 8 + 2) * 16 + 5) * 64 + 56, (3 * 8 + 2) * 128 + 61},
      // A page is 2 * 8 * 16 * 72 = 18432 bytes: K codes 8192, K scales 1024, and V the same.
      {"vLLM", VllmHnd(shape, kInterleaved), 55296 + 2 * 1024 + 5 * 64 + 56,
       55296 + 8192 + 2 * 128 + 5 * 8 + 7, 55296 + 9216 + 2 * 1024 + 5 * 64 + 56, 73021},
      {"vLLM NHD", VllmNhd(shape, kLinear), 55296 + 5 * 512 + 2 * 64 + 56,
       55296 + 8192 + 5 * 64 + 2 * 8 + 7, 55296 + 9216 + 5 * 512 + 2 * 64 + 56,
       55296 + 9216 + 8192 + 5 * 64 + 2 * 8 + 7},
      {"SGLang", SglangGenMha(shape), ((3 * 16 + 5) * 8 + 2) * 64 + 56,
       ((3 * 8 + 2) * 16 + 5) * 8 + 7, ((3 * 16 + 5) * 8 + 2) * 64 + 56, (3 * 8 + 2) * 128 + 61},
      {"stacked", Stacked(FlashInferHnd(shape, kLinear)), ((6 * 8 + 2) * 16 + 5) * 64 + 56,
       ((6 * 8 + 2) * 16 + 5) * 8 + 7, ((7 * 8 + 2) * 16 + 5) * 64 + 56,
       ((7 * 8 + 2) * 16 + 5) * 8 + 7},
  };
  const uint32_t table[] = {9, 3};
  std::vector<std::byte> tile(TileBytes(tile_shape));
  for (const auto& c : cases) {
    std::array<std::vector<std::byte>, 4> buffers;
    buffers.fill(std::vector<std::byte>(size_t{10} * 18432));
    buffers[0][c.k_code] = std::byte{0x11};
    buffers[1][c.k_scale] = std::byte{0x12};
    buffers[2][c.v_code] = std::byte{0x13};
    buffers[3][c.v_scale] = std::byte{0x14};
    const ConstEnginePages pages{.k_codes = buffers[0],
                                 .k_scales = buffers[1],
                                 .v_codes = buffers[2],
                                 .v_scales = buffers[3],
                                 .page_table = table,
                                 .first_slot = 16,
                                 .kv_head_idx = 2};
    const Status status = ImportTile(tile_shape, c.layout, pages, kScales, tile);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(tile[KCodeOffset(tile_shape, 5, 7)], std::byte{0x11}) << c.name;
    EXPECT_EQ(tile[KScaleByteOffset(tile_shape, 5, 7)], std::byte{0x12}) << c.name;
    EXPECT_EQ(tile[VCodeOffset(tile_shape, 5, 7)], std::byte{0x13}) << c.name;
    EXPECT_EQ(tile[VScaleByteOffset(tile_shape, 5, 7)], std::byte{0x14}) << c.name;
    EXPECT_EQ(std::count(tile.begin(), tile.end(), std::byte{0}),
              static_cast<int64_t>(tile.size()) - 4);
  }
}

// K interleaved and V linear, padded rows, heads and pages: nobody's layout, but a valid one.
TEST(EnginePages, AnyStridesAndOrdersAreOneDescriptorAway) {
  std::mt19937 random(kSeed);
  const TileShape tile_shape{.block_tokens = 64, .head_dim = 128};
  const EngineRows codes{
      .offset = 11, .page_stride = 9001, .head_stride = 2999, .token_stride = 71};
  const EngineRows scales{.offset = 5, .page_stride = 4000, .head_stride = 9, .token_stride = 90};
  const EnginePageLayout layout{.kv_head_count = 3,
                                .head_dim = 128,
                                .page_tokens = 40,
                                .k = {codes, scales, kInterleaved},
                                .v = {scales, codes, kLinear}};
  // V's codes need 64-byte rows, so the padded 90 must hold them; heads do not fit 9 bytes apart.
  EXPECT_EQ(Validate(layout).code(), StatusCode::kInvalidArgument);
  EnginePageLayout good = layout;
  good.v = {codes, scales, kLinear};
  ASSERT_TRUE(Validate(good).ok());
  std::array<std::vector<std::byte>, 4> buffers;
  buffers.fill(std::vector<std::byte>(size_t{9001} * 4 + 11));
  std::vector<std::byte> tile(TileBytes(tile_shape));
  for (std::byte& byte : tile) byte = static_cast<std::byte>(Below(0x7F, &random));
  MutableEnginePages pages{.k_codes = buffers[0],
                           .k_scales = buffers[1],
                           .v_codes = buffers[2],
                           .v_scales = buffers[3],
                           .first_slot = 36,
                           .kv_head_idx = 1};
  ASSERT_TRUE(ExportTile(tile_shape, tile, good, pages).ok());
  for (uint32_t token = 0; token < 64; ++token) {
    const uint64_t page = (36 + token) / 40;
    const uint64_t slot = (36 + token) % 40;
    for (uint32_t s = 0; s < 8; ++s) {
      const uint64_t code = 11 + page * 9001 + 2999 + slot * 71 + s * uint64_t{8};
      ASSERT_EQ(std::memcmp(&buffers[0][code], &tile[KCodeOffset(tile_shape, token, s)], 8), 0);
      ASSERT_EQ(std::memcmp(&buffers[2][code], &tile[VCodeOffset(tile_shape, token, s)], 8), 0);
      const uint64_t row = 5 + page * 4000 + 9;
      const uint64_t swizzled = row + (slot / 4 * 4 + s / 2) * 90 + s % 2 * 4 + slot % 4;
      ASSERT_EQ(buffers[1][swizzled], tile[KScaleByteOffset(tile_shape, token, s)]);
      ASSERT_EQ(buffers[3][row + slot * 90 + s], tile[VScaleByteOffset(tile_shape, token, s)]);
    }
  }
  std::vector<std::byte> again(tile.size());
  ASSERT_TRUE(ImportTile(tile_shape, good, pages.AsConst(), kScales, again).ok());
  EXPECT_EQ(again, tile);
}

}  // namespace
}  // namespace kvtier::kernels::engine_pages_reference
