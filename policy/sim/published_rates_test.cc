// SPDX-License-Identifier: Apache-2.0
//
// Whole recorded traces: what textbook rules reach on them is known, and what the daemon's policy
// must reach. Needs KVTIER_TRACES, a directory that holds them.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "policy/sim/cache_sim.h"
#include "policy/sim/trace_file.h"

namespace kvtier::sim {
namespace {

constexpr std::array<double, 6> kShares = {0.01, 0.02, 0.05, 0.10, 0.20, 0.50};
// Percent of tokens, by share of the trace's blocks.
using Rates = std::array<double, 6>;

struct Published {
  const char* trace;
  Rates fifo;
  Rates lru;
  Rates hazard;
  Rates min;
};
constexpr std::array<Published, 3> kPublished = {{
    {"conversation",
     {5.4, 8.1, 20.0, 28.4, 35.2, 37.0},
     {5.4, 8.1, 20.0, 28.4, 35.2, 37.0},
     {10.8, 15.2, 22.4, 29.8, 35.2, 37.0},
     {25.1, 32.0, 37.4, 37.4, 37.4, 37.4}},
    {"agents_4h",
     {9.0, 33.3, 79.4, 92.7, 95.0, 95.7},
     {9.1, 33.5, 79.6, 92.7, 95.0, 95.7},
     {23.9, 47.3, 80.4, 92.6, 95.0, 95.7},
     {45.5, 67.1, 89.1, 95.0, 95.8, 95.8}},
    {"agents_30m",
     {1.0, 2.5, 9.0, 34.2, 74.7, 92.3},
     {1.0, 2.5, 9.1, 34.7, 75.0, 92.4},
     {4.0, 12.1, 30.9, 52.9, 77.1, 92.2},
     {16.1, 26.7, 49.1, 70.5, 87.6, 93.3}},
}};

class PublishedRatesTest : public testing::TestWithParam<Published> {
 protected:
  void SetUp() override {
    const char* traces = std::getenv("KVTIER_TRACES");
    if (traces == nullptr) GTEST_SKIP() << "KVTIER_TRACES names no directory of traces";
    auto trace = ReadTraceFile(std::string(traces) + "/" + GetParam().trace + ".jsonl.xz");
    ASSERT_TRUE(trace.ok()) << trace.status();
    trace_ = *std::move(trace);
  }

  double PercentAt(size_t i, CachePolicy policy, bool make_room_first,
                   const std::vector<RequestHint>& hints = {}) const {
    const auto capacity =
        static_cast<uint64_t>(kShares[i] * static_cast<double>(trace_->blocks.size()));
    return 100 *
           SimulateCache(
               *trace_, policy,
               {.capacity_blocks = capacity, .make_room_first = make_room_first, .hints = hints})
               .HitRate();
  }

  std::optional<Trace> trace_;
};

TEST_P(PublishedRatesTest, TextbookRules) {
  for (size_t i = 0; i < kShares.size(); ++i) {
    SCOPED_TRACE(100 * kShares[i]);
    EXPECT_NEAR(PercentAt(i, CachePolicy::kFifo, true), GetParam().fifo[i], 0.1);
    EXPECT_NEAR(PercentAt(i, CachePolicy::kLru, true), GetParam().lru[i], 0.1);
    EXPECT_NEAR(PercentAt(i, CachePolicy::kMin, false), GetParam().min[i], 0.1);
  }
}

TEST_P(PublishedRatesTest, HazardReachesThePublishedRates) {
  const std::vector<RequestHint> hints = HintsOf(*trace_, {});
  for (size_t i = 0; i < kShares.size(); ++i) {
    SCOPED_TRACE(100 * kShares[i]);
    EXPECT_GE(PercentAt(i, CachePolicy::kHazard, true, hints), GetParam().hazard[i] - 0.35);
    EXPECT_GE(PercentAt(i, CachePolicy::kHazard, true), GetParam().lru[i] - 0.3);
    const double after = PercentAt(i, CachePolicy::kHazard, false, hints);
    EXPECT_GE(after, GetParam().hazard[i] - 0.3);
    EXPECT_GE(after, GetParam().lru[i] - 0.3);
  }
}

TEST_P(PublishedRatesTest, HintsCloseTheGap) {
  const std::vector<RequestHint> hints = HintsOf(*trace_, {.finished = true, .returns = true});
  for (size_t i = 0; i < 3; ++i) {
    const double lru = GetParam().lru[i];
    const double min = GetParam().min[i];
    const double closed = (PercentAt(i, CachePolicy::kHazard, false, hints) - lru) / (min - lru);
    EXPECT_GE(closed, 0.75) << "share of the gap from LRU to MIN at " << 100 * kShares[i] << " %";
  }
}

INSTANTIATE_TEST_SUITE_P(Traces, PublishedRatesTest, testing::ValuesIn(kPublished),
                         [](const auto& param) { return std::string(param.param.trace); });

}  // namespace
}  // namespace kvtier::sim
