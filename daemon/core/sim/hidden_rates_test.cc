// SPDX-License-Identifier: Apache-2.0
//
// How much of the waits for nvme prefetch hides on recorded traces: the table of docs/policy.md.
// Needs KVTIER_TRACES, a directory that holds them. The first requests stand for all; with
// KVTIER_WHOLE_TRACES=1 the whole traces are run, which takes minutes, and what they hide is
// printed only.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "daemon/core/sim/stalls.h"
#include "policy/sim/trace_file.h"

namespace kvtier::core {
namespace {

struct Told {
  const char* name;
  Signal signal;
  uint64_t ahead_ms = 0;
  double return_error = 0;
};
constexpr std::array<Told, 5> kTold = {{
    {"at arrival", Signal::kAtArrival},
    {"1 s before", Signal::kAhead, 1000},
    {"5 s before", Signal::kAhead, 5000},
    {"10 s before", Signal::kAhead, 10'000},
    {"return within 25 %", Signal::kReturn, 0, 0.25},
}};

// Percent of the waits that are hidden at least, by what was told.
using Hidden = std::array<double, kTold.size()>;

struct Row {
  const char* name;
  const char* trace;
  double prefill_tokens_per_second;
  Hidden hidden_min;  // of the first requests
};

// KV of 90 KiB a token, 3 GB/s nvme, 25 GB/s PCIe; hbm 1 % and host 5 % of the trace's blocks.
StallOptions OptionsOf(const sim::Trace& trace, double prefill_tokens_per_second) {
  constexpr uint64_t kTokenBytes = 90 << 10;
  constexpr double kNvmeBytesPerMs = 3e6;
  constexpr double kPcieBytesPerMs = 25e6;
  constexpr std::array<double, kTierCount> kShares = {0.01, 0.05, 2};
  StallOptions options;
  options.prefill_tokens_per_second = prefill_tokens_per_second;
  options.store.eviction = policy::EvictionKind::kHazard;
  options.store.block_bytes = static_cast<uint32_t>(trace.block_tokens * kTokenBytes);
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    const auto blocks =
        static_cast<uint64_t>(kShares[tier] * static_cast<double>(trace.blocks.size()));
    options.store.tiers[tier] = {.capacity_bytes = blocks * options.store.block_bytes,
                                 .footprint_bytes = options.store.block_bytes,
                                 .marks = {.high = 0.95, .low = 0.9}};
  }
  options.store.tiers[2].marks = {.high = 1, .low = 1};
  auto& speeds = options.store.link_speeds;
  speeds[2][0] = speeds[2][1] = speeds[0][2] = speeds[1][2] = kNvmeBytesPerMs;
  speeds[0][1] = speeds[1][0] = kPcieBytesPerMs;
  return options;
}

class HiddenRatesTest : public testing::TestWithParam<Row> {
 protected:
  void SetUp() override {
    const char* traces = std::getenv("KVTIER_TRACES");
    if (traces == nullptr) GTEST_SKIP() << "KVTIER_TRACES names no directory of traces";
    auto trace = sim::ReadTraceFile(std::string(traces) + "/" + GetParam().trace + ".jsonl.xz");
    ASSERT_TRUE(trace.ok()) << trace.status();
    trace_ = *std::move(trace);
    is_whole_ = std::getenv("KVTIER_WHOLE_TRACES") != nullptr;
    // Not the blocks: the tiers are as large as for the whole.
    if (!is_whole_) trace_->Truncate(kFirstRequests);
  }

  static constexpr size_t kFirstRequests = 2500;
  std::optional<sim::Trace> trace_;
  bool is_whole_ = false;
};

TEST_P(HiddenRatesTest, PrefetchHidesWaitsAndDelaysNobody) {
  StallOptions options = OptionsOf(*trace_, GetParam().prefill_tokens_per_second);
  const StallReport without = SimulateStalls(*trace_, options);
  ASSERT_GT(without.stall_ms, 0);
  std::printf("%s: waits %.0f s, p99 %.0f ms, %.3f hit\n", GetParam().name, without.stall_ms / 1000,
              without.request_p99_ms, without.hit_rate);
  for (size_t i = 0; i < kTold.size(); ++i) {
    options.signal = kTold[i].signal;
    options.ahead_ms = kTold[i].ahead_ms;
    options.return_error = kTold[i].return_error;
    const StallReport with = SimulateStalls(*trace_, options);
    const double hidden = 100 * (1 - with.stall_ms / without.stall_ms);
    std::printf(
        "  %-18s hides %5.1f %%, p99 %.0f ms, %.2f times the reads\n", kTold[i].name, hidden,
        with.request_p99_ms,
        static_cast<double>(with.read_block_count) / static_cast<double>(without.read_block_count));
    if (!is_whole_) {
      EXPECT_GE(hidden, GetParam().hidden_min[i]) << kTold[i].name;
    }
    EXPECT_LE(with.request_p99_ms, 1.05 * without.request_p99_ms) << kTold[i].name;
    EXPECT_NEAR(with.hit_rate, without.hit_rate, 0.001);
  }
}

constexpr Row kRows[] = {
    {"Chat50K", "conversation", 50'000, {78, 97, 97, 97, 90}},
    {"Chat100K", "conversation", 100'000, {62, 92, 97, 97, 81}},
    {"Agents25K", "agents_4h", 25'000, {55, 59, 64, 53, 61}},
    {"Agents50K", "agents_4h", 50'000, {67, 75, 78, 77, 87}},
};

INSTANTIATE_TEST_SUITE_P(Traces, HiddenRatesTest, testing::ValuesIn(kRows),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace kvtier::core
