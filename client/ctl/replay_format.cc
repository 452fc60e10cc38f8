// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/replay_format.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/ctl/table.h"

namespace kvtier::ctl {
namespace {

constexpr double kMedian = 0.50;
constexpr double kTail = 0.99;

Json RatesJson(const sim::SimHits& hits) {
  return {{"total", hits.HitRate()},
          {"hbm", hits.TierHitRate(sim::kHbm)},
          {"host", hits.TierHitRate(sim::kHost)},
          {"nvme", hits.TierHitRate(sim::kNvme)}};
}

Json LatenciesJson(const ReplayReport& report) {
  Json latencies = Json::object();
  for (size_t i = 0; i < report.latencies.size(); ++i) {
    const LatencyRecorder& latency = report.latencies[i];
    latencies[kReplayCallNames[i]] = {{"count", latency.count()},
                                      {"p50", latency.QuantileMicros(kMedian)},
                                      {"p99", latency.QuantileMicros(kTail)}};
  }
  return latencies;
}

Json EpochsJson(const ReplayReport& report) {
  Json epochs = Json::array();
  for (const auto& [epoch, counts] : report.epochs) {
    epochs.push_back({{"epoch", EpochText(epoch)},
                      {"requests", counts.request_count},
                      {"tokens", counts.token_count},
                      {"nvme_hit_tokens", counts.nvme_hit_token_count},
                      {"recovered_hit_tokens", counts.recovered_hit_token_count}});
  }
  return epochs;
}

std::string RatesText(const ReplayReport& report,
                      const std::optional<SimulationReport>& simulation) {
  std::vector<std::string> headers = {"TOKENS", "COUNT>", "HIT RATE>"};
  if (simulation) headers.push_back("SIMULATED>");
  TextTable table(headers);
  const auto add = [&](const char* name, uint64_t count, double rate, double simulated) {
    std::vector<std::string> cells = {name, HumanCount(count), HumanShare(rate)};
    if (simulation) cells.push_back(HumanShare(simulated));
    table.Add(cells);
  };
  const sim::SimHits& hits = report.hits;
  const sim::SimHits simulated = simulation ? simulation->hits : sim::SimHits();
  constexpr std::array<const char*, policy::kTierCount> kTiers = {"hit on hbm", "hit on host",
                                                                  "hit on nvme"};
  uint64_t hit_count = 0;
  for (policy::TierIdx tier = 0; tier < policy::kTierCount; ++tier) {
    hit_count += hits.tier_hit_token_count[tier];
    add(kTiers[tier], hits.tier_hit_token_count[tier], hits.TierHitRate(tier),
        simulated.TierHitRate(tier));
  }
  add("hit in all", hit_count, hits.HitRate(), simulated.HitRate());
  add("looked up", hits.token_count, 1.0, 1.0);
  std::string text = table.Print();
  if (simulation) {
    text += absl::StrFormat("simulation: %.2f points apart, %s the tolerance of %.2f\n",
                            100 * simulation->difference, simulation->within ? "within" : "BEYOND",
                            100 * simulation->tolerance);
  }
  return text;
}

std::string ChecksText(const ReplayReport& report) {
  TextTable table({"CHECKED", "COUNT>"});
  table.Add({"blocks compared bit for bit", HumanCount(report.verified_block_count)});
  table.Add({"blocks with wrong bytes", HumanCount(report.wrong_block_count)});
  table.Add({"decode steps against FP64", HumanCount(report.decode_check_count)});
  table.Add({"largest decode error", absl::StrFormat("%.2e", report.decode_error_max)});
  table.Add({"payload bytes copied by the client", HumanCount(report.client.copied_bytes)});
  table.Add({"blocks sealed and committed", HumanCount(report.committed_block_count)});
  table.Add({"blocks found but not delivered", HumanCount(report.undelivered_block_count)});
  table.Add({"blocks without room", HumanCount(report.hits.exhausted_block_count)});
  table.Add({"pauses", HumanCount(report.pause_count)});
  table.Add({"resumes", HumanCount(report.resume_count)});
  table.Add({"hbm freed by pauses", HumanBytes(report.pause_freed_bytes)});
  table.Add({"sessions opened again", HumanCount(report.client.reopen_count)});
  return table.Print();
}

std::string LinksText(const ReplayReport& report) {
  TextTable table({"LINK", "MOVED>", "BLOCKS>"});
  for (const LinkTraffic& link : report.links) {
    table.Add({TierText(link.source) + " -> " + TierText(link.target), HumanBytes(link.moved_bytes),
               HumanCount(link.moved_block_count)});
  }
  return table.Print();
}

std::string LatenciesText(const ReplayReport& report) {
  TextTable table({"CALL", "COUNT>", "P50 US>", "P99 US>"});
  for (size_t i = 0; i < report.latencies.size(); ++i) {
    const LatencyRecorder& latency = report.latencies[i];
    table.Add({kReplayCallNames[i], HumanCount(latency.count()),
               HumanCount(latency.QuantileMicros(kMedian)),
               HumanCount(latency.QuantileMicros(kTail))});
  }
  return table.Print();
}

std::string EpochsText(const ReplayReport& report) {
  if (report.epochs.size() < 2) return "";
  TextTable table({"EPOCH", "REQUESTS>", "TOKENS>", "HIT ON NVME>"});
  for (const auto& [epoch, counts] : report.epochs) {
    table.Add({EpochText(epoch), HumanCount(counts.request_count), HumanCount(counts.token_count),
               HumanCount(counts.nvme_hit_token_count)});
  }
  return "\n" + table.Print();
}

}  // namespace

Json ReplayJson(const ReplayReport& report, const std::optional<SimulationReport>& simulation) {
  const sim::SimHits& hits = report.hits;
  Json links = Json::array();
  for (const LinkTraffic& link : report.links) {
    links.push_back({{"source", TierText(link.source)},
                     {"target", TierText(link.target)},
                     {"moved_bytes", link.moved_bytes},
                     {"moved_block_count", link.moved_block_count}});
  }
  Json json = {{"request_count", hits.request_count},
               {"token_count", hits.token_count},
               {"token_hit_rate", RatesJson(hits)},
               {"verified_block_count", report.verified_block_count},
               {"wrong_block_count", report.wrong_block_count},
               {"committed_block_count", report.committed_block_count},
               {"undelivered_block_count", report.undelivered_block_count},
               {"exhausted_block_count", hits.exhausted_block_count},
               {"decode_check_count", report.decode_check_count},
               {"decode_error_max", report.decode_error_max},
               {"decode_error_tolerance", kDecodeTolerance},
               {"client_copied_bytes", report.client.copied_bytes},
               {"mapped_segment_count", report.client.mapped_segment_count},
               {"reopen_count", report.client.reopen_count},
               {"retry_count", report.retry_count},
               {"pause_count", report.pause_count},
               {"pause_freed_bytes", report.pause_freed_bytes},
               {"pause_resident_bytes", report.pause_resident_bytes},
               {"resume_count", report.resume_count},
               {"links", links},
               {"epochs", EpochsJson(report)},
               {"latency_us", LatenciesJson(report)},
               {"wall_seconds", report.wall_seconds}};
  if (simulation) {
    json["simulation"] = {{"token_hit_rate", RatesJson(simulation->hits)},
                          {"difference", simulation->difference},
                          {"tolerance", simulation->tolerance},
                          {"within", simulation->within}};
  }
  return json;
}

std::string ReplayText(const ReplayReport& report,
                       const std::optional<SimulationReport>& simulation) {
  return absl::StrFormat("%s requests in %.1f s\n\n", HumanCount(report.hits.request_count),
                         report.wall_seconds) +
         RatesText(report, simulation) + "\n" + ChecksText(report) + "\n" + LinksText(report) +
         "\n" + LatenciesText(report) + EpochsText(report);
}

}  // namespace kvtier::ctl
