// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/mla_transfer_kernel.h"
#include "kernels/cuda/mla_transfer_plan.h"
#include "kernels/mla.h"
#include "kernels/nvfp4.h"

// The kernels for latents, executed by the machine of emu/, give the bytes of SealMlaTile and
// GatherMlaTile on every architecture and under every schedule.

namespace kvtier::kernels::cuda {
namespace {

constexpr uint64_t kSeed = 20261129;
constexpr uint32_t kRowDims = kMlaLatentDim + kMlaRopeDim;

struct MlaTransferCase {
  uint32_t block_tokens = 16;
  uint32_t page_tokens = 0;  // 0: dense.
  ElementType type = ElementType::kBf16;
  ScaleSearch search = ScaleSearch::kAmax6;
};

// A cache of rows [latent | rope], the blocks of its tokens, and what the CPU makes of both.
class MlaTransferData {
 public:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kEntries = 2;
  static constexpr uint32_t kFirstSlot = 5;

  MlaTransferData(const MlaTransferCase& test_case, uint64_t seed)
      : case_(test_case), random_(seed), shape_{kLayers, {test_case.block_tokens}} {
    const uint32_t token_count = kFirstSlot + kEntries * case_.block_tokens;
    page_count_ = case_.page_tokens == 0 ? 1 : token_count / case_.page_tokens + 2;
    run_tokens_ = case_.page_tokens == 0 ? token_count + 3 : case_.page_tokens;
    const uint64_t element_count = uint64_t{kLayers} * page_count_ * run_tokens_ * kRowDims;
    for (uint64_t i = 0; i < element_count; ++i) AddElement(random_() % 64 == 0);
    for (uint32_t i = 0; i < page_count_; ++i) page_table_.push_back(i);
    std::shuffle(page_table_.begin(), page_table_.end(), random_);
    blocks_.assign(kEntries * MlaBlockBytes(shape_), std::byte{0xEE});
    for (uint32_t i = 0; i < kEntries; ++i) {
      entries_.push_back({.block = blocks_.data() + (1 - i) * MlaBlockBytes(shape_),
                          .first_slot = kFirstSlot + i * case_.block_tokens});
    }
  }

  MlaDeviceBlocks Blocks() {
    const uint64_t page_stride = uint64_t{run_tokens_} * kRowDims;
    const DeviceRows latent{.type = case_.type,
                            .data = rows_.data(),
                            .layer_stride = page_count_ * page_stride,
                            .token_stride = kRowDims,
                            .page_stride = page_stride,
                            .scales = latent_scales_.data()};
    DeviceRows rope = latent;
    rope.data = rows_.data() + kMlaLatentDim * ElementBytes(case_.type);
    rope.scales = rope_scales_.data();
    DevicePages pages;
    if (case_.page_tokens != 0) pages = {page_table_.data(), case_.page_tokens};
    return {.entries = entries_.data(),
            .entry_count_max = kEntries,
            .shape = shape_,
            .latent = latent,
            .rope = rope,
            .pages = pages,
            .g = g_.data()};
  }

  // Calls visit(entry, layer, bytes from blocks_ to the tile).
  template <typename Visit>
  void ForEachTile(const Visit& visit) const {
    for (uint32_t entry = 0; entry < kEntries; ++entry) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        visit(entry, layer, (1 - entry) * MlaBlockBytes(shape_) + MlaTileOffset(shape_, layer));
      }
    }
  }

  template <typename RowsType>
  RowsType CpuRows(bool is_rope, uint32_t entry, uint32_t layer, std::byte* data) const {
    RowsType rows{};
    const uint64_t layer_elements = uint64_t{page_count_} * run_tokens_ * kRowDims;
    uint64_t first = layer * layer_elements + (is_rope ? kMlaLatentDim : 0);
    if (case_.page_tokens == 0) {
      first += uint64_t{entries_[entry].first_slot} * kRowDims;
    } else {
      rows.paging = {.page_table = page_table_.data(),
                     .page_table_count = page_count_,
                     .page_tokens = case_.page_tokens,
                     .page_stride = uint64_t{run_tokens_} * kRowDims,
                     .first_slot = entries_[entry].first_slot};
    }
    rows.type = case_.type;
    rows.token_stride = kRowDims;
    if (case_.type == ElementType::kFp8E4m3) {
      rows.scale = is_rope ? rope_scales_[layer] : latent_scales_[layer];
    }
    rows.data = data + first * ElementBytes(case_.type);
    return rows;
  }

  std::vector<std::byte> ExpectedBlocks(SealStats* stats) const {
    std::vector<std::byte> result(blocks_.begin(), blocks_.end());
    auto* rows = const_cast<std::byte*>(rows_.data());
    ForEachTile([&](uint32_t entry, uint32_t layer, uint64_t offset) {
      const Status status =
          SealMlaTile(shape_.tile, CpuRows<ConstRows>(false, entry, layer, rows),
                      CpuRows<ConstRows>(true, entry, layer, rows),
                      {.g = g_[layer], .search = case_.search, .isa = Isa::kScalar},
                      std::span(result).subspan(offset, MlaTileBytes(shape_.tile)), stats);
      EXPECT_TRUE(status.ok()) << status.message();
    });
    return result;
  }

  std::vector<std::byte> ExpectedRows() const {
    std::vector<std::byte> result(rows_.begin(), rows_.end());
    ForEachTile([&](uint32_t entry, uint32_t layer, uint64_t offset) {
      const Status status =
          GatherMlaTile(shape_.tile, std::span(blocks_).subspan(offset, MlaTileBytes(shape_.tile)),
                        {.g = g_[layer], .isa = Isa::kScalar},
                        CpuRows<MutableRows>(false, entry, layer, result.data()),
                        CpuRows<MutableRows>(true, entry, layer, result.data()));
      EXPECT_TRUE(status.ok()) << status.message();
    });
    return result;
  }

  // Any codes, any valid scales; ropes of any bits where NaNs have bits of their own.
  void FillBlocks() {
    const bool has_nans = case_.type == ElementType::kBf16 || case_.type == ElementType::kFp32;
    for (auto& byte : blocks_) byte = static_cast<std::byte>(random_());
    ForEachTile([&](uint32_t, uint32_t, uint64_t offset) {
      std::byte* tile = blocks_.data() + offset;
      for (uint64_t i = 0; i < MlaScaleBytes(shape_.tile); ++i) {
        tile[MlaScaleOffset(shape_.tile) + i] = static_cast<std::byte>(random_() % 0x7F);
      }
      for (uint64_t i = 1; !has_nans && i < MlaRopeBytes(shape_.tile); i += 2) {
        tile[MlaRopeOffset(shape_.tile) + i] &= std::byte{0xBF};  // No exponent of all ones.
      }
    });
  }

  emu::Memory MemoryOf(bool seals) {
    emu::Memory memory;
    memory.AddInput(std::span<const BlockEntry>(entries_));
    memory.AddInput(std::span<const uint32_t>(page_table_));
    memory.AddInput(std::span<const float>(g_));
    memory.AddInput(std::span<const float>(latent_scales_));
    memory.AddInput(std::span<const float>(rope_scales_));
    if (seals) {
      memory.AddInput(std::span<const std::byte>(rows_));
      memory.AddOutput(std::span(blocks_));
    } else {
      memory.AddInput(std::span<const std::byte>(blocks_));
      memory.AddOutput(std::span(rows_));
    }
    return memory;
  }

  std::string Name() const {
    return "T " + std::to_string(case_.block_tokens) + " type " +
           std::to_string(static_cast<int>(case_.type)) + " page " +
           std::to_string(case_.page_tokens);
  }

  MlaTransferCase case_;
  std::mt19937_64 random_;
  MlaBlockShape shape_;
  uint32_t page_count_ = 0;
  uint32_t run_tokens_ = 0;
  emu::DeviceBuffer<std::byte> rows_, blocks_;
  emu::DeviceBuffer<BlockEntry> entries_;
  emu::DeviceBuffer<uint32_t> page_table_;
  emu::DeviceBuffer<float> g_ = {0x1p-6F, 0x1p-7F};
  emu::DeviceBuffer<float> latent_scales_ = {0.75F, 1.5F};
  emu::DeviceBuffer<float> rope_scales_ = {1.25F, 0.625F};

 private:
  // Special values: any bits, half of them of NaNs and infinities, of which half have no payload in
  // the upper 16 bits; for the types whose NaNs the kernels promise.
  void AddElement(bool is_special) {
    const float x = std::normal_distribution<float>()(random_);
    const uint64_t draw = random_();
    auto any = static_cast<uint32_t>(draw);
    if ((draw >> 32 & 1) != 0) any |= 0x7F800000U;
    if ((draw >> 32 & 3) == 3) any &= 0xFF80FFFFU;
    std::byte bytes[4];
    const uint32_t element_bytes = ElementBytes(case_.type);
    if (case_.type == ElementType::kFp32) {
      std::memcpy(bytes, &x, sizeof(x));
      if (is_special) std::memcpy(bytes, &any, sizeof(any));
    } else if (case_.type == ElementType::kFp8E4m3) {
      bytes[0] = static_cast<std::byte>(EncodeE4m3Scale(std::fabs(x)) | (x < 0.0F ? 0x80 : 0));
    } else {
      uint16_t bits = case_.type == ElementType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
      if (is_special && case_.type == ElementType::kBf16) bits = static_cast<uint16_t>(any >> 16);
      std::memcpy(bytes, &bits, sizeof(bits));
    }
    rows_.insert(rows_.end(), bytes, bytes + element_bytes);
  }
};

emu::LaunchConfig ConfigOf(const LaunchShape& shape, uint64_t seed) {
  return {.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
          .block = {shape.block_x, shape.block_y},
          .shared_bytes = shape.shared_bytes,
          .seed = seed};
}

template <typename Arch, ElementType kType>
void Check(MlaTransferCase test_case, uint64_t seed) {
  test_case.type = kType;
  MlaTransferData data(test_case, kSeed);
  emu::DeviceBuffer<SealCounters> seal_counters(1);
  SealPlan seal;
  ASSERT_TRUE(
      PlanSealMla(
          {.blocks = data.Blocks(), .search = test_case.search, .counters = seal_counters.data()},
          &seal)
          .ok());
  SealStats stats;
  const std::vector<std::byte> expected_blocks = data.ExpectedBlocks(&stats);
  emu::Memory memory = data.MemoryOf(true);
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
  memory = data.MemoryOf(false);
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

TEST(MlaTransfer, CountsAndRefuses) {
  MlaTransferData data({}, kSeed);
  data.FillBlocks();
  data.blocks_[MlaScaleByteOffset(data.shape_.tile, 3, 9)] = std::byte{0x7F};
  data.g_[1] = 3.0F;
  emu::DeviceBuffer<GatherCounters> counters(1);
  GatherPlan plan;
  ASSERT_TRUE(PlanGatherMla({.blocks = data.Blocks(), .counters = counters.data()}, &plan).ok());
  emu::Memory memory = data.MemoryOf(false);
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
