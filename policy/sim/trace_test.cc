// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace kvtier::sim {
namespace {

using testing::ElementsAre;

std::vector<TraceEventKind> KindsOf(const std::vector<TraceEvent>& events) {
  std::vector<TraceEventKind> kinds;
  for (const TraceEvent& event : events) kinds.push_back(event.kind);
  return kinds;
}

TEST(TraceBuilderTest, EqualIdsUnderEqualPrefixesAreOneBlock) {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 0, 0, std::vector<uint64_t>{7, 8});
  builder.AddRequest(context, 1, 0, 0, std::vector<uint64_t>{7, 8, 9});
  builder.AddRequest(context, 2, 0, 0, std::vector<uint64_t>{9, 8});
  const Trace trace = std::move(builder).Build();

  EXPECT_THAT(trace.requests[0].chain, ElementsAre(0, 1));
  EXPECT_THAT(trace.requests[1].chain, ElementsAre(0, 1, 2));
  EXPECT_THAT(trace.requests[2].chain, ElementsAre(3, 4));
  EXPECT_EQ(trace.blocks[2].parent, 1U);
  EXPECT_EQ(trace.blocks[2].depth, 2U);
  EXPECT_EQ(trace.blocks[3].parent, kNoBlock);
  EXPECT_EQ(trace.BlockReferenceCount(), 7U);
}

TEST(TraceBuilderTest, InfersTheTokensOfABlock) {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 0, 1'500, std::vector<uint64_t>{1, 2});
  builder.AddRequest(context, 1, 0, 0, std::vector<uint64_t>{1});
  builder.AddRequest(context, 2, 0, 700, std::vector<uint64_t>{1, 2});
  const Trace trace = std::move(builder).Build();
  EXPECT_EQ(trace.block_tokens, 512U);
  EXPECT_EQ(trace.requests[1].token_count, 512U);
  EXPECT_EQ(trace.TokensOfBlock(trace.requests[0], 1), 512U);
  EXPECT_EQ(trace.TokensOfBlock(trace.requests[2], 1), 188U);
}

TEST(TraceBuilderTest, RequestsAreSortedByArrival) {
  TraceBuilder builder;
  const uint32_t a = builder.AddContext();
  const uint32_t b = builder.AddContext();
  builder.AddRequest(a, 20, 0, 0, {});
  builder.AddRequest(b, 10, 0, 0, {});
  const Trace trace = std::move(builder).Build();
  EXPECT_EQ(trace.requests[0].context_idx, b);
}

TEST(ScheduleTest, PausesLongGapsAndResumesAhead) {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 100, 0, std::vector<uint64_t>{1});
  builder.AddRequest(context, 10'000, 0, 0, std::vector<uint64_t>{1});
  const std::vector<TraceEvent> events = ScheduleOf(std::move(builder).Build(), {});

  EXPECT_THAT(KindsOf(events),
              ElementsAre(TraceEventKind::kRequest, TraceEventKind::kPause, TraceEventKind::kResume,
                          TraceEventKind::kRequest, TraceEventKind::kClose));
  EXPECT_EQ(events[1].at_ms, 100U);
  EXPECT_EQ(events[1].next_request_in_ms, 9'900U);
  EXPECT_EQ(events[2].at_ms, 8'000U);
}

TEST(ScheduleTest, ResumesWithTheRequestWhenThereIsNoTimeBefore) {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 0, 0, {});
  builder.AddRequest(context, 1'500, 0, 0, {});
  const std::vector<TraceEvent> events = ScheduleOf(std::move(builder).Build(), {});
  ASSERT_EQ(events.size(), 5U);
  EXPECT_EQ(events[2].kind, TraceEventKind::kResume);
  EXPECT_EQ(events[2].at_ms, 1'500U);
}

TEST(ScheduleTest, ShortGapsAndOverlapsAreNotPaused) {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 5'000, 0, {});
  builder.AddRequest(context, 2'000, 0, 0, {});
  builder.AddRequest(context, 3'000, 0, 0, {});
  const std::vector<TraceEvent> events = ScheduleOf(std::move(builder).Build(), {});
  EXPECT_THAT(KindsOf(events), ElementsAre(TraceEventKind::kRequest, TraceEventKind::kRequest,
                                           TraceEventKind::kRequest, TraceEventKind::kClose));
}

TEST(ScheduleTest, PausesCanBeTurnedOff) {
  TraceBuilder builder;
  const uint32_t context = builder.AddContext();
  builder.AddRequest(context, 0, 0, 0, {});
  builder.AddRequest(context, 60'000, 0, 0, {});
  EXPECT_EQ(ScheduleOf(std::move(builder).Build(), {.pauses = false}).size(), 3U);
}

}  // namespace
}  // namespace kvtier::sim
