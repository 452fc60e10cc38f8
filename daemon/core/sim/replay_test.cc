// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sim/replay.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace kvtier::core {
namespace {

using sim::kHbm;
using sim::kHost;
using sim::kNvme;
using sim::ReplayRules;
using sim::SimHits;
using sim::Trace;
using sim::TraceBuilder;

VirtualCoreOptions SizesOf(uint64_t hbm, uint64_t host, uint64_t nvme) {
  VirtualCoreOptions options;
  options.tiers[kHbm].capacity_bytes = hbm;
  options.tiers[kHost].capacity_bytes = host;
  options.tiers[kNvme].capacity_bytes = nvme;
  return options;
}

Trace TwoTurns() {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 100, 0, std::vector<uint64_t>{1, 2, 3});
  builder.AddRequest(context, 60'000, 100, 0, std::vector<uint64_t>{1, 2, 3, 4});
  return std::move(builder).Build();
}

TEST(ReplaySimTest, ResumedContextHitsHbm) {
  const SimHits hits = SimulateReplay(TwoTurns(), {}, SizesOf(10, 10, 10));
  EXPECT_EQ(hits.request_count, 2U);
  EXPECT_EQ(hits.tier_hit_token_count[kHbm], 3U);
  EXPECT_EQ(hits.token_count, 7U);
  EXPECT_DOUBLE_EQ(hits.HitRate(), 3.0 / 7.0);
}

TEST(ReplaySimTest, WithoutPausesNothingMoves) {
  const ReplayRules rules{.schedule = {.pauses = false}};
  const SimHits hits = SimulateReplay(TwoTurns(), rules, SizesOf(10, 0, 0));
  EXPECT_EQ(hits.tier_hit_token_count[kHbm], 3U);
}

TEST(ReplaySimTest, PausedBlocksHitHostWhenResumeFindsNoRoom) {
  TraceBuilder builder;
  const uint32_t a = builder.AddContext();
  const uint32_t b = builder.AddContext();
  builder.AddRequest(a, 0, 0, 0, std::vector<uint64_t>{1, 2, 3});
  builder.AddRequest(b, 10'000, 60'000, 0, std::vector<uint64_t>{7, 8, 9});
  builder.AddRequest(a, 60'000, 0, 0, std::vector<uint64_t>{1, 2, 3});
  ReplayRules rules;
  rules.decode_every = 0;
  const SimHits hits = SimulateReplay(std::move(builder).Build(), rules, SizesOf(4, 100, 0));
  EXPECT_EQ(hits.tier_hit_token_count[kHbm], 1U);
  EXPECT_EQ(hits.tier_hit_token_count[kHost], 2U);
}

TEST(ReplaySimTest, ForkSharesTheParentsPrefix) {
  TraceBuilder builder;
  const uint32_t parent = builder.AddContext();
  const uint32_t child = builder.AddContext(parent);
  builder.AddRequest(parent, 0, 0, 0, std::vector<uint64_t>{1, 2, 3});
  builder.AddRequest(child, 100, 0, 0, std::vector<uint64_t>{1, 2, 30});
  const SimHits hits = SimulateReplay(std::move(builder).Build(), {}, SizesOf(10, 10, 10));
  EXPECT_EQ(hits.tier_hit_token_count[kHbm], 2U);
}

}  // namespace
}  // namespace kvtier::core
