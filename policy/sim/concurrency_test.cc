// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/concurrency.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace kvtier::sim {
namespace {

Trace ThreeContexts() {
  TraceBuilder builder;
  for (uint64_t i = 0; i < 3; ++i) {
    const uint32_t context = builder.AddContext();
    builder.AddRequest(context, 10 * i, 5, 0, std::vector<uint64_t>{i});
    builder.AddRequest(context, 1000 + 10 * i, 5, 0, std::vector<uint64_t>{i, 9});
  }
  return std::move(builder).Build();
}

TEST(ConcurrencyTest, OneAtATimeIsOneAfterTheOther) {
  const Trace moved = WithConcurrency(ThreeContexts(), 1);
  std::vector<std::pair<uint64_t, uint32_t>> order;
  for (const TraceRequest& request : moved.requests) {
    order.emplace_back(request.arrival_ms, request.context_idx);
  }
  EXPECT_EQ(order, (std::vector<std::pair<uint64_t, uint32_t>>{
                       {0, 0}, {1000, 0}, {1006, 1}, {2006, 1}, {2012, 2}, {3012, 2}}));
}

TEST(ConcurrencyTest, MorePlacesThanContextsStartThemTogether) {
  const Trace moved = WithConcurrency(ThreeContexts(), 9);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(moved.requests[i].arrival_ms, 0U);
  EXPECT_EQ(moved.requests.back().arrival_ms, 1000U);
}

}  // namespace
}  // namespace kvtier::sim
