// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/transfer_runner.h"

// The seal and gather kernels for NVFP4, executed by the machine of emu/, give the bits of SealTile
// and GatherTile on every architecture and under every schedule.

namespace kvtier::kernels::cuda {
namespace {

template <typename Arch>
class Transfer : public testing::Test {};
TYPED_TEST_SUITE(Transfer, Archs, ArchNames);

// Every shape, with types, pages, transforms and searches taking turns; of the large ones a third
// for each architecture.
template <typename Arch, typename Check>
void ForEveryShape(const Check& check) {
  constexpr uint64_t kArchIdx = Arch::kConvertsE2m1 ? 2 : Arch::kConvertsE4m3 ? 1 : 0;
  uint64_t turn = 0;
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 16) {
      ++turn;
      if (block_tokens > 32 && (turn + turn / 3) % 3 != kArchIdx) continue;
      constexpr uint32_t kPageTokens[] = {0, 1, 16, 24, 64};
      const TransferCase test_case{
          .shape = {.layer_count = 1 + static_cast<uint32_t>(turn % 2),
                    .kv_head_count = block_tokens > 16 ? 1U : 2U,
                    .block_tokens = block_tokens,
                    .head_dim = head_dim},
          .type = kTypes[(turn + turn / 4) % 4],
          .page_tokens = kPageTokens[turn % 5],
          .is_hnd = turn % 3 == 0,
          .has_layer_data = turn % 7 < 3,
          .has_transform = turn % 4 == 1,
          .has_special_values = turn % 2 == 0,
          .search = turn % 3 == 1 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6,
          .entry_count = block_tokens > 32 ? 1U : 2U,
          .first_layer_offset = turn % 3 * 16};
      check(test_case, kSeed + turn);
    }
  }
}

TYPED_TEST(Transfer, SealsEveryShape) {
  ForEveryShape<TypeParam>(
      [](const TransferCase& test_case, uint64_t seed) { CheckSeal<TypeParam>(test_case, seed); });
}

TYPED_TEST(Transfer, GathersEveryShape) {
  ForEveryShape<TypeParam>([](const TransferCase& test_case, uint64_t seed) {
    CheckGather<TypeParam>(test_case, seed);
  });
}

TYPED_TEST(Transfer, SealsAndGathersEveryTypeAtEveryGlobalScale) {
  for (const ElementType type : kTypes) {
    for (int exponent = -98; exponent <= 98; exponent += 14) {
      const TransferCase test_case{
          .shape = {.layer_count = 1, .kv_head_count = 1, .block_tokens = 16, .head_dim = 64},
          .type = type,
          .has_special_values = exponent % 4 == 0,
          .search = exponent % 3 == 0 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6,
          .entry_count = 1,
          .g_exponent = exponent};
      CheckSeal<TypeParam>(test_case, kSeed);
      CheckGather<TypeParam>(test_case, kSeed);
    }
  }
}

// The encoder alone, one thread, without memory: every BF16 and FP16 value, its neighbours changing
// with the stride of the walk.
TYPED_TEST(Transfer, EncodesEvery16BitValue) {
  for (const bool is_bf16 : {true, false}) {
    for (const uint32_t step : {1U, 257U, 4099U}) {
      for (uint32_t first = 0; first < 65536; first += 16) {
        uint32_t pairs[8];
        float x[kVectorDims];
        for (uint32_t i = 0; i < kVectorDims; ++i) {
          const auto bits = static_cast<uint16_t>((first + i) * step);
          pairs[i / 2] = i % 2 == 0 ? bits : pairs[i / 2] | uint32_t{bits} << 16;
          x[i] = is_bf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
        }
        for (const bool four_over_six : {false, true}) {
          const float g = step == 1 ? 0x1p-6F : 1.0F;
          uint8_t codes[kVectorCodeBytes];
          uint8_t scale = 0;
          const QuantizeFlags flags = Quantize16(
              x, g, codes, &scale, four_over_six ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6);
          uint32_t copy[8];
          std::copy(pairs, pairs + 8, copy);
          const EncodedVector ours = is_bf16
                                         ? EncodeVector<TypeParam, true>(copy, g, four_over_six)
                                         : EncodeVector<TypeParam, false>(copy, g, four_over_six);
          ASSERT_EQ(ours.scale, scale) << first << " step " << step;
          ASSERT_EQ(ours.is_nonfinite, flags.nonfinite);
          Words2 expected;
          std::memcpy(&expected, codes, sizeof(expected));
          ASSERT_EQ(ours.codes.x, expected.x) << first << " step " << step << " bf16 " << is_bf16;
          ASSERT_EQ(ours.codes.y, expected.y) << first << " step " << step << " bf16 " << is_bf16;
        }
      }
    }
  }
}

// Every BF16 value under a selection of scale bytes: an anchor fixes the scale of a vector.
TYPED_TEST(Transfer, EncodesEveryBf16UnderScales) {
  for (uint32_t byte = 1; byte <= kScaleByteMax; byte += byte < 12 ? 1 : 19) {
    const uint16_t anchor =
        FloatToBf16(6.0F * DecodeE4m3Scale(static_cast<uint8_t>(byte)) * 0x1p-6F);
    for (uint32_t first = 0; first <= anchor; first += 15) {
      uint32_t pairs[8] = {anchor};
      float x[kVectorDims] = {Bf16ToFloat(anchor)};
      for (uint32_t i = 1; i < kVectorDims; ++i) {
        const uint32_t bits = std::min<uint32_t>(first + i - 1, anchor) | (i % 3 == 0 ? 0x8000 : 0);
        pairs[i / 2] |= bits << (i % 2 * 16);
        x[i] = Bf16ToFloat(static_cast<uint16_t>(bits));
      }
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale = 0;
      Quantize16(x, 0x1p-6F, codes, &scale);
      const EncodedVector ours = EncodeVector<TypeParam, true>(pairs, 0x1p-6F, false);
      Words2 expected;
      std::memcpy(&expected, codes, sizeof(expected));
      ASSERT_EQ(ours.scale, scale) << byte;
      ASSERT_EQ(ours.codes.x, expected.x) << byte << " first " << first;
      ASSERT_EQ(ours.codes.y, expected.y) << byte << " first " << first;
    }
  }
}

TEST(TransferAccess, FillsSectorsForTheUsualShape) {
  TransferData data(kUsual, kSeed);
  const SealRun run = RunSeal<Sm90>(data, 0);
  ASSERT_TRUE(run.report.ok()) << run.report.ToString();
  EXPECT_EQ(run.report.ExtraSectors(emu::AccessKind::kGlobalWrite), 0U) << run.report.ToString();
  GatherCounters counters;
  const emu::Report gathered = RunGather<Sm90>(data, 0, &counters);
  ASSERT_TRUE(gathered.ok()) << gathered.ToString();
  EXPECT_EQ(gathered.ExtraSectors(emu::AccessKind::kGlobalWrite), 0U) << gathered.ToString();
}

TEST(TransferCounts, FewerEntriesThanTheGridWasMadeFor) {
  TransferData data(kUsual, kSeed);
  data.entry_count_[0] = 1;
  const std::vector<std::byte> expected = [&] {
    TransferData one(kUsual, kSeed);
    SealStats stats;
    return one.ExpectedBlocks(&stats);
  }();
  const SealRun run = RunSeal<Sm90>(data, 7);
  ASSERT_TRUE(run.report.ok()) << run.report.ToString();
  // The first entry's block is the second in memory.
  const auto middle = static_cast<ptrdiff_t>(data.block_bytes());
  EXPECT_TRUE(std::all_of(data.blocks_.begin(), data.blocks_.begin() + middle,
                          [](std::byte byte) { return byte == std::byte{0xEE}; }));
  EXPECT_TRUE(
      std::equal(data.blocks_.begin() + middle, data.blocks_.end(), expected.begin() + middle));
}

TEST(TransferCounts, RefusesTilesWithoutAGlobalScale) {
  for (const float bad : {0.0F, 0.75F, -1.0F, 0x1p-101F, 0x1p101F, NAN}) {
    TransferData data(kUsual, kSeed);
    data.g_[1][3] = bad;
    const SealRun run = RunSeal<Sm90>(data, 0);
    ASSERT_TRUE(run.report.ok()) << run.report.ToString();
    EXPECT_EQ(run.counters.refused_count, 2U);  // One tile of each entry.
    const auto tile = data.Blocks().first_layer_offset + 3 * data.tile_bytes();
    for (uint64_t i = 0; i < data.tile_bytes(); ++i) {
      ASSERT_EQ(data.blocks_[tile + i], std::byte{0xEE});
    }
  }
}

TEST(TransferCounts, GatherCountsInvalidScaleBytesAndGivesZeros) {
  TransferData data(kUsual, kSeed);
  ASSERT_TRUE(RunSeal<Sm90>(data, 0).report.ok());
  const auto tile = data.Blocks().first_layer_offset;
  data.blocks_[tile + KScaleOffset(TileOf(kUsual.shape))] = std::byte{0x7F};
  GatherCounters counters;
  const emu::Report report = RunGather<Sm90>(data, 0, &counters);
  ASSERT_TRUE(report.ok()) << report.ToString();
  EXPECT_EQ(counters.invalid_count, 2U);  // Two 16-byte stores of BF16 share the vector.
}

TEST(TransferPlan, RefusesWhatTheHostCanSee) {
  TransferData data(kUsual, kSeed);
  SealCounters seal_counters;
  GatherCounters gather_counters;
  SealPlan seal_plan;
  GatherPlan gather_plan;
  const SealBlocksArgs good = SealArgs(data, &seal_counters);
  ASSERT_TRUE(PlanSeal(good, &seal_plan).ok());
  ASSERT_TRUE(PlanGather(GatherArgs(data, &gather_counters), &gather_plan).ok());
  const auto refuses = [&](const auto& change) {
    SealBlocksArgs args = good;
    change(args);
    return PlanSeal(args, &seal_plan).code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](auto& a) { a.blocks.shape.block_tokens = 17; }));
  EXPECT_TRUE(refuses([](auto& a) { a.blocks.entries = nullptr; }));
  EXPECT_TRUE(refuses([](auto& a) { a.blocks.entry_count_max = 0; }));
  EXPECT_TRUE(refuses([](auto& a) { a.blocks.first_layer_offset = 8; }));
  EXPECT_TRUE(refuses([](auto& a) { a.blocks.shape.kv_head_count = 65536; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.data = nullptr; }));
  EXPECT_TRUE(refuses([](auto& a) { a.v.data = static_cast<std::byte*>(a.v.data) + 8; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.token_stride += 1; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.token_stride = 64; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.head_stride = 0; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.page_stride = 0; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.layer_stride = ~uint64_t{0}; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.type = ElementType::kFp16; }));
  EXPECT_TRUE(refuses([](auto& a) { a.k.type = static_cast<ElementType>(9); }));
  EXPECT_TRUE(refuses([](auto& a) { a.pages.page_table = nullptr; }));
  EXPECT_TRUE(refuses([](auto& a) { a.pages.page_tokens = 65537; }));
  EXPECT_TRUE(refuses([](auto& a) { a.g_k = nullptr; }));
  EXPECT_TRUE(refuses([&](auto& a) { a.k_mean = data.mean_.data(); }));
  EXPECT_TRUE(refuses([](auto& a) { a.search = static_cast<ScaleSearch>(7); }));
  EXPECT_TRUE(refuses([](auto& a) { a.counters = nullptr; }));
  GatherBlocksArgs gather = GatherArgs(data, nullptr);
  EXPECT_EQ(PlanGather(gather, &gather_plan).code(), StatusCode::kInvalidArgument);
}

TEST(TransferPlan, DividesSlotsByAnyPageSize) {
  TransferData data(kUsual, kSeed);
  SealCounters counters;
  for (uint32_t page_tokens = 1; page_tokens <= 65536; page_tokens += page_tokens < 300 ? 1 : 97) {
    SealBlocksArgs args = SealArgs(data, &counters);
    args.pages.page_tokens = page_tokens;
    SealPlan plan;
    ASSERT_TRUE(PlanSeal(args, &plan).ok());
    const PagesParams& pages = plan.params.transfer.pages;
    for (const uint32_t slot :
         {0U, 1U, page_tokens - 1, page_tokens, page_tokens + 1, 1234567U, 0x7FFFFFFFU,
          0x7FFFFFFFU / page_tokens * page_tokens, 0x7FFFFFFFU / page_tokens * page_tokens - 1}) {
      ASSERT_EQ(uint64_t{slot} * pages.multiplier >> pages.shift, slot / page_tokens)
          << slot << " / " << page_tokens;
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels::cuda
