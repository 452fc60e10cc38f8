// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "policy/policy.h"

namespace kvtier::policy {
namespace {

constexpr Watermarks kMarks = {.high = 0.75, .low = 0.5};

TEST(BytesToDemote, AsksForNothingUpToTheHighMark) {
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 0, 0, false), 0);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 600, 0, false), 0);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 750, 0, false), 0);
}

TEST(BytesToDemote, GoesDownToTheLowMarkFromAboveTheHighOne) {
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 751, 0, false), 251);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 1000, 0, false), 500);
}

TEST(BytesToDemote, GoesOnBetweenTheMarksWhileDraining) {
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 700, 0, true), 200);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 500, 0, true), 0);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 400, 0, true), 0);
}

TEST(BytesToDemote, CountsWhatIsLeavingAsGone) {
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 800, 100, false), 200);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 800, 300, false), 0);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 800, 700, false), 0);
  EXPECT_EQ(BytesToDemote(kMarks, 1000, 800, 900, false), 0);
}

TEST(BytesToDemote, EqualMarksKeepTheTierJustBelowThem) {
  const Watermarks marks = {.high = 1.0, .low = 1.0};
  EXPECT_EQ(BytesToDemote(marks, 1000, 1000, 0, false), 0);
  EXPECT_EQ(BytesToDemote(marks, 1000, 1000, 0, true), 0);
}

TEST(BytesToDemote, HoldsForTiersOfManyTerabytes) {
  const uint64_t capacity_bytes = 64ULL << 40;
  EXPECT_EQ(BytesToDemote(kMarks, capacity_bytes, capacity_bytes, 0, false), capacity_bytes / 2);
}

}  // namespace
}  // namespace kvtier::policy
