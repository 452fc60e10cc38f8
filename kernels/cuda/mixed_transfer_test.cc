// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/transfer_runner.h"

// The kernels for layers with FP8 and BF16 sides, executed by the machine of emu/, give the bits of
// SealTile and GatherTile on every architecture and under every schedule.

namespace kvtier::kernels::cuda {
namespace {

template <typename Arch>
class MixedTransfer : public testing::Test {};
TYPED_TEST_SUITE(MixedTransfer, Archs, ArchNames);

constexpr SideFormat kFormats[] = {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16};

TYPED_TEST(MixedTransfer, SealsAndGathersEveryFormat) {
  uint64_t turn = 0;
  for (const SideFormat k : kFormats) {
    for (const SideFormat v : kFormats) {
      for (const ElementType type : kTypes) {
        ++turn;
        constexpr uint32_t kPageTokens[] = {0, 1, 16, 24};
        const TransferCase test_case{
            .shape = {.layer_count = 1 + static_cast<uint32_t>(turn % 2),
                      .kv_head_count = 1 + static_cast<uint32_t>(turn % 3 == 0 ? 1 : 0),
                      .block_tokens = turn % 5 == 0 ? 64U : 16U << turn % 2,
                      .head_dim = 64 + 16 * static_cast<uint32_t>(turn * 5 % 13)},
            .type = type,
            .page_tokens = kPageTokens[turn % 4],
            .is_hnd = turn % 3 == 0,
            .has_layer_data = turn % 7 < 3,
            .has_transform = turn % 4 < 2,
            .has_special_values = turn % 3 != 0,
            .search = turn % 3 == 1 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6,
            .entry_count = 1 + static_cast<uint32_t>(turn % 2),
            .first_layer_offset = turn % 3 * 16,
            .format = {k, v}};
        CheckSeal<TypeParam>(test_case, kSeed + turn);
        CheckGather<TypeParam>(test_case, kSeed + turn);
      }
    }
  }
}

constexpr TransferCase kOneTile{
    .shape = {.layer_count = 1, .kv_head_count = 1, .block_tokens = 16, .head_dim = 64},
    .has_special_values = true,
    .entry_count = 1,
    .format = {SideFormat::kFp8, SideFormat::kFp8}};

// Scales at the limits, of sides and of FP8 rows: values that vanish, that all saturate, products
// beyond the range of FP32.
TYPED_TEST(MixedTransfer, SealsAndGathersFp8UnderExtremeScales) {
  for (const ElementType type : kTypes) {
    for (const float side_scale : {0x1.000008p-128F, 0x1.8p-126F, 0.3F, 3e37F, 0x1.FFFFFEp127F}) {
      for (const float row_scale : {0x1p-127F, 1.7F, 0x1.FFFFFEp127F}) {
        if (type != ElementType::kFp8E4m3 && row_scale != 1.7F) continue;
        TransferCase test_case = kOneTile;
        test_case.type = type;
        const auto set_scales = [&](TransferData* data) {
          for (const uint32_t side : {0U, 1U}) {
            data->g_[side].assign(1, side_scale);
            if (type == ElementType::kFp8E4m3) data->scales_[side].assign(1, row_scale);
          }
        };
        CheckSeal<TypeParam>(test_case, kSeed, set_scales);
        CheckGather<TypeParam>(test_case, kSeed, set_scales);
      }
    }
  }
}

// One tile holds every 16-bit value, NaNs with their payloads among them.
TYPED_TEST(MixedTransfer, SealsAndGathersEvery16BitValue) {
  const auto fill = [](emu::DeviceBuffer<std::byte>* bytes, uint64_t first, uint16_t value) {
    for (uint32_t i = 0; i < 32768; ++i) {
      const auto bits = static_cast<uint16_t>(value + i);
      std::memcpy(bytes->data() + first + 2 * i, &bits, sizeof(bits));
    }
  };
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    for (const SideFormat format : {SideFormat::kFp8, SideFormat::kBf16}) {
      const TransferCase test_case{
          .shape = {.layer_count = 1, .kv_head_count = 1, .block_tokens = 128, .head_dim = 256},
          .type = type,
          .has_transform = false,
          .entry_count = 1,
          .format = {format, format}};
      CheckSeal<TypeParam>(test_case, kSeed, [&](TransferData* data) {
        const uint64_t first = uint64_t{data->entries_[0].first_slot} * 512;
        fill(&data->rows_, first, 0);
        fill(&data->rows_, data->rows_.size() / 2 + first, 32768);
      });
    }
  }
  for (const ElementType type : kTypes) {
    const TransferCase test_case{
        .shape = {.layer_count = 1, .kv_head_count = 1, .block_tokens = 128, .head_dim = 256},
        .type = type,
        .entry_count = 1,
        .format = {SideFormat::kBf16, SideFormat::kBf16}};
    CheckGather<TypeParam>(test_case, kSeed, [&](TransferData* data) {
      fill(&data->blocks_, 0, 0);
      fill(&data->blocks_, 65536, 32768);
    });
  }
}

TEST(MixedTransferAccess, FillsSectorsOfWideSides) {
  for (const LayerFormat format : {LayerFormat{SideFormat::kBf16, SideFormat::kFp8},
                                   LayerFormat{SideFormat::kNvfp4, SideFormat::kBf16}}) {
    TransferCase test_case = kUsual;
    test_case.format = format;
    TransferData data(test_case, kSeed);
    const SealRun run = RunSeal<Sm90>(data, 0);
    ASSERT_TRUE(run.report.ok()) << run.report.ToString();
    EXPECT_EQ(run.report.ExtraSectors(emu::AccessKind::kGlobalWrite), 0U) << run.report.ToString();
    GatherCounters counters;
    const emu::Report gathered = RunGather<Sm90>(data, 0, &counters);
    ASSERT_TRUE(gathered.ok()) << gathered.ToString();
    EXPECT_EQ(gathered.ExtraSectors(emu::AccessKind::kGlobalWrite), 0U) << gathered.ToString();
  }
}

TEST(MixedTransferCounts, RefusesFp8ScalesWithoutAReciprocal) {
  constexpr float kBad[] = {0.0F, -1.0F, 0x1p-128F, HUGE_VALF, NAN};
  for (const float bad : kBad) {
    for (const uint32_t side : {0U, 1U}) {
      TransferData data(kOneTile, kSeed);
      data.g_[side][0] = bad;
      const SealRun run = RunSeal<Sm90>(data, 0);
      ASSERT_TRUE(run.report.ok()) << run.report.ToString();
      EXPECT_EQ(run.counters.refused_count, 1U) << bad;
      for (const std::byte byte : data.blocks_) ASSERT_EQ(byte, std::byte{0xEE});
      const std::vector<std::byte> rows(data.rows_.begin(), data.rows_.end());
      GatherCounters counters;
      ASSERT_TRUE(RunGather<Sm90>(data, 0, &counters).ok());
      EXPECT_EQ(counters.refused_count, 1U) << bad;
      EXPECT_TRUE(std::equal(rows.begin(), rows.end(), data.rows_.begin()));
    }
  }
}

// Of FP8 rows, in kernels of both kinds. Sealing only multiplies with them.
TEST(MixedTransferCounts, RefusesScalesOfRows) {
  for (const SideFormat format : {SideFormat::kNvfp4, SideFormat::kBf16}) {
    for (const float bad : {0.0F, -1.0F, 0x1p-128F, HUGE_VALF, NAN}) {
      TransferCase test_case = kOneTile;
      test_case.type = ElementType::kFp8E4m3;
      test_case.format = {format, format};
      TransferData data(test_case, kSeed);
      data.scales_[1][0] = bad;
      const SealRun run = RunSeal<Sm90>(data, 0);
      ASSERT_TRUE(run.report.ok()) << run.report.ToString();
      EXPECT_EQ(run.counters.refused_count, bad == 0x1p-128F ? 0U : 1U) << bad;
      data.FillBlocks();
      GatherCounters counters;
      ASSERT_TRUE(RunGather<Sm90>(data, 0, &counters).ok());
      EXPECT_EQ(counters.refused_count, 1U) << bad;
    }
  }
}

// Scales on the device, of sides and of FP8 rows: the kernels refuse a tile if and only if the CPU
// refuses it.
TEST(MixedTransferCounts, RefusesTheScalesThatTheCpuRefuses) {
  constexpr float kScales[] = {1.0F,  0.5F,       1.5F,      0x1p-100F, 0x1p-101F,
                               0.0F,  -0.0F,      -2.0F,     0x1p-128F, 0x1.000008p-128F,
                               NAN,   -NAN,       HUGE_VALF, 0x1p100F,  0x1p-149F,
                               3e38F, -HUGE_VALF, 1.0F,      1.0F,      1.0F};
  std::mt19937 random(static_cast<uint32_t>(kSeed));
  for (int i = 0; i < 400; ++i) {
    const auto scale = [&] { return kScales[random() % std::size(kScales)]; };
    TransferCase test_case = kOneTile;
    test_case.format = {kFormats[random() % 3], kFormats[random() % 3]};
    test_case.type = random() % 2 == 0 ? ElementType::kFp8E4m3 : ElementType::kFp32;
    TransferData data(test_case, kSeed);
    for (const uint32_t side : {0U, 1U}) {
      data.g_[side][0] = scale();
      if (test_case.type == ElementType::kFp8E4m3) data.scales_[side][0] = scale();
    }
    std::vector<float> rows(16 * 64, 1.0F);
    const auto cpu_rows = [&]<typename Rows>(Rows, uint32_t side) {
      return Rows{.type = test_case.type,
                  .data = rows.data(),
                  .token_stride = 64,
                  .scale = data.scales_[side][0]};
    };
    const TileShape shape = TileOf(test_case.shape);
    std::vector<std::byte> tile(data.tile_bytes());
    SealStats stats;
    const Status seal =
        SealTile(shape, test_case.format, cpu_rows(ConstRows(), 0), cpu_rows(ConstRows(), 1),
                 {.g_k = data.g_[0][0], .g_v = data.g_[1][0]}, tile, &stats);
    const Status gather =
        GatherTile(shape, test_case.format, tile, {.g_k = data.g_[0][0], .g_v = data.g_[1][0]},
                   cpu_rows(MutableRows(), 0), cpu_rows(MutableRows(), 1));
    const SealRun run = RunSeal<Sm90>(data, 0);
    ASSERT_TRUE(run.report.ok()) << run.report.ToString();
    ASSERT_EQ(run.counters.refused_count, seal.ok() ? 0U : 1U)
        << NameOf(test_case, kSeed) << " draw " << i << ": " << seal.message();
    data.FillBlocks();
    GatherCounters counters;
    ASSERT_TRUE(RunGather<Sm90>(data, 0, &counters).ok());
    ASSERT_EQ(counters.refused_count, gather.ok() ? 0U : 1U)
        << NameOf(test_case, kSeed) << " draw " << i << ": " << gather.message();
  }
}

TEST(MixedTransferCounts, Bf16SidesNeedNoScales) {
  TransferCase test_case = kOneTile;
  test_case.format = {SideFormat::kBf16, SideFormat::kBf16};
  TransferData data(test_case, kSeed);
  SealCounters counters;
  SealPlan plan;
  SealBlocksArgs args = SealArgs(data, &counters);
  args.g_k = nullptr;
  args.g_v = nullptr;
  EXPECT_TRUE(PlanSeal(args, &plan).ok());
  args.blocks.format.v = SideFormat::kFp8;
  EXPECT_EQ(PlanSeal(args, &plan).code(), StatusCode::kInvalidArgument);
  // Scales that are there are not read either.
  data.g_[0][0] = NAN;
  const SealRun run = RunSeal<Sm90>(data, 0);
  ASSERT_TRUE(run.report.ok()) << run.report.ToString();
  EXPECT_EQ(run.counters.refused_count, 0U);
}

TEST(MixedTransferCounts, GatherCountsFp8NansAndGivesZeros) {
  for (const uint8_t nan : {uint8_t{0x7F}, uint8_t{0xFF}}) {
    TransferCase test_case = kOneTile;
    test_case.type = ElementType::kFp32;
    TransferData data(test_case, kSeed);
    data.FillBlocks();
    // Three in two stores of 4 values.
    const uint64_t v = SideBytes(TileOf(test_case.shape), SideFormat::kFp8);
    for (const uint64_t at : {uint64_t{5}, uint64_t{6}, v + 64}) {
      data.blocks_[at] = std::byte{0};
    }
    const std::vector<std::byte> expected = data.ExpectedRows(data.blocks_);
    for (const uint64_t at : {uint64_t{5}, uint64_t{6}, v + 64}) {
      data.blocks_[at] = std::byte{nan};
    }
    GatherCounters counters;
    const emu::Report report = RunGather<Sm80>(data, 0, &counters);
    ASSERT_TRUE(report.ok()) << report.ToString();
    EXPECT_EQ(counters.invalid_count, 2U);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), data.rows_.begin()));
  }
}

}  // namespace
}  // namespace kvtier::kernels::cuda
