// SPDX-License-Identifier: Apache-2.0
#include "tiers/faulty_tier.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "tiers/conformance_test.h"
#include "tiers/memory/memory_tier.h"

namespace kvtier {
namespace {

std::unique_ptr<FaultyTier> MakeTier() {
  auto inner = MemoryTier::Create({.capacity_bytes = 16 << 20, .segment_bytes = 2 << 20});
  EXPECT_TRUE(inner.ok()) << inner.status();
  return std::make_unique<FaultyTier>(std::move(inner).value());
}

INSTANTIATE_TEST_SUITE_P(Faulty, TierConformanceTest,
                         testing::Values(TierCase{
                             .name = "OverMemory",
                             .create = [](const std::string&) -> std::unique_ptr<Tier> {
                               return MakeTier();
                             }}),
                         CaseName);

TEST(FaultyTierTest, FailsAsScriptedAndThenWorks) {
  auto tier = MakeTier();
  const TestBlock block = MakeBlock(1, 5000);
  tier->FailReserves(1, absl::ResourceExhaustedError("full"));
  EXPECT_EQ(tier->Reserve(5000, 1).status().code(), absl::StatusCode::kResourceExhausted);
  const auto replica = tier->Reserve(5000, 1);
  ASSERT_TRUE(replica.ok());
  tier->FailWrites(1, absl::UnavailableError("EIO"));
  EXPECT_EQ(WriteAndWait(*tier, *replica, block.meta, block.payload.bytes()).code(),
            absl::StatusCode::kUnavailable);
  tier->CorruptWrites(1);
  EXPECT_EQ(WriteAndWait(*tier, *replica, block.meta, block.payload.bytes()).code(),
            absl::StatusCode::kDataLoss);
  ASSERT_EQ(WriteAndWait(*tier, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
  tier->FailReads(1, absl::UnavailableError("EIO"));
  EXPECT_EQ(ReadAndCompare(*tier, *replica, block).code(), absl::StatusCode::kUnavailable);
  tier->CorruptReads(1);
  EXPECT_EQ(ReadAndCompare(*tier, *replica, block).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ReadAndCompare(*tier, *replica, block), absl::OkStatus());
}

TEST(FaultyTierTest, HoldsCompletionsUntilReleased) {
  auto tier = MakeTier();
  const TestBlock block = MakeBlock(2, 5000);
  const auto replica = tier->Reserve(5000, 1);
  ASSERT_TRUE(replica.ok());
  tier->HoldCompletions();
  int done_count = 0;
  tier->Write(*replica, block.meta, block.payload.bytes(), [&](absl::Status) { ++done_count; });
  tier->FailWrites(1, absl::UnavailableError("EIO"));
  tier->Write(*replica, block.meta, block.payload.bytes(), [&](absl::Status) { ++done_count; });
  EXPECT_EQ(done_count, 0);
  EXPECT_EQ(tier->held_count(), 2u);
  EXPECT_TRUE(tier->ReleaseOne());
  EXPECT_EQ(done_count, 1);
  tier->ReleaseAll();
  EXPECT_EQ(done_count, 2);
  EXPECT_FALSE(tier->ReleaseOne());
}

TEST(FaultyTierTest, ReportsTheHealthItWasGiven) {
  auto tier = MakeTier();
  EXPECT_FALSE(tier->Health().degraded);
  tier->SetHealth({.degraded = true, .reason = "unplugged"});
  EXPECT_EQ(tier->Health().reason, "unplugged");
}

}  // namespace
}  // namespace kvtier
