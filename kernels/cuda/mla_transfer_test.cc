// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/mla_transfer_fixture.h"
#include "kernels/cuda/mla_transfer_kernel.h"
#include "kernels/cuda/mla_transfer_plan.h"

// The kernels for latents, executed by the machine of emu/, give the bytes of SealMlaTile and
// GatherMlaTile on every architecture and under every schedule.

namespace kvtier::kernels::cuda {
namespace {

constexpr uint64_t kSeed = 20261129;

emu::Memory MemoryOf(MlaTransferData& data, bool seals) {
  emu::Memory memory;
  memory.AddInput(std::span<const BlockEntry>(data.entries_));
  memory.AddInput(std::span<const uint32_t>(data.page_table_));
  memory.AddInput(std::span<const float>(data.g_));
  memory.AddInput(std::span<const float>(data.latent_scales_));
  memory.AddInput(std::span<const float>(data.rope_scales_));
  if (seals) {
    memory.AddInput(std::span<const std::byte>(data.rows_));
    memory.AddOutput(std::span(data.blocks_));
  } else {
    memory.AddInput(std::span<const std::byte>(data.blocks_));
    memory.AddOutput(std::span(data.rows_));
  }
  return memory;
}

emu::LaunchConfig ConfigOf(const LaunchShape& shape, uint64_t seed) {
  return {.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
          .block = {shape.block_x, shape.block_y},
          .shared_bytes = shape.shared_bytes,
          .seed = seed};
}

template <typename Arch, ElementType kType>
void Check(MlaTransferCase test_case, uint64_t seed) {
  test_case.type = kType;
  MlaTransferData data(test_case, seed);
  emu::DeviceBuffer<SealCounters> seal_counters(1);
  SealPlan seal;
  ASSERT_TRUE(
      PlanSealMla(
          {.blocks = data.Blocks(), .search = test_case.search, .counters = seal_counters.data()},
          &seal)
          .ok());
  SealStats stats;
  const std::vector<std::byte> expected_blocks = data.ExpectedBlocks(&stats);
  emu::Memory memory = MemoryOf(data, true);
  memory.AddInOut(std::span(seal_counters));
  emu::Report report =
      emu::Launch(ConfigOf(seal.shape, seed), memory, MlaSealBody<Arch, kType>, seal.params);
  ASSERT_TRUE(report.ok()) << report.ToString() << data.Name();
  const auto block =
      std::mismatch(expected_blocks.begin(), expected_blocks.end(), data.blocks_.begin());
  ASSERT_EQ(block.first, expected_blocks.end())
      << "byte " << block.first - expected_blocks.begin() << " " << data.Name();
  EXPECT_EQ(seal_counters[0].nonfinite_count, stats.nonfinite_count) << data.Name();
  EXPECT_EQ(seal_counters[0].saturated_count, stats.saturated_count) << data.Name();

  data.FillBlocks();
  emu::DeviceBuffer<GatherCounters> gather_counters(1);
  GatherPlan gather;
  ASSERT_TRUE(
      PlanGatherMla({.blocks = data.Blocks(), .counters = gather_counters.data()}, &gather).ok());
  const std::vector<std::byte> expected_rows = data.ExpectedRows();
  memory = MemoryOf(data, false);
  memory.AddInOut(std::span(gather_counters));
  report =
      emu::Launch(ConfigOf(gather.shape, seed), memory, MlaGatherBody<Arch, kType>, gather.params);
  ASSERT_TRUE(report.ok()) << report.ToString() << data.Name();
  const auto row = std::mismatch(expected_rows.begin(), expected_rows.end(), data.rows_.begin());
  ASSERT_EQ(row.first, expected_rows.end())
      << "byte " << row.first - expected_rows.begin() << " " << data.Name();
  EXPECT_EQ(gather_counters[0].invalid_count, 0U);
}

template <typename Arch>
void CheckEveryType(const MlaTransferCase& test_case, uint64_t seed) {
  Check<Arch, ElementType::kBf16>(test_case, seed);
  Check<Arch, ElementType::kFp16>(test_case, seed);
  Check<Arch, ElementType::kFp32>(test_case, seed);
  Check<Arch, ElementType::kFp8E4m3>(test_case, seed);
}

TEST(MlaTransfer, GivesTheBytesOfTheCpu) {
  CheckEveryType<Sm80>({.block_tokens = 16, .page_tokens = 24}, kSeed);
  CheckEveryType<Sm89>({.block_tokens = 16, .search = ScaleSearch::kFourOverSix}, 0);
  CheckEveryType<Sm100>({.block_tokens = 32, .page_tokens = 16}, kSeed + 1);
  for (const uint32_t block_tokens : {64U, 128U}) {
    Check<Sm80, ElementType::kBf16>({.block_tokens = block_tokens}, kSeed);
  }
}

TEST(MlaTransfer, GivesTheBytesOfTheCpuForRandomCaches) {
  for (uint64_t seed = kSeed; seed < kSeed + 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    MlaTransferCase test_case{.block_tokens = 16U << random() % 2};
    if (random() % 2 == 0) test_case.page_tokens = static_cast<uint32_t>(1 + random() % 40);
    test_case.search = random() % 2 == 0 ? ScaleSearch::kAmax6 : ScaleSearch::kFourOverSix;
    switch (random() % 4) {
      case 0:
        Check<Sm80, ElementType::kBf16>(test_case, seed);
        break;
      case 1:
        Check<Sm80, ElementType::kFp32>(test_case, seed);
        break;
      case 2:
        Check<Sm100, ElementType::kFp16>(test_case, seed);
        break;
      default:
        Check<Sm100, ElementType::kFp8E4m3>(test_case, seed);
    }
  }
}

TEST(MlaTransfer, CountsAndRefuses) {
  MlaTransferData data({}, kSeed);
  data.FillBlocks();
  data.blocks_[MlaScaleByteOffset(data.shape_.tile, 3, 9)] = std::byte{0x7F};
  data.g_[1] = 3.0F;
  emu::DeviceBuffer<GatherCounters> counters(1);
  GatherPlan plan;
  ASSERT_TRUE(PlanGatherMla({.blocks = data.Blocks(), .counters = counters.data()}, &plan).ok());
  emu::Memory memory = MemoryOf(data, false);
  memory.AddInOut(std::span(counters));
  ASSERT_TRUE(emu::Launch(ConfigOf(plan.shape, 0), memory, MlaGatherBody<Sm90, ElementType::kBf16>,
                          plan.params)
                  .ok());
  EXPECT_EQ(counters[0].invalid_count, 2U);  // A vector of BF16 takes two stores.
  EXPECT_EQ(counters[0].refused_count, MlaTransferData::kEntries);

  const auto refuses = [&](auto change) {
    MlaDeviceBlocks blocks = data.Blocks();
    change(&blocks);
    return PlanGatherMla({.blocks = blocks, .counters = counters.data()}, &plan).code() ==
           StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](auto* b) { b->shape.tile.block_tokens = 24; }));
  EXPECT_TRUE(refuses([](auto* b) { b->latent.token_stride = 504; }));
  EXPECT_TRUE(refuses([](auto* b) { b->rope.token_stride = 56; }));
  EXPECT_TRUE(refuses([](auto* b) { b->rope.type = ElementType::kFp32; }));
  EXPECT_TRUE(refuses([](auto* b) { b->g = nullptr; }));
  EXPECT_TRUE(refuses([](auto* b) { b->entries = nullptr; }));
}

}  // namespace
}  // namespace kvtier::kernels::cuda
