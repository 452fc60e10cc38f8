// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/replay_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

namespace kvtier::ctl {
namespace {

using testing::HasSubstr;
using testing::Not;

ReplayReport Report() {
  ReplayReport report;
  report.hits.request_count = 3;
  report.hits.token_count = 1'000;
  report.hits.tier_hit_token_count = {100, 200, 400};
  report.verified_block_count = 12;
  report.committed_block_count = 5;
  report.decode_check_count = 1;
  report.decode_error_max = 0.0001;
  report.client.reopen_count = 1;
  report.links.push_back({.source = v1::TIER_HBM,
                          .target = v1::TIER_HOST,
                          .moved_bytes = 2'048,
                          .moved_block_count = 2});
  report.epochs = {{1,
                    {.request_count = 1,
                     .token_count = 300,
                     .nvme_hit_token_count = 0,
                     .recovered_hit_token_count = 0}},
                   {2,
                    {.request_count = 2,
                     .token_count = 700,
                     .nvme_hit_token_count = 400,
                     .recovered_hit_token_count = 500}}};
  for (int micros : {10, 20, 30}) {
    report.latencies[0].Record(std::chrono::microseconds(micros));
  }
  report.wall_seconds = 1.5;
  return report;
}

SimulationReport Simulation(bool within) {
  SimulationReport simulation;
  simulation.hits.token_count = 1'000;
  simulation.hits.tier_hit_token_count = {110, 190, 395};
  simulation.tolerance = 0.01;
  simulation.difference = 0.005;
  simulation.within = within;
  return simulation;
}

TEST(ReplayFormatTest, JsonSchema) {
  Json json = ReplayJson(Report(), Simulation(true));
  json["latency_us"] = {{"lookup", json["latency_us"]["lookup"]}};
  EXPECT_EQ(json.dump(),
            R"({"request_count":3,"token_count":1000,"token_hit_rate":{"total":0.7,"hbm":0.1,)"
            R"("host":0.2,"nvme":0.4},"verified_block_count":12,"wrong_block_count":0,)"
            R"("committed_block_count":5,"undelivered_block_count":0,"exhausted_block_count":0,)"
            R"("decode_check_count":1,"decode_error_max":0.0001,)"
            R"("decode_error_tolerance":0.001953125,"client_copied_bytes":0,)"
            R"("mapped_segment_count":0,"reopen_count":1,"retry_count":0,"pause_count":0,)"
            R"("pause_freed_bytes":0,"pause_resident_bytes":0,"resume_count":0,"links":[)"
            R"({"source":"hbm","target":"host","moved_bytes":2048,"moved_block_count":2}],)"
            R"("epochs":[{"epoch":"0000000000000001","requests":1,"tokens":300,)"
            R"("nvme_hit_tokens":0,"recovered_hit_tokens":0},{"epoch":"0000000000000002",)"
            R"("requests":2,"tokens":700,)"
            R"("nvme_hit_tokens":400,"recovered_hit_tokens":500}],)"
            R"("latency_us":{"lookup":{"count":3,"p50":20,"p99":20}},)"
            R"("wall_seconds":1.5,"simulation":{"token_hit_rate":{"total":0.695,"hbm":0.11,)"
            R"("host":0.19,"nvme":0.395},"difference":0.005,"tolerance":0.01,"within":true}})");
}

TEST(ReplayFormatTest, JsonWithoutSimulationHasNone) {
  EXPECT_FALSE(ReplayJson(Report(), std::nullopt).contains("simulation"));
}

TEST(ReplayFormatTest, TextShowsSimulationBesideTheMeasurement) {
  const std::string text = ReplayText(Report(), Simulation(false));
  EXPECT_THAT(text, HasSubstr("TOKENS       COUNT  HIT RATE  SIMULATED\n"
                              "hit on hbm     100   10.00 %    11.00 %\n"));
  EXPECT_THAT(text, HasSubstr("0.50 points apart, BEYOND the tolerance of 1.00"));
  EXPECT_THAT(text, HasSubstr("blocks with wrong bytes                    0\n"));
  EXPECT_THAT(text, HasSubstr("hbm -> host  2.0 KiB       2\n"));
  EXPECT_THAT(text, HasSubstr("lookup       3      20      20\n"));
  EXPECT_THAT(text, HasSubstr("0000000000000002         2     700          400\n"));
}

TEST(ReplayFormatTest, TextOfOneEpochHasNoEpochTable) {
  ReplayReport report = Report();
  report.epochs.resize(1);
  EXPECT_THAT(ReplayText(report, std::nullopt), Not(HasSubstr("EPOCH")));
}

}  // namespace
}  // namespace kvtier::ctl
