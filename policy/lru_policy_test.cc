// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include "policy/policy.h"

namespace kvtier::policy {
namespace {

constexpr TierIdx kHbm = 0;
constexpr TierIdx kHost = 1;

TEST(LruPolicy, HasNoVictimWithoutCandidates) {
  const auto policy = NewLruPolicy();
  EXPECT_EQ(policy->Victim(kHbm, 0), std::nullopt);
  EXPECT_EQ(policy->IdleVictim(kHbm, 0), std::nullopt);
}

TEST(LruPolicy, EvictsTheLeastRecentlyUsedBlock) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 20});
  policy->Upsert(kHbm, 2, {.last_use_seq = 10});
  EXPECT_EQ(policy->Victim(kHbm, 0), 2);
}

TEST(LruPolicy, VictimStaysACandidate) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 20});
  EXPECT_EQ(policy->Victim(kHbm, 0), 1);
  EXPECT_EQ(policy->Victim(kHbm, 0), 1);
}

TEST(LruPolicy, EvictsTheDeepestOfEquallyOldBlocks) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 5, .depth = 0});
  policy->Upsert(kHbm, 2, {.last_use_seq = 5, .depth = 7});
  policy->Upsert(kHbm, 3, {.last_use_seq = 5, .depth = 3});
  EXPECT_EQ(policy->Victim(kHbm, 0), 2);
}

TEST(LruPolicy, KeepsBlocksOfActiveContextsLongest) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 1, .in_active_context = true});
  policy->Upsert(kHbm, 2, {.last_use_seq = 99});
  EXPECT_EQ(policy->Victim(kHbm, 0), 2);
  policy->Erase(kHbm, 2);
  EXPECT_EQ(policy->IdleVictim(kHbm, 0), std::nullopt);
  EXPECT_EQ(policy->Victim(kHbm, 0), 1);
}

TEST(LruPolicy, UpsertChangesTheFactsOfACandidate) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 1});
  policy->Upsert(kHbm, 2, {.last_use_seq = 2});
  policy->Upsert(kHbm, 1, {.last_use_seq = 3});
  EXPECT_EQ(policy->Victim(kHbm, 0), 2);
  policy->Erase(kHbm, 2);
  policy->Erase(kHbm, 1);
  EXPECT_EQ(policy->Victim(kHbm, 0), std::nullopt);
}

TEST(LruPolicy, RanksEachTierOnItsOwn) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 1});
  policy->Upsert(kHost, 2, {.last_use_seq = 2});
  policy->Erase(kHost, 1);
  EXPECT_EQ(policy->Victim(kHbm, 0), 1);
  EXPECT_EQ(policy->Victim(kHost, 0), 2);
}

// The contract in its plainest form: candidates in a map, the victim by a full scan.
class NaivePolicy {
 public:
  void Upsert(TierIdx tier, BlockRef block, const BlockFacts& facts) {
    facts_[{tier, block}] = facts;
  }
  void Erase(TierIdx tier, BlockRef block) { facts_.erase({tier, block}); }

  std::optional<BlockRef> Victim(TierIdx tier, bool idle_only) const {
    std::optional<std::tuple<bool, uint64_t, int64_t, BlockRef>> least;
    for (const auto& [place, facts] : facts_) {
      if (place.first != tier || (idle_only && facts.in_active_context)) continue;
      const std::tuple rank(facts.in_active_context, facts.last_use_seq,
                            -static_cast<int64_t>(facts.depth), place.second);
      if (!least.has_value() || rank < *least) least = rank;
    }
    if (!least.has_value()) return std::nullopt;
    return std::get<3>(*least);
  }

 private:
  std::map<std::pair<TierIdx, BlockRef>, BlockFacts> facts_;
};

TEST(LruPolicy, AgreesWithAFullScanOnRandomCalls) {
  const uint32_t seed = std::random_device{}();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto below = [&random](uint32_t bound) {
    return std::uniform_int_distribution<uint32_t>(0, bound - 1)(random);
  };
  const auto policy = NewLruPolicy();
  NaivePolicy naive;
  for (int step = 0; step < 20'000; ++step) {
    const TierIdx tier = below(kTierCount);
    const BlockRef block = below(40);
    if (below(3) == 0) {
      policy->Erase(tier, block);
      naive.Erase(tier, block);
    } else {
      const BlockFacts facts = {
          .last_use_seq = below(8), .depth = below(5), .in_active_context = below(2) == 0};
      policy->Upsert(tier, block, facts);
      naive.Upsert(tier, block, facts);
    }
    ASSERT_EQ(policy->Victim(tier, 0), naive.Victim(tier, false)) << "step " << step;
    ASSERT_EQ(policy->IdleVictim(tier, 0), naive.Victim(tier, true)) << "step " << step;
  }
}

TEST(LruPolicyTest, PoolsAreApart) {
  const auto policy = NewLruPolicy();
  policy->Upsert(kHbm, 1, {.last_use_seq = 10, .pool = 0});
  policy->Upsert(kHbm, 2, {.last_use_seq = 20, .pool = 3});
  EXPECT_EQ(policy->Victim(kHbm, 0), 1);
  EXPECT_EQ(policy->Victim(kHbm, 3), 2);
  EXPECT_EQ(policy->Victim(kHbm, 1), std::nullopt);
  EXPECT_EQ(policy->IdleVictim(kHbm, 4), std::nullopt);
  policy->Upsert(kHbm, 1, {.last_use_seq = 10, .pool = 3});
  EXPECT_EQ(policy->Victim(kHbm, 0), std::nullopt);
  EXPECT_EQ(policy->Victim(kHbm, 3), 1);
  policy->Erase(kHbm, 1);
  EXPECT_EQ(policy->Victim(kHbm, 3), 2);
}

}  // namespace
}  // namespace kvtier::policy
