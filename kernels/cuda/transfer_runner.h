// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_TRANSFER_RUNNER_H_
#define KVTIER_KERNELS_CUDA_TRANSFER_RUNNER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/mixed_transfer_kernel.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/transfer_fixture.h"
#include "kernels/cuda/transfer_params.h"

// Runs cases of transfer_fixture.h on the machine of emu/ and compares with the CPU, for the tests
// of the seal and gather kernels.

namespace kvtier::kernels::cuda {

inline constexpr uint64_t kSeed = 20261129;

// The kernels that SealBlocks and GatherBlocks choose.
template <typename Arch, ElementType kType>
auto SealBodyOf(const LayerFormat& format) {
  return format == LayerFormat{} ? &SealBody<Arch, kType> : &MixedSealBody<Arch, kType>;
}
template <typename Arch, ElementType kType>
auto GatherBodyOf(const LayerFormat& format) {
  return format == LayerFormat{} ? &GatherBody<Arch, kType> : &MixedGatherBody<Arch, kType>;
}

template <typename Arch>
auto SealBodyOf(const TransferCase& test_case) {
  switch (test_case.type) {
    case ElementType::kBf16:
      return SealBodyOf<Arch, ElementType::kBf16>(test_case.format);
    case ElementType::kFp16:
      return SealBodyOf<Arch, ElementType::kFp16>(test_case.format);
    case ElementType::kFp32:
      return SealBodyOf<Arch, ElementType::kFp32>(test_case.format);
    case ElementType::kFp8E4m3:
      break;
  }
  return SealBodyOf<Arch, ElementType::kFp8E4m3>(test_case.format);
}

template <typename Arch>
auto GatherBodyOf(const TransferCase& test_case) {
  switch (test_case.type) {
    case ElementType::kBf16:
      return GatherBodyOf<Arch, ElementType::kBf16>(test_case.format);
    case ElementType::kFp16:
      return GatherBodyOf<Arch, ElementType::kFp16>(test_case.format);
    case ElementType::kFp32:
      return GatherBodyOf<Arch, ElementType::kFp32>(test_case.format);
    case ElementType::kFp8E4m3:
      break;
  }
  return GatherBodyOf<Arch, ElementType::kFp8E4m3>(test_case.format);
}

inline emu::LaunchConfig ConfigOf(const LaunchShape& shape, uint64_t seed) {
  return {.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
          .block = {shape.block_x, shape.block_y},
          .shared_bytes = shape.shared_bytes,
          .seed = seed};
}

inline void AddMetadata(TransferData& data, emu::Memory* memory) {
  memory->AddInput(std::span<const BlockEntry>(data.entries_));
  memory->AddInput(std::span<const uint32_t>(data.entry_count_));
  memory->AddInput(std::span<const uint32_t>(data.page_table_));
  for (const uint32_t side : {0U, 1U}) {
    memory->AddInput(std::span<void* const>(data.layer_data_[side]));
    memory->AddInput(std::span<const float>(data.g_[side]));
    memory->AddInput(std::span<const float>(data.scales_[side]));
  }
  memory->AddInput(std::span<const float>(data.mean_));
  memory->AddInput(std::span<const float>(data.inverse_smooth_));
}

struct SealRun {
  emu::Report report;
  SealCounters counters;
};

inline SealBlocksArgs SealArgs(TransferData& data, SealCounters* counters) {
  SealBlocksArgs args{.blocks = data.Blocks(),
                      .k = data.Rows(false),
                      .v = data.Rows(true),
                      .pages = data.Pages(),
                      .g_k = data.g_[0].data(),
                      .g_v = data.g_[1].data(),
                      .search = data.case_.search,
                      .counters = counters};
  if (data.case_.has_transform) {
    args.k_mean = data.mean_.data();
    args.k_inverse_smooth = data.inverse_smooth_.data();
  }
  return args;
}

template <typename Arch>
SealRun RunSeal(TransferData& data, uint64_t seed) {
  SealRun run;
  emu::DeviceBuffer<SealCounters> counters(1);
  SealPlan plan;
  const Status status = PlanSeal(SealArgs(data, counters.data()), &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  emu::Memory memory;
  AddMetadata(data, &memory);
  memory.AddInput(std::span<const std::byte>(data.rows_));
  memory.AddOutput(std::span(data.blocks_));
  memory.AddInOut(std::span(counters));
  run.report =
      emu::Launch(ConfigOf(plan.shape, seed), memory, SealBodyOf<Arch>(data.case_), plan.params);
  run.counters = counters[0];
  return run;
}

inline GatherBlocksArgs GatherArgs(TransferData& data, GatherCounters* counters) {
  return {.blocks = data.Blocks(),
          .k = data.Rows(false),
          .v = data.Rows(true),
          .pages = data.Pages(),
          .g_k = data.g_[0].data(),
          .g_v = data.g_[1].data(),
          .counters = counters};
}

template <typename Arch>
emu::Report RunGather(TransferData& data, uint64_t seed, GatherCounters* counted) {
  emu::DeviceBuffer<GatherCounters> counters(1);
  GatherPlan plan;
  const Status status = PlanGather(GatherArgs(data, counters.data()), &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  emu::Memory memory;
  AddMetadata(data, &memory);
  memory.AddInput(std::span<const std::byte>(data.blocks_));
  memory.AddOutput(std::span(data.rows_));
  memory.AddInOut(std::span(counters));
  emu::Report report =
      emu::Launch(ConfigOf(plan.shape, seed), memory, GatherBodyOf<Arch>(data.case_), plan.params);
  *counted = counters[0];
  return report;
}

inline std::string NameOf(const TransferCase& test_case, uint64_t seed) {
  return "T " + std::to_string(test_case.shape.block_tokens) + " d " +
         std::to_string(test_case.shape.head_dim) + " type " +
         std::to_string(static_cast<int>(test_case.type)) + " page " +
         std::to_string(test_case.page_tokens) + " format " +
         std::to_string(static_cast<int>(test_case.format.k)) + "/" +
         std::to_string(static_cast<int>(test_case.format.v)) + " seed " + std::to_string(seed);
}

// `change` is made to the case's memory first.
template <typename Arch>
void CheckSeal(
    const TransferCase& test_case, uint64_t seed,
    const std::function<void(TransferData*)>& change = [](TransferData*) {}) {
  TransferData data(test_case, seed);
  change(&data);
  SealStats stats;
  const std::vector<std::byte> expected = data.ExpectedBlocks(&stats);
  const SealRun run = RunSeal<Arch>(data, seed % 2 == 0 ? 0 : seed);
  ASSERT_TRUE(run.report.ok()) << run.report.ToString() << NameOf(test_case, seed);
  EXPECT_EQ(run.report.BankConflicts(), 0U) << run.report.ToString() << NameOf(test_case, seed);
  const auto difference = std::mismatch(expected.begin(), expected.end(), data.blocks_.begin());
  ASSERT_EQ(difference.first, expected.end())
      << "byte " << difference.first - expected.begin() << " " << NameOf(test_case, seed);
  EXPECT_EQ(run.counters.nonfinite_count, stats.nonfinite_count) << NameOf(test_case, seed);
  EXPECT_EQ(run.counters.saturated_count, stats.saturated_count) << NameOf(test_case, seed);
  EXPECT_EQ(run.counters.refused_count, 0U);
}

template <typename Arch>
void CheckGather(
    const TransferCase& test_case, uint64_t seed,
    const std::function<void(TransferData*)>& change = [](TransferData*) {}) {
  TransferData data(test_case, seed);
  data.FillBlocks();
  change(&data);
  const std::vector<std::byte> expected = data.ExpectedRows(data.blocks_);
  GatherCounters counters;
  const emu::Report report = RunGather<Arch>(data, seed % 2 == 0 ? 0 : seed, &counters);
  ASSERT_TRUE(report.ok()) << report.ToString() << NameOf(test_case, seed);
  const auto difference = std::mismatch(expected.begin(), expected.end(), data.rows_.begin());
  ASSERT_EQ(difference.first, expected.end())
      << "byte " << difference.first - expected.begin() << " " << NameOf(test_case, seed);
  EXPECT_EQ(counters.invalid_count, 0U);
  EXPECT_EQ(counters.refused_count, 0U);
}

using Archs = testing::Types<Sm80, Sm89, Sm100>;
class ArchNames {
 public:
  template <typename Arch>
  static std::string GetName(int) {
    return Arch::kConvertsE2m1 ? "Sm100" : Arch::kConvertsE4m3 ? "Sm89" : "Sm80";
  }
};

inline constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                         ElementType::kFp8E4m3};

inline constexpr TransferCase kUsual{
    .shape = {.layer_count = 2, .kv_head_count = 2, .block_tokens = 64, .head_dim = 128},
    .page_tokens = 16,
    .entry_count = 2};

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_TRANSFER_RUNNER_H_
