// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/cache_sim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::sim {
namespace {

constexpr CachePolicy kAllPolicies[] = {
    CachePolicy::kFifo, CachePolicy::kLru,    CachePolicy::kLru2, CachePolicy::kS3Fifo,
    CachePolicy::kArc,  CachePolicy::kHazard, CachePolicy::kMin};

double Rate(const Trace& trace, CachePolicy policy, uint64_t capacity_blocks,
            bool make_room_first = false) {
  return SimulateCache(trace, policy,
                       {.capacity_blocks = capacity_blocks, .make_room_first = make_room_first})
      .HitRate();
}

// Builds a trace from chains of block ids, one request a second.
class Chains {
 public:
  void Add(const std::vector<uint64_t>& ids, uint64_t gap_ms = 1000) {
    builder_.AddRequest(builder_.AddContext(), now_ms_, 0, ids.size(), ids);
    now_ms_ += gap_ms;
  }
  void SetTime(uint64_t now_ms) { now_ms_ = now_ms; }
  Trace Build() && { return std::move(builder_).Build(); }

 private:
  TraceBuilder builder_;
  uint64_t now_ms_ = 0;
};

TEST(CacheSimTest, HitsArePrefixes) {
  Chains chains;
  chains.Add({1, 2, 3});
  chains.Add({1, 2, 9, 3});
  chains.Add({2, 3});
  const CacheHits hits =
      SimulateCache(std::move(chains).Build(), CachePolicy::kLru, {.capacity_blocks = 100});
  EXPECT_EQ(hits.token_count, 9U);
  EXPECT_EQ(hits.hit_token_count, 2U);
  EXPECT_EQ(hits.inserted_block_count, 7U);
}

TEST(CacheSimTest, BlocksThatFitAreKeptByEveryRule) {
  Chains chains;
  for (int round = 0; round < 5; ++round) {
    for (uint64_t chain = 0; chain < 4; ++chain) chains.Add({10 * chain, 10 * chain + 1});
  }
  const Trace trace = std::move(chains).Build();
  for (const CachePolicy policy : kAllPolicies) {
    for (const bool first : {false, true}) {
      EXPECT_DOUBLE_EQ(Rate(trace, policy, 8, first), 0.8) << CachePolicyName(policy);
    }
  }
}

TEST(CacheSimTest, ChainLongerThanTheCacheKeepsItsPrefix) {
  Chains chains;
  for (int round = 0; round < 4; ++round) chains.Add({1, 2, 3, 4, 5});
  const Trace trace = std::move(chains).Build();
  for (const CachePolicy policy : kAllPolicies) {
    for (const bool first : {false, true}) {
      EXPECT_DOUBLE_EQ(Rate(trace, policy, 2, first), 0.75 * 0.4) << CachePolicyName(policy);
    }
  }
}

// The most hits any choice of leaves to evict after each request can give, by trying them all.
uint64_t BestHits(const Trace& trace, size_t capacity, size_t request_idx,
                  const std::set<BlockRef>& held,
                  std::map<std::pair<size_t, std::set<BlockRef>>, uint64_t>* known) {
  if (request_idx == trace.requests.size()) return 0;
  const auto place = known->find({request_idx, held});
  if (place != known->end()) return place->second;
  const std::vector<BlockRef>& chain = trace.requests[request_idx].chain;
  uint64_t hit_count = 0;
  while (hit_count < chain.size() && held.contains(chain[hit_count])) ++hit_count;
  std::set<BlockRef> all = held;
  all.insert(chain.begin(), chain.end());
  uint64_t best = 0;
  std::set<std::set<BlockRef>> tried;
  const std::function<void(const std::set<BlockRef>&)> shrink = [&](const std::set<BlockRef>& now) {
    if (!tried.insert(now).second) return;
    if (now.size() <= capacity) {
      best = std::max(best, BestHits(trace, capacity, request_idx + 1, now, known));
      return;
    }
    for (const BlockRef block : now) {
      const bool leaf = std::ranges::none_of(
          now, [&](BlockRef other) { return trace.blocks[other].parent == block; });
      if (!leaf) continue;
      std::set<BlockRef> fewer = now;
      fewer.erase(block);
      shrink(fewer);
    }
  };
  shrink(all);
  (*known)[{request_idx, held}] = hit_count + best;
  return hit_count + best;
}

TEST(CacheSimTest, MinIsTheBestThereIs) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    TraceBuilder builder;
    for (int i = 0; i < 9; ++i) {
      std::vector<uint64_t> ids;
      for (uint32_t depth = 0; depth < 1 + random() % 3; ++depth) ids.push_back(random() % 2);
      builder.AddRequest(builder.AddContext(), static_cast<uint64_t>(1000 * i), 0, ids.size(), ids);
    }
    const Trace trace = std::move(builder).Build();
    const size_t capacity = 1 + random() % 4;
    std::map<std::pair<size_t, std::set<BlockRef>>, uint64_t> known;
    const uint64_t best = BestHits(trace, capacity, 0, {}, &known);
    const CacheHits min = SimulateCache(trace, CachePolicy::kMin, {.capacity_blocks = capacity});
    ASSERT_EQ(min.hit_token_count, best);
    for (const CachePolicy policy : kAllPolicies) {
      const CacheHits hits = SimulateCache(trace, policy, {.capacity_blocks = capacity});
      ASSERT_LE(hits.hit_token_count, best) << CachePolicyName(policy);
    }
  }
}

// Workloads made to mislead a policy that learns. It must not fall below 0.9 of LRU's hits.
class HostileTraceTest : public testing::Test {
 protected:
  // A chain of `length` blocks that starts with block `first`.
  static std::vector<uint64_t> ChainOf(uint64_t first, uint64_t length) {
    std::vector<uint64_t> ids;
    for (uint64_t i = 0; i < length; ++i) ids.push_back(first + i);
    return ids;
  }

  static void ExpectNearLru(Chains chains, uint64_t capacity_blocks) {
    const Trace trace = std::move(chains).Build();
    for (const bool first : {false, true}) {
      const double lru = Rate(trace, CachePolicy::kLru, capacity_blocks, first);
      const double hazard = Rate(trace, CachePolicy::kHazard, capacity_blocks, first);
      std::printf("LRU %.4f hazard %.4f\n", lru, hazard);
      EXPECT_GE(hazard, 0.9 * lru);
    }
  }
};

TEST_F(HostileTraceTest, Scan) {
  Chains chains;
  uint64_t fresh = 1'000'000;
  for (uint64_t i = 0; i < 4000; ++i) {
    chains.Add(ChainOf(100 * (i % 10), 10));
    if (i / 500 % 2 == 1) chains.Add(ChainOf(fresh += 20, 20));
  }
  ExpectNearLru(std::move(chains), 150);
}

TEST_F(HostileTraceTest, LoopJustOverCapacity) {
  Chains chains;
  for (uint64_t i = 0; i < 6000; ++i) chains.Add(ChainOf(100 * (i % 22), 5));
  ExpectNearLru(std::move(chains), 100);
}

TEST_F(HostileTraceTest, PhaseChange) {
  Chains chains;
  // What was dead becomes hot and what was hot dies, eight times over.
  uint64_t fresh = 1'000'000;
  for (uint64_t phase = 0; phase < 8; ++phase) {
    for (uint64_t i = 0; i < 1500; ++i) {
      if (phase % 2 == 0) {
        chains.Add(ChainOf(10'000 * phase + 100 * (i % 8), 8));
        chains.Add(ChainOf(fresh += 10, 6));
      } else {
        chains.Add(ChainOf(fresh += 10, 8));
        chains.Add(ChainOf(fresh, 8), 20'000);
      }
    }
  }
  ExpectNearLru(std::move(chains), 120);
}

TEST_F(HostileTraceTest, AllUnique) {
  Chains chains;
  for (uint64_t i = 0; i < 3000; ++i) chains.Add(ChainOf(10 * i, 8));
  const Trace trace = std::move(chains).Build();
  EXPECT_EQ(Rate(trace, CachePolicy::kHazard, 100), 0);
}

TEST_F(HostileTraceTest, SingleHotPrefix) {
  Chains chains;
  for (uint64_t i = 0; i < 4000; ++i) {
    std::vector<uint64_t> ids = ChainOf(0, 40);
    for (uint64_t j = 0; j < 10; ++j) ids.push_back(1000 + 10 * i + j);
    chains.Add(ids);
  }
  ExpectNearLru(std::move(chains), 60);
}

TEST_F(HostileTraceTest, ClockJumps) {
  Chains chains;
  std::mt19937 random(5);
  uint64_t now_ms = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    now_ms += random() % 2000;
    if (random() % 200 == 0) now_ms += uint64_t{1} << (random() % 45);
    chains.SetTime(now_ms);
    chains.Add(ChainOf(100 * (random() % (i % 3 == 0 ? 100 : 10)), 10));
  }
  ExpectNearLru(std::move(chains), 200);
}

}  // namespace
}  // namespace kvtier::sim
