// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gather.h"
#include "kernels/isa.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/tile_layout.h"

// Sealing and gathering give the bits of the reference on every instruction set.

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261129;
constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                  ElementType::kFp8E4m3};

class IsaAgreement : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaIsAvailable(GetParam())) GTEST_SKIP() << "not on this machine";
  }

  // Elements of any kind: normal numbers of mixed size, exact ties, zeros, denormals, and with
  // `special` infinities and NaNs too.
  std::vector<std::byte> RandomElements(ElementType type, uint64_t count, bool special) {
    std::vector<std::byte> bytes(count * ElementBytes(type));
    for (uint64_t i = 0; i < count; ++i) {
      const uint32_t kind = random_() % 64;
      if (special && kind == 0) {
        for (uint32_t b = 0; b < ElementBytes(type); ++b) {
          bytes[i * ElementBytes(type) + b] = static_cast<std::byte>(random_());
        }
        continue;
      }
      float x = normal_(random_);
      if (kind < 16) x = std::ldexp(std::nearbyint(x * 8.0F), -3);  // Often a tie.
      if (kind == 16) x = 0.0F;
      if (kind == 17) x = -0.0F;
      if (kind == 18) x *= 0x1p-130F;
      if (kind == 19) x *= 1000.0F;
      Store(type, x, &bytes[i * ElementBytes(type)]);
    }
    return bytes;
  }

  static void Store(ElementType type, float x, std::byte* target) {
    if (type == ElementType::kFp32) {
      std::memcpy(target, &x, sizeof(x));
    } else if (type == ElementType::kFp8E4m3) {
      *target = static_cast<std::byte>(EncodeE4m3Scale(std::fabs(x)) | (x < 0.0F ? 0x80 : 0));
    } else {
      const uint16_t bits = type == ElementType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
      std::memcpy(target, &bits, sizeof(bits));
    }
  }

  void CheckSeal(const TileShape& shape, ConstRows k, ConstRows v, SealOptions options) {
    std::vector<std::byte> tiles[2];
    SealStats stats[2];
    for (const uint32_t i : {0U, 1U}) {
      tiles[i].assign(TileBytes(shape), i == 0 ? std::byte{0x11} : std::byte{0xEE});
      options.isa = i == 0 ? Isa::kScalar : GetParam();
      ASSERT_TRUE(SealTile(shape, k, v, options, tiles[i], &stats[i]).ok());
    }
    const auto difference = std::mismatch(tiles[0].begin(), tiles[0].end(), tiles[1].begin());
    ASSERT_EQ(difference.first, tiles[0].end())
        << "byte " << difference.first - tiles[0].begin() << " T " << shape.block_tokens << " d "
        << shape.head_dim << " type " << static_cast<int>(k.type) << " seed " << kSeed;
    EXPECT_EQ(stats[0].nonfinite_count, stats[1].nonfinite_count);
    EXPECT_EQ(stats[0].saturated_count, stats[1].saturated_count);
  }

  std::mt19937 random_{kSeed};
  std::normal_distribution<float> normal_;
};

INSTANTIATE_TEST_SUITE_P(Isas, IsaAgreement, testing::Values(Isa::kAvx2, Isa::kAvx512, Isa::kNeon),
                         [](const auto& param_info) { return IsaName(param_info.param); });

TEST_P(IsaAgreement, SealsEveryShapeAndType) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 16) {
      const ElementType type = kTypes[random_() % 4];
      const bool special = random_() % 2 != 0;
      const uint64_t stride = head_dim + random_() % 5;
      const auto k = RandomElements(type, block_tokens * stride, special);
      const auto v = RandomElements(type, block_tokens * stride, special);
      const ConstRows k_rows{.type = type, .data = k.data(), .token_stride = stride, .scale = 0.7F};
      const ConstRows v_rows{.type = type, .data = v.data(), .token_stride = stride, .scale = 1.3F};
      const auto g = std::ldexp(1.0F, static_cast<int>(random_() % 16) - 14);
      for (const ScaleSearch search : {ScaleSearch::kAmax6, ScaleSearch::kFourOverSix}) {
        CheckSeal({.block_tokens = block_tokens, .head_dim = head_dim}, k_rows, v_rows,
                  {.g_k = g, .g_v = 2.0F * g, .search = search});
      }
    }
  }
}

TEST_P(IsaAgreement, SealsEveryTypeAtEveryGlobalScale) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  for (const ElementType type : kTypes) {
    for (int exponent = -100; exponent <= 100; exponent += 5) {
      const auto rows = RandomElements(type, 1024, exponent % 2 != 0);
      const ConstRows source{.type = type, .data = rows.data(), .token_stride = 64};
      const float g = std::ldexp(1.0F, exponent);
      CheckSeal(shape, source, source, {.g_k = g, .g_v = g});
    }
  }
}

TEST_P(IsaAgreement, SealsEvery16BitValue) {
  // 16 x 64 values a tile; the neighbours of a value change with the stride of the walk.
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    for (const uint32_t step : {1U, 257U, 4099U}) {
      std::vector<uint16_t> rows(1024);
      for (uint32_t first = 0; first < 65536; first += 1024) {
        for (uint32_t i = 0; i < 1024; ++i) rows[i] = static_cast<uint16_t>((first + i) * step);
        const ConstRows source{.type = type, .data = rows.data(), .token_stride = 64};
        for (const ScaleSearch search : {ScaleSearch::kAmax6, ScaleSearch::kFourOverSix}) {
          CheckSeal(shape, source, source, {.g_k = 0x1p-6F, .g_v = 1.0F, .search = search});
        }
      }
    }
  }
}

// Vectors whose two sums of squared errors are so near that any other order of the additions takes
// the other scale; the scale byte is what the index order takes.
TEST_P(IsaAgreement, SumsSquaredErrorsInIndexOrder) {
  struct NearTie {
    uint8_t scale;
    uint16_t words[kVectorDims];
  };
  constexpr NearTie kNearTies[] = {
      {0x2C,
       {0x3F68, 0x3FB8, 0xBE24, 0xBFB4, 0xBF91, 0xBF70, 0xC00E, 0xBE83, 0x3E48, 0xBFF2, 0xBF90,
        0x3A9A, 0x3FD3, 0x3F4A, 0xBE9D, 0x3F3C}},
      {0x31,
       {0xBF83, 0x3FEB, 0x3F84, 0x3EC2, 0xBCB3, 0xBBC3, 0xBE10, 0xBF80, 0x3CCD, 0x3F3D, 0x3DE2,
        0x3F92, 0x3FAB, 0x3F32, 0xBECF, 0x400A}},
      {0x2A,
       {0xBF89, 0x3EE4, 0x3F0A, 0xBFA1, 0xBF11, 0x3F35, 0xBED1, 0xBE74, 0xBF0A, 0xBF8F, 0x3F1B,
        0xBB8E, 0xBC37, 0x3F58, 0xBF75, 0xBECB}},
      {0x33,
       {0x3F16, 0xBF83, 0x3F55, 0xBFCB, 0x402F, 0xBF7D, 0xC007, 0x3BAD, 0x3F61, 0x3F57, 0x3DB3,
        0xBECB, 0x3EE7, 0xBEDB, 0x3EC6, 0xBEDB}}};
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  std::vector<uint16_t> rows(1024);
  for (uint32_t i = 0; i < rows.size(); ++i) {
    rows[i] = kNearTies[i / kVectorDims % 4].words[i % kVectorDims];
  }
  const ConstRows source{.data = rows.data(), .token_stride = 64};
  const SealOptions options{.search = ScaleSearch::kFourOverSix, .isa = GetParam()};
  std::vector<std::byte> tile(TileBytes(shape));
  SealStats stats;
  ASSERT_TRUE(SealTile(shape, source, source, options, tile, &stats).ok());
  for (uint32_t token = 0; token < 16; ++token) {
    for (uint32_t vector = 0; vector < 4; ++vector) {
      EXPECT_EQ(tile[KScaleByteOffset(shape, token, vector)], std::byte{kNearTies[vector].scale});
    }
  }
  CheckSeal(shape, source, source, options);
}

// Only the low bits of these differ from infinity; FP32 loses them when it becomes BF16.
TEST_P(IsaAgreement, SealsNansOfTheSmallestPayload) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  for (const ElementType type : kTypes) {
    auto rows = RandomElements(type, 1024, false);
    for (uint32_t i = 0; i < 1024; i += 1 + static_cast<uint32_t>(random_() % 40)) {
      const uint32_t bits = type == ElementType::kFp32   ? 0x7F800001
                            : type == ElementType::kBf16 ? 0x7F81
                            : type == ElementType::kFp16 ? 0x7C01
                                                         : 0x7F;
      std::memcpy(&rows[i * ElementBytes(type)], &bits, ElementBytes(type));
    }
    const ConstRows source{.type = type, .data = rows.data(), .token_stride = 64};
    CheckSeal(shape, source, source, {.g_k = 0x1p-6F, .g_v = 1.0F});
  }
}

TEST_P(IsaAgreement, SealsTransformedK) {
  for (const uint32_t head_dim : {64U, 80U, 128U, 192U}) {
    std::vector<float> mean(head_dim);
    std::vector<float> smooth(head_dim);
    for (uint32_t i = 0; i < head_dim; ++i) {
      mean[i] = normal_(random_);
      smooth[i] = std::exp2(normal_(random_));
    }
    for (const ElementType type : kTypes) {
      const auto rows = RandomElements(type, 16 * head_dim, true);
      const ConstRows source{.type = type, .data = rows.data(), .token_stride = head_dim};
      const TileShape shape{.block_tokens = 16, .head_dim = head_dim};
      CheckSeal(shape, source, source, {.g_k = 0x1p-5F, .k_mean = mean, .k_smooth = smooth});
      CheckSeal(shape, source, source, {.g_k = 0x1p-5F, .k_mean = mean});
    }
  }
}

// vLLM and FlashInfer pages: [page][K or V][slot][head][dim] (NHD), [page][K or V][head][slot][dim]
// (HND).
TEST_P(IsaAgreement, SealsFromAndGathersToPages) {
  constexpr uint32_t kHeads = 3;
  constexpr uint32_t kDim = 96;
  constexpr uint32_t kPages = 40;
  const TileShape shape{.block_tokens = 32, .head_dim = kDim};
  for (const uint32_t page_tokens : {1U, 16U, 24U, 64U}) {
    const uint64_t side = uint64_t{page_tokens} * kHeads * kDim;
    const auto cache = RandomElements(ElementType::kBf16, kPages * 2 * side, false);
    std::vector<uint32_t> table(kPages);
    for (uint32_t i = 0; i < kPages; ++i) table[i] = (i * 7 + 3) % kPages;
    for (const bool hnd : {false, true}) {
      for (const uint64_t first_slot : {0U, 5U}) {
        const uint64_t token_stride = hnd ? kDim : kHeads * kDim;
        const uint64_t head_offset = 2 * (hnd ? uint64_t{page_tokens} * kDim : kDim);
        const Paging paging{.page_table = table.data(),
                            .page_table_count = kPages,
                            .page_tokens = page_tokens,
                            .page_stride = 2 * side,
                            .first_slot = first_slot};
        const auto rows_at = [&](uint64_t offset) {
          return ConstRows{.data = cache.data() + (offset + head_offset) * 2,
                           .token_stride = token_stride,
                           .paging = paging};
        };
        // The same rows, copied one by one by the plain rule.
        std::vector<std::byte> dense[2];
        for (const uint32_t is_v : {0U, 1U}) {
          for (uint64_t t = 0; t < shape.block_tokens; ++t) {
            const uint64_t slot = first_slot + t;
            const uint64_t at = table[slot / page_tokens] * 2 * side + is_v * side + head_offset +
                                slot % page_tokens * token_stride;
            dense[is_v].insert(dense[is_v].end(), cache.begin() + static_cast<ptrdiff_t>(at * 2),
                               cache.begin() + static_cast<ptrdiff_t>((at + kDim) * 2));
          }
        }
        const SealOptions options{.g_k = 0x1p-6F, .g_v = 0x1p-6F, .isa = GetParam()};
        std::vector<std::byte> paged_tile(TileBytes(shape));
        std::vector<std::byte> dense_tile(TileBytes(shape));
        SealStats stats;
        ASSERT_TRUE(SealTile(shape, rows_at(0), rows_at(side), options, paged_tile, &stats).ok());
        ASSERT_TRUE(SealTile(shape, {.data = dense[0].data(), .token_stride = kDim},
                             {.data = dense[1].data(), .token_stride = kDim}, options, dense_tile,
                             &stats)
                        .ok());
        ASSERT_EQ(paged_tile, dense_tile);

        std::vector<std::byte> target(cache.size(), std::byte{0x5A});
        const auto target_at = [&](uint64_t offset) {
          return MutableRows{.data = target.data() + (offset + head_offset) * 2,
                             .token_stride = token_stride,
                             .paging = paging};
        };
        ASSERT_TRUE(GatherTile(shape, paged_tile,
                               {.g_k = 0x1p-6F, .g_v = 0x1p-6F, .isa = GetParam()}, target_at(0),
                               target_at(side))
                        .ok());
        std::vector<std::byte> again(TileBytes(shape));
        ConstRows k = rows_at(0);
        ConstRows v = rows_at(side);
        k.data = target.data() + head_offset * 2;
        v.data = target.data() + (side + head_offset) * 2;
        ASSERT_TRUE(SealTile(shape, k, v, options, again, &stats).ok());
        const auto untouched = std::count(target.begin(), target.end(), std::byte{0x5A});
        EXPECT_GE(untouched, static_cast<ptrdiff_t>(cache.size() - 4 * 32 * kDim));
        // Quantizing what was dequantized changes nothing but the choice among equal forms.
        std::vector<float> values[2][2];
        for (const uint32_t i : {0U, 1U}) {
          for (auto& side_values : values[i]) side_values.resize(uint64_t{32} * kDim);
          ASSERT_TRUE(
              GatherTile(
                  shape, i == 0 ? paged_tile : again, 0x1p-6F, 0x1p-6F,
                  {.type = ElementType::kFp32, .data = values[i][0].data(), .token_stride = kDim},
                  {.type = ElementType::kFp32, .data = values[i][1].data(), .token_stride = kDim})
                  .ok());
        }
        EXPECT_EQ(values[0][0], values[1][0]);
        EXPECT_EQ(values[0][1], values[1][1]);
      }
    }
  }
}

TEST_P(IsaAgreement, GathersEveryShapeAndType) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 16) {
      const TileShape shape{.block_tokens = block_tokens, .head_dim = head_dim};
      std::vector<std::byte> tile(TileBytes(shape));
      for (auto& byte : tile) byte = static_cast<std::byte>(random_());
      for (uint64_t i = 0; i < ScaleBytes(shape); ++i) {
        tile[KScaleOffset(shape) + i] = static_cast<std::byte>(random_() % 127);
        tile[VScaleOffset(shape) + i] = static_cast<std::byte>(random_() % 127);
      }
      for (const ElementType type : kTypes) {
        const uint64_t stride = head_dim + (random_() % 2) * 7;
        const auto exponent = static_cast<int>(random_() % 40) - 20;
        std::vector<std::byte> out[2][2];
        for (const uint32_t i : {0U, 1U}) {
          for (auto& bytes : out[i]) {
            bytes.assign(block_tokens * stride * ElementBytes(type), std::byte{0x5A});
          }
          const auto rows = [&](uint32_t is_v) {
            return MutableRows{
                .type = type, .data = out[i][is_v].data(), .token_stride = stride, .scale = 0.3F};
          };
          ASSERT_TRUE(GatherTile(shape, tile,
                                 {.g_k = std::ldexp(1.0F, exponent),
                                  .g_v = 0x1p-6F,
                                  .streaming = random_() % 2 != 0,
                                  .isa = i == 0 ? Isa::kScalar : GetParam()},
                                 rows(0), rows(1))
                          .ok());
        }
        ASSERT_EQ(out[0][0], out[1][0]) << "K d " << head_dim << " type " << int(type);
        ASSERT_EQ(out[0][1], out[1][1]) << "V d " << head_dim << " type " << int(type);
      }
    }
  }
}

TEST(IsaChoice, ScalarIsAlwaysAvailableAndTheBestIsAvailable) {
  EXPECT_TRUE(IsaIsAvailable(Isa::kScalar));
  EXPECT_TRUE(IsaIsAvailable(BestIsa()));
  EXPECT_FALSE(IsaIsAvailable(static_cast<Isa>(99)));
}

TEST(IsaChoice, AArch64HasNeonAndNothingElseHas) {
#if defined(__AARCH64EL__)
  constexpr bool kIsAArch64 = true;
#else
  constexpr bool kIsAArch64 = false;
#endif
  EXPECT_EQ(IsaIsAvailable(Isa::kNeon), kIsAArch64);
}

TEST(SealPages, RefusesBadPagesAndTransforms) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  const std::vector<uint16_t> data(uint64_t{16} * 64);
  const uint32_t table[] = {0, 0};
  std::vector<std::byte> tile(TileBytes(shape));
  SealStats stats;
  const ConstRows good{.data = data.data(),
                       .token_stride = 64,
                       .paging = {.page_table = table, .page_table_count = 2, .page_tokens = 8}};
  const auto seal = [&](const ConstRows& rows, const SealOptions& options) {
    return SealTile(shape, rows, rows, options, tile, &stats).code();
  };
  EXPECT_EQ(seal(good, {}), StatusCode::kOk);
  ConstRows bad = good;
  bad.paging.page_table = nullptr;
  EXPECT_EQ(seal(bad, {}), StatusCode::kInvalidArgument);
  bad = good;
  bad.paging.first_slot = 1;
  EXPECT_EQ(seal(bad, {}), StatusCode::kInvalidArgument);
  bad.paging.first_slot = ~uint64_t{0};
  EXPECT_EQ(seal(bad, {}), StatusCode::kInvalidArgument);
  bad = good;
  bad.scale = 0.0F;
  EXPECT_EQ(seal(bad, {}), StatusCode::kInvalidArgument);
  const std::vector<float> ones(64, 1.0F);
  const std::vector<float> zeros(64, 0.0F);
  EXPECT_EQ(seal(good, {.k_mean = zeros, .k_smooth = ones}), StatusCode::kOk);
  EXPECT_EQ(seal(good, {.k_smooth = zeros}), StatusCode::kInvalidArgument);
  EXPECT_EQ(seal(good, {.k_mean = std::span(ones).first(63)}), StatusCode::kInvalidArgument);
  EXPECT_EQ(seal(good, {.isa = static_cast<Isa>(9)}), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::kernels
