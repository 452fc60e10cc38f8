// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/primitives.h"

// The machine finds what it says it finds, and finds nothing in correct kernels under any schedule.

namespace kvtier::kernels::cuda {
namespace {

using emu::AccessKind;
using emu::FindingKind;
using emu::LaunchConfig;
using emu::Memory;
using emu::Report;

constexpr uint32_t kThreads = 64;
constexpr uint64_t kSeeds[] = {0, 1, 2, 3};

// Sums in[block * blockDim ...] per block: shared memory, a barrier, shuffles.
struct SumOptions {
  bool has_barrier = true;
  uint32_t extra_index = 0;
};
void SumKernel(Global<const uint32_t> in, Global<uint32_t> out, SumOptions options) {
  const uint32_t thread = ThreadX();
  const uint32_t value =
      LoadConstant<uint32_t>(in + (BlockX() * kThreads + thread + options.extra_index));
  StoreShared<uint32_t>(4 * thread, value);
  if (options.has_barrier) SyncThreads();
  if (thread >= 32) return;
  uint32_t sum = LoadShared<uint32_t>(4 * thread) + LoadShared<uint32_t>(4 * (thread + 32));
  for (uint32_t bits = 16; bits > 0; bits /= 2) sum += ShuffleXor(sum, bits);
  if (thread == 0) StoreGlobal<uint32_t>(out + BlockX(), sum);
}

struct SumFixture {
  SumFixture() : in(3 * kThreads), out(3) {
    std::iota(in.begin(), in.end(), 1U);
    memory.AddInput(std::span<const uint32_t>(in));
    memory.AddOutput(std::span(out));
  }
  Report Run(const SumOptions& options, uint64_t seed, uint32_t shared_bytes = 4 * kThreads) {
    return Launch({.grid = {3}, .block = {kThreads}, .shared_bytes = shared_bytes, .seed = seed},
                  memory, SumKernel, Global<const uint32_t>{in.data()},
                  Global<uint32_t>{out.data()}, options);
  }
  emu::DeviceBuffer<uint32_t> in;
  std::vector<uint32_t> out;
  Memory memory;
};

TEST(Emu, RunsACorrectKernelUnderEverySchedule) {
  for (const uint64_t seed : kSeeds) {
    SumFixture fixture;
    const Report report = fixture.Run({}, seed);
    ASSERT_TRUE(report.ok()) << report.ToString() << "seed " << seed;
    for (uint32_t block = 0; block < 3; ++block) {
      const auto first = fixture.in.begin() + block * kThreads;
      EXPECT_EQ(fixture.out[block], std::accumulate(first, first + kThreads, 0U));
    }
    EXPECT_EQ(report.barrier_count, 3U);
    EXPECT_EQ(report.BankConflicts(), 0U) << report.ToString();
    EXPECT_EQ(report.ExtraSectors(AccessKind::kGlobalRead), 0U) << report.ToString();
  }
}

TEST(Emu, CatchesADroppedBarrier) {
  // In order, thread 0 reads before thread 32 has written; in other orders only the clocks know.
  for (const uint64_t seed : kSeeds) {
    SumFixture fixture;
    const Report report = fixture.Run({.has_barrier = false}, seed);
    ASSERT_FALSE(report.ok()) << "seed " << seed;
    EXPECT_TRUE(report.Has(FindingKind::kRace) || report.Has(FindingKind::kUninitialized))
        << report.ToString();
  }
}

TEST(Emu, CatchesAWrongIndex) {
  SumFixture fixture;
  const Report report = fixture.Run({.extra_index = 1}, 0);
  EXPECT_TRUE(report.Has(FindingKind::kOutOfBounds)) << report.ToString();
  EXPECT_NE(report.ToString().find("emu_test.cc"), std::string::npos) << report.ToString();
}

TEST(Emu, CatchesSharedOutOfBounds) {
  SumFixture fixture;
  EXPECT_TRUE(fixture.Run({}, 0, 4 * kThreads - 1).Has(FindingKind::kOutOfBounds));
}

template <typename Kernel>
Report RunWarp(const Kernel& kernel, std::span<uint32_t> words = {}, uint64_t seed = 0,
               uint32_t thread_count = 32) {
  Memory memory;
  memory.AddInOut(words);
  return emu::LaunchThreads({.block = {thread_count}, .shared_bytes = 8192, .seed = seed}, memory,
                            kernel);
}

TEST(Emu, CatchesUninitializedReads) {
  EXPECT_TRUE(RunWarp([] { LoadShared<uint32_t>(4 * LaneId()); }).Has(FindingKind::kUninitialized));
  std::vector<uint32_t> out(32);
  Memory memory;
  memory.AddOutput(std::span(out));
  const Report report = emu::LaunchThreads(
      {.block = {32}}, memory, [&] { LoadGlobal<uint32_t>(Global<const uint32_t>{out.data()}); });
  EXPECT_TRUE(report.Has(FindingKind::kUninitialized));
}

TEST(Emu, CatchesMisalignedVectors) {
  emu::DeviceBuffer<uint32_t> words(64);
  const Global<const uint32_t> begin{words.data()};
  EXPECT_TRUE(RunWarp([&] { LoadConstant<Words4>(begin.At<const Words4>(4)); }, words)
                  .Has(FindingKind::kMisaligned));
  EXPECT_TRUE(RunWarp([] { StoreShared<Words2>(4, Words2{}); }).Has(FindingKind::kMisaligned));
}

TEST(Emu, CatchesWritesToInputs) {
  const std::vector<uint32_t> words(64);
  Memory memory;
  memory.AddInput(std::span<const uint32_t>(words));
  const Report report = emu::LaunchThreads({.block = {1}}, memory, [&] {
    StoreGlobal<uint32_t>(Global<uint32_t>{const_cast<uint32_t*>(words.data())}, 1U);
  });
  EXPECT_TRUE(report.Has(FindingKind::kOutOfBounds)) << report.ToString();
}

void DivergentLaneHasLeft() {
  if (LaneId() == 5) return;
  ShuffleXor(1, 1);
}
void DivergentLanesAtTwoShuffles() {
  if (LaneId() < 16) {
    ShuffleXor(1, 1);
  } else {
    ShuffleXor(2, 1);
  }
}
void DivergentLaneOutsideItsMask() { ShuffleXor(1, 1, 0x7FFFFFFFU); }
void DivergentHalfAtTheBarrier() {
  if (LaneId() < 16) {
    SyncThreads();
  } else {
    SyncWarp();
  }
}
void DivergentLanesAtTwoBarriers() {
  // NOLINTNEXTLINE(bugprone-branch-clone): the two places are the point.
  if (LaneId() < 16) {
    SyncThreads();
  } else {
    SyncThreads();
  }
}

TEST(Emu, CatchesDivergentCollectives) {
  for (const uint64_t seed : kSeeds) {
    for (void (*kernel)() : {&DivergentLaneHasLeft, &DivergentLanesAtTwoShuffles,
                             &DivergentLaneOutsideItsMask, &DivergentLanesAtTwoBarriers}) {
      const Report report = RunWarp(kernel, {}, seed);
      EXPECT_TRUE(report.Has(FindingKind::kDivergence)) << report.ToString() << "seed " << seed;
    }
    const Report report = RunWarp(&DivergentHalfAtTheBarrier, {}, seed);
    EXPECT_TRUE(report.Has(FindingKind::kDeadlock)) << report.ToString() << "seed " << seed;
  }
}

TEST(Emu, DisjointMasksMeetApart) {
  std::vector<uint32_t> out(32);
  const auto kernel = [&] {
    const uint32_t mask = LaneId() < 16 ? 0x0000FFFFU : 0xFFFF0000U;
    const uint32_t sum = ShuffleXor(LaneId(), 15, mask) + ShuffleFrom(100, LaneId(), mask);
    StoreGlobal<uint32_t>(Global<uint32_t>{out.data()} + LaneId(), sum);
  };
  for (const uint64_t seed : kSeeds) {
    const Report report = RunWarp(kernel, out, seed);
    ASSERT_TRUE(report.ok()) << report.ToString();
    for (uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], 100 + (lane ^ 15U));
  }
}

TEST(Emu, OnlySyncWarpOrdersLanes) {
  const auto exchange = [](bool has_sync) {
    return [has_sync] {
      StoreShared<uint32_t>(4 * LaneId(), LaneId());
      if (has_sync) SyncWarp();
      ShuffleXor(0, 1);
      LoadShared<uint32_t>(4 * (LaneId() ^ 1U));
    };
  };
  for (const uint64_t seed : kSeeds) {
    EXPECT_TRUE(RunWarp(exchange(true), {}, seed).ok());
    EXPECT_TRUE(RunWarp(exchange(false), {}, seed).Has(FindingKind::kRace));
  }
}

TEST(Emu, CopiesArriveAtTheWait) {
  emu::DeviceBuffer<uint32_t> words(256);
  std::iota(words.begin(), words.end(), 7U);
  enum Mistake { kNone, kNoWait, kNoBarrier };
  const auto kernel = [&](Mistake mistake) {
    return [&, mistake] {
      const Global<const uint32_t> begin{words.data()};
      CopyAsync16(16 * LaneId(), begin.At<const Words4>(16 * LaneId()));
      CommitCopies();
      if (mistake != kNoWait) WaitCopies<0>();
      if (mistake != kNoBarrier) SyncThreads();
      const uint32_t value = LoadShared<uint32_t>(16 * (LaneId() ^ 1U));
      EXPECT_EQ(value, words[4 * (LaneId() ^ 1U)]);
    };
  };
  for (const uint64_t seed : kSeeds) {
    EXPECT_TRUE(RunWarp(kernel(kNone), words, seed).ok());
    EXPECT_TRUE(RunWarp(kernel(kNoWait), words, seed).Has(FindingKind::kAsyncMisuse));
    const Report report = RunWarp(kernel(kNoBarrier), words, seed);
    EXPECT_TRUE(report.Has(FindingKind::kRace) || report.Has(FindingKind::kAsyncMisuse) ||
                report.Has(FindingKind::kUninitialized))
        << report.ToString();
  }
}

// A ring of two stages: lane 0 copies, all lanes read, an mbarrier says when a stage is free.
struct PipelineMistakes {
  bool no_fence = false;
  bool no_full_wait = false;
  bool no_empty_wait = false;
  bool wrong_bytes = false;
};
void PipelineKernel(Global<const std::byte> in, PipelineMistakes mistakes) {
  constexpr uint32_t kStages = 2;
  constexpr uint32_t kTiles = 7;
  constexpr uint32_t kTileBytes = 128;
  constexpr SharedAddress kFull = 1024;
  constexpr SharedAddress kEmpty = 1024 + 8 * kStages;
  if (LaneId() == 0) {
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      MbarrierInit(kFull + 8 * stage, 1);
      MbarrierInit(kEmpty + 8 * stage, 32);
    }
    if (!mistakes.no_fence) FenceProxyAsync();
  }
  SyncWarp();
  const auto fill = [&](uint32_t tile) {
    const uint32_t stage = tile % kStages;
    if (tile >= kStages && !mistakes.no_empty_wait) {
      MbarrierWait(kEmpty + 8 * stage, (tile / kStages - 1) & 1U);
    }
    MbarrierArriveExpect(kFull + 8 * stage, kTileBytes - (mistakes.wrong_bytes ? 16 : 0));
    CopyBulk(stage * kTileBytes, in.At<const std::byte>(uint64_t{tile} * kTileBytes), kTileBytes,
             kFull + 8 * stage);
  };
  if (LaneId() == 0) {
    for (uint32_t tile = 0; tile < kStages; ++tile) fill(tile);
  }
  for (uint32_t tile = 0; tile < kTiles; ++tile) {
    const uint32_t stage = tile % kStages;
    if (!mistakes.no_full_wait) MbarrierWait(kFull + 8 * stage, tile / kStages & 1U);
    EXPECT_EQ(LoadShared<uint32_t>(stage * kTileBytes + 4 * LaneId()), tile * 32 + LaneId());
    MbarrierArrive(kEmpty + 8 * stage);
    if (LaneId() == 0 && tile + kStages < kTiles) fill(tile + kStages);
  }
}

Report RunPipeline(const PipelineMistakes& mistakes, uint64_t seed) {
  emu::DeviceBuffer<uint32_t> words(7 * 32);
  std::iota(words.begin(), words.end(), 0U);
  Memory memory;
  memory.AddInput(std::span<const uint32_t>(words));
  return Launch({.block = {32}, .shared_bytes = 2048, .seed = seed}, memory, PipelineKernel,
                Global<const std::byte>{reinterpret_cast<const std::byte*>(words.data())},
                mistakes);
}

TEST(Emu, BulkCopiesAndMbarriersMakeAPipeline) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Report report = RunPipeline({}, seed);
    EXPECT_TRUE(report.ok()) << report.ToString() << "seed " << seed;
    EXPECT_EQ(report.BankConflicts(), 0U);
    EXPECT_TRUE(RunPipeline({.no_fence = true}, seed).Has(FindingKind::kAsyncMisuse));
    const Report early = RunPipeline({.no_full_wait = true}, seed);
    EXPECT_TRUE(early.Has(FindingKind::kAsyncMisuse) || early.Has(FindingKind::kRace) ||
                early.Has(FindingKind::kUninitialized))
        << early.ToString();
    // Lanes that have not read yet find the next copy in flight; those that have, race with it.
    const Report late = RunPipeline({.no_empty_wait = true}, seed);
    EXPECT_TRUE(late.Has(FindingKind::kRace) || late.Has(FindingKind::kAsyncMisuse))
        << late.ToString() << "seed " << seed;
    EXPECT_FALSE(RunPipeline({.wrong_bytes = true}, seed).ok()) << seed;
  }
}

// The last block to finish reads what the others wrote.
void LastBlockKernel(Global<uint32_t> partials, Global<uint32_t> counter, Global<uint32_t> out,
                     bool synchronizes) {
  if (ThreadX() == 0) StoreGlobal<uint32_t>(partials + BlockX(), BlockX() + 1);
  SyncThreads();
  uint32_t before = 0;
  if (ThreadX() == 0) {
    if (synchronizes) {
      before = AddAcquireRelease(counter, 1);
    } else {
      AddCounter(counter, 1);
      before = BlockX();
    }
    StoreShared<uint32_t>(0, before);
  }
  SyncThreads();
  if (LoadShared<uint32_t>(0) + 1 != GridX() || ThreadX() != 7) return;
  uint32_t sum = 0;
  for (uint32_t i = 0; i < GridX(); ++i) {
    sum += LoadGlobal<uint32_t>({partials.address + i});
  }
  StoreGlobal<uint32_t>(out, sum);
}

TEST(Emu, AcquireReleaseAtomicsOrderBlocks) {
  for (const uint64_t seed : kSeeds) {
    for (const bool synchronizes : {true, false}) {
      std::vector<uint32_t> partials(5);
      std::vector<uint32_t> words(1);
      std::vector<uint32_t> out(1);
      Memory memory;
      memory.AddOutput(std::span(partials));
      memory.AddInOut(std::span(words));
      memory.AddOutput(std::span(out));
      const Report report =
          Launch({.grid = {5}, .block = {32}, .shared_bytes = 4, .seed = seed}, memory,
                 LastBlockKernel, Global<uint32_t>{partials.data()}, Global<uint32_t>{words.data()},
                 Global<uint32_t>{out.data()}, synchronizes);
      EXPECT_EQ(report.ok(), synchronizes) << report.ToString();
      EXPECT_EQ(out[0], report.ok() ? 15U : 0U);
    }
  }
}

TEST(Emu, CountsBankConflicts) {
  const auto wavefronts = [](uint32_t stride_bytes, uint32_t access_bytes) {
    const Report report = RunWarp([&] {
      const uint32_t address = stride_bytes * LaneId();
      if (access_bytes == 4) StoreShared<uint32_t>(address, 1U);
      if (access_bytes == 8) StoreShared<Words2>(address, Words2{});
      if (access_bytes == 16) StoreShared<Words4>(address, Words4{});
    });
    EXPECT_TRUE(report.ok()) << report.ToString();
    return report.sites.at(0).unit_count;
  };
  EXPECT_EQ(wavefronts(4, 4), 1U);
  EXPECT_EQ(wavefronts(8, 4), 2U);
  EXPECT_EQ(wavefronts(128, 4), 32U);
  EXPECT_EQ(wavefronts(132, 4), 1U);
  EXPECT_EQ(wavefronts(8, 8), 2U);
  EXPECT_EQ(wavefronts(16, 16), 4U);
  EXPECT_EQ(wavefronts(128, 16), 32U);
  // Same word, many lanes: one broadcast.
  const Report report = RunWarp([] {
    if (LaneId() == 0) StoreShared<uint32_t>(0, 1U);
    SyncWarp();
    LoadShared<uint32_t>(0);
  });
  EXPECT_EQ(report.BankConflicts(), 0U) << report.ToString();
}

TEST(Emu, CountsSectors) {
  emu::DeviceBuffer<uint32_t> words(1024);
  const Report report = RunWarp(
      [&] {
        LoadConstant<uint32_t>(
            Global<const uint32_t>{words.data()}.At<const uint32_t>(8 * LaneId()));
      },
      words);
  ASSERT_TRUE(report.ok()) << report.ToString();
  EXPECT_EQ(report.sites.at(0).request_count, 1U);
  EXPECT_EQ(report.sites.at(0).unit_count, 8U);
  EXPECT_EQ(report.sites.at(0).ideal_unit_count, 4U);
}

TEST(Emu, RefusesBlocksThatDoNotExist) {
  EXPECT_TRUE(emu::LaunchThreads({.block = {1025}}, {}, [] {}).Has(FindingKind::kBadLaunch));
  EXPECT_TRUE(emu::LaunchThreads({.block = {0}}, {}, [] {}).Has(FindingKind::kBadLaunch));
}

}  // namespace
}  // namespace kvtier::kernels::cuda
