// SPDX-License-Identifier: Apache-2.0
#include "policy/hazard_policy.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvtier::policy {
namespace {

constexpr TierIdx kHost = 1;
constexpr TierIdx kNvme = 2;

BlockUse UseAt(BlockRef block, uint64_t now_ms) {
  return {.block = block, .key = block + 1, .now_ms = now_ms};
}

TEST(HazardPolicyTest, HasNoVictimWithoutCandidates) {
  HazardPolicy policy({});
  EXPECT_EQ(policy.Victim(kHost, 0), std::nullopt);
  policy.Use(UseAt(7, 1000));
  EXPECT_EQ(policy.Victim(kHost, 0), std::nullopt);
  policy.Erase(kHost, 7);
  policy.Erase(kHost, 70'000);
}

TEST(HazardPolicyTest, UntaughtItIsLru) {
  HazardPolicy policy({});
  for (BlockRef block = 0; block < 200; ++block) {
    policy.Use(UseAt(block, 1000 + 100 * block));
    policy.Upsert(kHost, block, {});
  }
  for (BlockRef block = 0; block < 200; ++block) {
    ASSERT_EQ(policy.Victim(kHost, 0), block);
    policy.Erase(kHost, block);
    policy.Forget(block, block + 1);
  }
}

TEST(HazardPolicyTest, VictimStaysACandidateAndTheSame) {
  HazardPolicy policy({});
  for (BlockRef block = 0; block < 50; ++block) {
    policy.Use(UseAt(block, 10 * block));
    policy.Upsert(kHost, block, {});
    policy.Upsert(kNvme, block, {});
  }
  const std::optional<BlockRef> victim = policy.Victim(kHost, 0);
  EXPECT_EQ(policy.Victim(kHost, 0), victim);
  policy.Erase(kHost, *victim);
  EXPECT_NE(policy.Victim(kHost, 0), victim);
  EXPECT_EQ(policy.Victim(kNvme, 0), victim);
}

TEST(HazardPolicyTest, KeepsBlocksOfActiveContextsLongest) {
  HazardPolicy policy({});
  policy.Use(UseAt(1, 1000));
  policy.Use(UseAt(2, 9000));
  policy.Upsert(kHost, 1, {.in_active_context = true});
  policy.Upsert(kHost, 2, {});
  EXPECT_EQ(policy.Victim(kHost, 0), 2);
  policy.Erase(kHost, 2);
  EXPECT_EQ(policy.IdleVictim(kHost, 0), std::nullopt);
  EXPECT_EQ(policy.Victim(kHost, 0), 1);
  policy.Upsert(kHost, 1, {});
  EXPECT_EQ(policy.IdleVictim(kHost, 0), 1);
}

TEST(HazardPolicyTest, FinishedContextsGoFirst) {
  HazardPolicy policy({});
  policy.Use(UseAt(1, 1000));
  policy.Use(UseAt(2, 5000));
  for (const BlockRef block : {1U, 2U}) policy.Upsert(kHost, block, {});
  EXPECT_EQ(policy.Victim(kHost, 0), 1);
  policy.Expect(2, NextStep::kFinished, 6000, 0);
  EXPECT_EQ(policy.Victim(kHost, 0), 2);
}

TEST(HazardPolicyTest, KeepsWhatComesBackSoonestUntilThePromiseLapses) {
  HazardPolicy policy({});
  BlockUse soon = UseAt(1, 1000);
  soon.returns_in_ms = 10'000;
  BlockUse late = UseAt(2, 1500);
  late.returns_in_ms = 3'600'000;
  policy.Use(soon);
  policy.Use(late);
  for (const BlockRef block : {1U, 2U}) policy.Upsert(kHost, block, {});
  EXPECT_EQ(policy.Victim(kHost, 0), 2);
  // An hour later nobody came for block 1.
  policy.Use(UseAt(3, 3'500'000));
  EXPECT_EQ(policy.Victim(kHost, 0), 1);
}

TEST(HazardPolicyTest, AQueuedRequestSavesItsBlocks) {
  HazardPolicy policy({});
  policy.Use(UseAt(1, 1000));
  policy.Use(UseAt(2, 50'000));
  for (const BlockRef block : {1U, 2U}) policy.Upsert(kHost, block, {});
  policy.Expect(1, NextStep::kTool, 60'000, 500);
  EXPECT_EQ(policy.Victim(kHost, 0), 2);
}

TEST(HazardPolicyTest, AGuessTakesRoomOnlyFromWhatIsNeededLater) {
  HazardPolicy policy({});
  policy.Use(UseAt(1, 1000));
  policy.Expect(1, NextStep::kUnknown, 1000, 10'000);
  policy.Use(UseAt(2, 1000));
  policy.Expect(2, NextStep::kUnknown, 1000, 60'000);
  EXPECT_FALSE(policy.BeatsIdleVictim(kHost, 0, 2)) << "nothing may leave";
  policy.Upsert(kHost, 1, {});
  EXPECT_FALSE(policy.BeatsIdleVictim(kHost, 0, 2));
  policy.Upsert(kHost, 2, {});
  policy.Erase(kHost, 1);
  EXPECT_TRUE(policy.BeatsIdleVictim(kHost, 0, 1));
}

TEST(HazardPolicyTest, BlocksThatTheirChainCameBackWithoutGoFirst) {
  HazardPolicy policy({});
  BlockUse root = UseAt(1, 1000);
  BlockUse leaf = UseAt(2, 1000);
  leaf.parent = 1;
  root.returns_in_ms = leaf.returns_in_ms = 60'000;
  policy.Use(root);
  policy.Use(leaf);
  BlockUse other = UseAt(3, 1100);
  other.returns_in_ms = 70'000;
  policy.Use(other);
  for (const BlockRef block : {2U, 3U}) policy.Upsert(kHost, block, {});
  EXPECT_EQ(policy.Victim(kHost, 0), 3);
  root.now_ms = 30'000;
  policy.Use(root);
  EXPECT_EQ(policy.Victim(kHost, 0), 2);
}

// A block that left teaches when it comes back: what comes back every ten seconds outlives what
// never does, although it is older.
TEST(HazardPolicyTest, LearnsFromGhosts) {
  HazardPolicy policy({});
  BlockRef fresh = 1000;
  for (uint64_t now_ms = 0; now_ms < 4'000'000; now_ms += 10'000) {
    for (BlockRef block = 0; block < 10; ++block) policy.Use(UseAt(block, now_ms));
    for (BlockRef block = 0; block < 10; ++block) policy.Forget(block, block + 1);
    for (int i = 0; i < 20; ++i, ++fresh) {
      policy.Use(UseAt(fresh, now_ms));
      policy.Forget(fresh, fresh + 1);
    }
  }
  policy.Use(UseAt(0, 4'000'000));
  policy.Use(UseAt(++fresh, 4'006'000));
  policy.Upsert(kHost, 0, {});
  policy.Upsert(kHost, fresh, {});
  EXPECT_EQ(policy.Victim(kHost, 0), fresh);
}

TEST(HazardPolicyTest, StandsClocksThatJump) {
  HazardPolicy policy({});
  policy.Use(UseAt(1, 1000));
  policy.Use(UseAt(2, 2000));
  policy.Use(UseAt(3, UINT64_MAX - 5));
  policy.Use(UseAt(4, 500));
  policy.Use(UseAt(5, 1500));
  for (BlockRef block = 1; block <= 5; ++block) policy.Upsert(kHost, block, {});
  std::vector<BlockRef> order;
  while (const std::optional<BlockRef> victim = policy.Victim(kHost, 0)) {
    order.push_back(*victim);
    policy.Erase(kHost, *victim);
  }
  EXPECT_EQ(order, (std::vector<BlockRef>{1, 2, 3, 4, 5}));
}

// Random calls against plain sets of candidates.
class RandomCalls {
 public:
  explicit RandomCalls(uint32_t seed) : random_(seed) {}

  uint32_t Below(uint32_t bound) {
    return std::uniform_int_distribution<uint32_t>(0, bound - 1)(random_);
  }

  void Step(HazardPolicy* policy) {
    const BlockRef block = Below(300);
    const TierIdx tier = Below(kTierCount);
    now_ms_ += Below(3000);
    switch (Below(5)) {
      case 0:
        policy->Use({.block = block,
                     .parent = Below(2) == 0 ? kNoParent : Below(300),
                     .key = block + 1,
                     .now_ms = now_ms_,
                     .next = static_cast<NextStep>(Below(kNextStepCount)),
                     .returns_in_ms = Below(3) == 0 ? Below(100'000) : 0});
        break;
      case 1:
        policy->Expect(block, NextStep::kUser, now_ms_, Below(50'000));
        break;
      case 2: {
        const bool is_active = Below(4) == 0;
        policy->Upsert(tier, block, {.in_active_context = is_active});
        candidates[tier].insert(block);
        if (is_active) active.insert(block);
        if (!is_active) active.erase(block);
        break;
      }
      case 3:
        policy->Erase(tier, block);
        candidates[tier].erase(block);
        break;
      default:
        for (TierIdx i = 0; i < kTierCount; ++i) {
          policy->Erase(i, block);
          candidates[i].erase(block);
        }
        active.erase(block);
        policy->Forget(block, block + 1);
    }
  }

  std::array<std::set<BlockRef>, kTierCount> candidates;
  std::set<BlockRef> active;

 private:
  std::mt19937 random_;
  uint64_t now_ms_ = 0;
};

TEST(HazardPolicyTest, OnlyCandidatesLeaveAndTheSameCallsGiveTheSameVictims) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::printf("seed %u\n", seed);
  const HazardOptions options = {.ghost_count_max = 64, .model = {.cohort_count_max = 32}};
  HazardPolicy policy(options);
  HazardPolicy twin(options);
  RandomCalls calls(seed);
  RandomCalls twin_calls(seed);
  for (int step = 0; step < 10'000; ++step) {
    calls.Step(&policy);
    twin_calls.Step(&twin);
    const TierIdx tier = static_cast<TierIdx>(step) % kTierCount;
    const std::optional<BlockRef> victim = policy.Victim(tier, 0);
    const std::optional<BlockRef> idle = policy.IdleVictim(tier, 0);
    ASSERT_EQ(victim, twin.Victim(tier, 0)) << "step " << step;
    ASSERT_EQ(idle, twin.IdleVictim(tier, 0)) << "step " << step;
    ASSERT_EQ(victim.has_value(), !calls.candidates[tier].empty()) << "step " << step;
    if (victim) {
      ASSERT_TRUE(calls.candidates[tier].contains(*victim)) << "step " << step;
      ASSERT_TRUE(idle || calls.active.contains(*victim)) << "step " << step;
    }
    if (idle) {
      ASSERT_FALSE(calls.active.contains(*idle)) << "step " << step;
    }
  }
}

TEST(HazardPolicyTest, DamagedStateLeavesThePrior) {
  HazardPolicy policy({});
  EXPECT_FALSE(policy.Restore("not saved by anybody").ok());
  EXPECT_TRUE(policy.Restore(HazardPolicy({}).Save()).ok());
}

TEST(HazardPolicyTest, PoolsAreApart) {
  HazardPolicy policy({});
  for (const BlockRef block : {1, 2, 3}) {
    policy.Use({.block = block, .key = block, .now_ms = 1000 * block});
    policy.Upsert(kHost, block, {.pool = block % 2});
    policy.Upsert(kNvme, block, {.pool = block % 2});
  }
  EXPECT_EQ(policy.Victim(kHost, 0), 2);
  EXPECT_EQ(policy.Victim(kHost, 1), 1);
  EXPECT_EQ(policy.Victim(kHost, 2), std::nullopt);
  EXPECT_FALSE(policy.BeatsIdleVictim(kHost, 2, 1)) << "nothing may leave";
  EXPECT_TRUE(policy.BeatsIdleVictim(kHost, 1, 3));
  // It changes on all tiers.
  policy.Upsert(kHost, 1, {.pool = 0});
  EXPECT_EQ(policy.Victim(kHost, 0), 1);
  EXPECT_EQ(policy.Victim(kNvme, 0), 1);
  EXPECT_EQ(policy.Victim(kHost, 1), 3);
}

}  // namespace
}  // namespace kvtier::policy
