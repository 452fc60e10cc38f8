// SPDX-License-Identifier: Apache-2.0
#include "policy/prefetch.h"

#include <gtest/gtest.h>

#include <array>

namespace kvtier::policy {
namespace {

constexpr ReadSpeeds kSpeeds = {0, 1000, 100};  // bytes per ms

TEST(PrefetchTest, TheEarliestDeadlineReadsFirst) {
  const std::array<PrefetchTask, 3> tasks = {{
      {.id = 1, .deadline_ms = 900, .pending_bytes = {0, 0, 10'000}},
      {.id = 2, .deadline_ms = 300, .pending_bytes = {0, 0, 20'000}},
      {.id = 3, .deadline_ms = 900, .pending_bytes = {0, 5000, 0}},
  }};
  const auto slots = PlanPrefetch(tasks, kSpeeds, 100);
  ASSERT_EQ(slots.size(), 3U);
  EXPECT_EQ(slots[0].id, 2U);
  EXPECT_EQ(slots[0].ready_ms, 300U);
  EXPECT_EQ(slots[1].id, 1U);
  EXPECT_EQ(slots[1].ready_ms, 400U);
  // Another link: it waits for nobody.
  EXPECT_EQ(slots[2].ready_ms, 105U);
  for (const PrefetchSlot& slot : slots) EXPECT_EQ(slot.start_ms, 100U);
}

TEST(PrefetchTest, AGuessBeginsInTimeForItselfAndForWhatFollows) {
  const std::array<PrefetchTask, 2> tasks = {{
      {.id = 1, .deadline_ms = 10'000, .is_guess = true, .pending_bytes = {0, 0, 50'000}},
      {.id = 2,
       .deadline_ms = 10'100,
       .is_guess = true,
       .early_ms = 100,
       .pending_bytes = {0, 0, 100'000}},
  }};
  const auto slots = PlanPrefetch(tasks, kSpeeds, 0);
  // The second reads from 9000 to 10000, the first before it: from 8500, and once more as long.
  EXPECT_EQ(slots[1].start_ms, 8000U);
  EXPECT_EQ(slots[0].start_ms, 8000U);
}

TEST(PrefetchTest, GuessesThatAreLateBeginNow) {
  const std::array<PrefetchTask, 1> tasks = {{{.id = 1,
                                               .deadline_ms = 50,
                                               .is_guess = true,
                                               .early_ms = 80,
                                               .pending_bytes = {0, 0, 100'000}}}};
  EXPECT_LE(PlanPrefetch(tasks, kSpeeds, 20)[0].start_ms, 20U);
}

TEST(PrefetchTest, AnUnknownSpeedMakesLaterEtasUnknown) {
  const std::array<PrefetchTask, 2> tasks = {{
      {.id = 1, .deadline_ms = 1, .pending_bytes = {0, 1000, 0}},
      {.id = 2, .deadline_ms = 2, .pending_bytes = {0, 0, 1000}},
  }};
  const auto slots = PlanPrefetch(tasks, {0, 1000, 0}, 0);
  EXPECT_TRUE(slots[0].eta_known);
  EXPECT_FALSE(slots[1].eta_known);
}

// A 70B model at 90 KiB a token from a drive of 3 GB/s: reading is 32.6 K tokens a second.
TEST(PrefetchTest, ReadingWinsBelowTheSpeedOfTheDrive) {
  constexpr double kDrive = 3e6;
  const LoadOrRecompute at_start = {
      .block_count = 1, .block_tokens = 512, .block_bytes = 512 * 90 * 1024};
  EXPECT_TRUE(ReadingIsFaster(at_start, kDrive, 30'000));
  EXPECT_FALSE(ReadingIsFaster(at_start, kDrive, 35'000));
  LoadOrRecompute deep = at_start;
  deep.first_position_tokens = 53'000;
  EXPECT_TRUE(ReadingIsFaster(deep, kDrive, 60'000));
  EXPECT_FALSE(ReadingIsFaster(deep, kDrive, 70'000));
  EXPECT_TRUE(ReadingIsFaster(at_start, 0, 1e9)) << "a speed that is not known";
  EXPECT_TRUE(ReadingIsFaster(at_start, kDrive, 0)) << "an engine that does not say";
}

TEST(PrefetchTest, BackgroundReadsLeaveRoomForDemandedOnes) {
  EXPECT_EQ(BackgroundTransfersMax(0, 1 << 20, 32), 16U) << "not measured";
  EXPECT_EQ(BackgroundTransfersMax(3e6, 4096, 32), 16U);
  EXPECT_EQ(BackgroundTransfersMax(3e6, 46 << 20, 32), 2U);
  EXPECT_EQ(BackgroundTransfersMax(3e6, 10'000'000, 32), 6U);
  EXPECT_EQ(BackgroundTransfersMax(3e6, 46 << 20, 1), 1U);
}

TEST(PrefetchTest, ClientsAreWaitedForHalfAsLongAgain) {
  EXPECT_EQ(HeldUntilMs(2000, 1000), 12'000U) << "ten seconds at least";
  EXPECT_EQ(HeldUntilMs(61'000, 1000), 91'000U);
  EXPECT_EQ(HeldUntilMs(500, 1000), 10'500U) << "a deadline in the past";
}

}  // namespace
}  // namespace kvtier::policy
