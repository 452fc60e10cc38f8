// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/workload.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "policy/sim/cache_sim.h"

namespace kvtier::ctl {
namespace {

double LruRate(const sim::Trace& trace, uint64_t capacity_blocks) {
  return sim::SimulateCache(trace, sim::CachePolicy::kLru,
                            {.capacity_blocks = capacity_blocks, .make_room_first = true})
      .HitRate();
}

TEST(WorkloadTest, EqualSeedsGiveEqualTraces) {
  const sim::Trace a = GenerateWorkload({.seed = 5});
  const sim::Trace b = GenerateWorkload({.seed = 5});
  const sim::Trace c = GenerateWorkload({.seed = 6});
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (size_t i = 0; i < a.requests.size(); ++i) {
    EXPECT_EQ(a.requests[i].arrival_ms, b.requests[i].arrival_ms);
    EXPECT_EQ(a.requests[i].chain, b.requests[i].chain);
  }
  EXPECT_NE(a.blocks.size(), c.blocks.size());
}

TEST(WorkloadTest, HasTheShapesOfAgents) {
  const sim::Trace trace = GenerateWorkload({});
  EXPECT_GT(trace.requests.size(), 200U);
  EXPECT_EQ(trace.block_tokens, 64U);
  EXPECT_TRUE(std::ranges::any_of(trace.contexts, [](const sim::TraceContext& context) {
    return context.parent_idx != sim::kNoContext;
  })) << "no sub-agent was forked";
  size_t pause_count = 0;
  for (const sim::TraceEvent& event : sim::ScheduleOf(trace, {})) {
    pause_count += event.kind == sim::TraceEventKind::kPause ? 1 : 0;
  }
  EXPECT_GT(pause_count, trace.requests.size() / 3);
  // As recorded agents: almost every token was seen before, if one could keep all.
  EXPECT_GT(LruRate(trace, trace.blocks.size()), 0.85);
  // And much of it is lost when one cannot.
  EXPECT_LT(LruRate(trace, trace.blocks.size() / 20), 0.6);
}

}  // namespace
}  // namespace kvtier::ctl
