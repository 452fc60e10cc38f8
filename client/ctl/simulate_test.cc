// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::ctl {
namespace {

using testing::HasSubstr;

// Eight contexts of eight requests, one after the other in time.
sim::Trace SomeTrace() {
  sim::TraceBuilder builder;
  std::vector<uint32_t> contexts;
  for (int i = 0; i < 8; ++i) contexts.push_back(builder.AddContext());
  for (uint64_t turn = 0; turn < 8; ++turn) {
    for (uint64_t i = 0; i < 8; ++i) {
      std::vector<uint64_t> ids = {1000 * i};
      for (uint64_t block = 0; block < 2 * turn; ++block) ids.push_back(1000 * i + 1 + block);
      builder.AddRequest(contexts[i], 100'000 * turn + 1000 * i, 10, 512 * ids.size(), ids);
    }
  }
  return std::move(builder).Build();
}

SimulateOptions OptionsOf(const char* sizes, const char* codecs) {
  SimulateOptions options;
  options.sizes = ParseCacheSizes(sizes).value();
  options.codecs = ParseCodecs(codecs).value();
  return options;
}

TEST(SimulateTest, ParsesSizes) {
  const auto sizes = ParseCacheSizes("2.5%,3GiB,17B");
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_DOUBLE_EQ((*sizes)[0].share, 0.025);
  EXPECT_EQ((*sizes)[1].bytes, uint64_t{3} << 30);
  EXPECT_EQ((*sizes)[2].bytes, 17U);
  for (const char* bad : {"", "5", "5 %", "-1%", "nan%", "1%,", "1e300GiB", "0%"}) {
    EXPECT_FALSE(ParseCacheSizes(bad).ok()) << bad;
  }
}

TEST(SimulateTest, ParsesCodecs) {
  EXPECT_EQ(ParseCodecs("bf16,nvfp4")->at(1).value_bits, 4.5);
  EXPECT_FALSE(ParseCodecs("fp16").ok());
}

TEST(SimulateTest, SmallerCodecsHoldMoreBlocksInTheSameBytes) {
  const std::vector<SimulateRow> rows =
      RunSimulations(SomeTrace(), OptionsOf("4GiB", "bf16,fp8,nvfp4"));
  ASSERT_EQ(rows.size(), 3 * sim::kCachePolicyCount);
  EXPECT_EQ(rows[0].capacity_blocks, 25U);
  EXPECT_EQ(rows[sim::kCachePolicyCount].capacity_blocks, 51U);
  EXPECT_EQ(rows[2 * sim::kCachePolicyCount].capacity_blocks, 91U);
  EXPECT_LT(rows[1].hit_rate, rows[2 * sim::kCachePolicyCount + 1].hit_rate);
}

TEST(SimulateTest, MinIsAtLeastWhatAnyPolicyHits) {
  const std::vector<SimulateRow> rows =
      RunSimulations(SomeTrace(), OptionsOf("10%,30%,100%", "bf16"));
  for (size_t i = 0; i < rows.size(); ++i) {
    const SimulateRow& min = rows[i / sim::kCachePolicyCount * sim::kCachePolicyCount + 6];
    ASSERT_EQ(min.policy, sim::CachePolicy::kMin);
    EXPECT_GE(min.hit_rate, rows[i].hit_rate);
  }
}

TEST(SimulateTest, FewerContextsAtOnceHitMore) {
  SimulateOptions options = OptionsOf("20%", "bf16");
  options.concurrency = {1, 8};
  const std::vector<SimulateRow> rows = RunSimulations(SomeTrace(), options);
  ASSERT_EQ(rows.size(), 2 * sim::kCachePolicyCount);
  EXPECT_GT(rows[1].hit_rate, rows[sim::kCachePolicyCount + 1].hit_rate);
}

TEST(SimulateTest, PrintsEveryRun) {
  const sim::Trace trace = SomeTrace();
  const std::vector<SimulateRow> rows = RunSimulations(trace, OptionsOf("10%,30%", "bf16"));
  EXPECT_EQ(SimulateJson(rows)["runs"].size(), rows.size());
  EXPECT_EQ(SimulateJson(rows)["runs"][1]["policy"], "LRU");
  EXPECT_THAT(SimulateText(rows), HasSubstr("S3-FIFO"));
  EXPECT_THAT(SimulateSvg(rows, trace), HasSubstr("hazard, bf16"));
}

}  // namespace
}  // namespace kvtier::ctl
