// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sim/stalls.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace kvtier::core {
namespace {

// One context comes back a minute later; others push it to nvme meanwhile.
sim::Trace ReturningContext() {
  sim::TraceBuilder builder;
  const auto chain = [](uint64_t first) {
    std::vector<uint64_t> ids;
    for (uint64_t i = 0; i < 20; ++i) ids.push_back(first + i);
    return ids;
  };
  const uint32_t returning = builder.AddContext();
  builder.AddRequest(returning, 1000, 0, 200, chain(1));
  for (uint64_t i = 1; i <= 6; ++i) {
    builder.AddRequest(builder.AddContext(), 1000 + 1000 * i, 0, 200, chain(1000 * i));
  }
  builder.AddRequest(returning, 61'000, 0, 200, chain(1));
  return std::move(builder).Build();
}

StallReport Simulate(Signal signal, uint64_t ahead_ms = 0, double return_error = 0) {
  StallOptions options;
  options.store.block_bytes = 1'000'000;
  const uint64_t block_counts[] = {30, 40, 1000};
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    options.store.tiers[tier] = {.capacity_bytes = block_counts[tier] * 1'000'000,
                                 .footprint_bytes = 1'000'000};
  }
  // A block in 10 ms from nvme.
  auto& speeds = options.store.link_speeds;
  speeds[2][0] = speeds[2][1] = speeds[0][2] = speeds[1][2] = 100'000;
  options.signal = signal;
  options.ahead_ms = ahead_ms;
  options.return_error = return_error;
  return SimulateStalls(ReturningContext(), options);
}

TEST(StallSimTest, WithoutASignalTheRequestWaitsForAllOfItsBlocks) {
  const StallReport report = Simulate(Signal::kNever);
  EXPECT_EQ(report.request_count, 8U);
  EXPECT_EQ(report.stall_count, 1U);
  EXPECT_NEAR(report.stall_ms, 200, 15);  // and for the room they need
  EXPECT_EQ(report.read_block_count, 20U);
}

TEST(StallSimTest, ASignalInTimeHidesTheRead) {
  const StallReport report = Simulate(Signal::kAhead, 1000);
  EXPECT_EQ(report.stall_ms, 0);
  EXPECT_EQ(report.read_block_count, 20U);
}

TEST(StallSimTest, ASignalThatIsLateHidesAPart) {
  const StallReport report = Simulate(Signal::kAhead, 100);
  EXPECT_NEAR(report.stall_ms, 100, 25);
}

TEST(StallSimTest, AnAnnouncedReturnHidesTheReadThoughItIsAQuarterOff) {
  EXPECT_EQ(Simulate(Signal::kReturn).stall_ms, 0);
  EXPECT_EQ(Simulate(Signal::kReturn, 0, 0.25).stall_ms, 0);
}

}  // namespace
}  // namespace kvtier::core
