// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/replay_command.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "client/ctl/workload.h"
#include "daemon/core/sim/replay.h"
#include "policy/sim/trace_file.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t RoundUpToPage(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

absl::StatusOr<sim::Trace> LoadTrace(const ReplayCommand& command) {
  if (!command.trace_path.empty()) {
    return sim::ReadTraceFile(command.trace_path, command.request_count_max);
  }
  sim::Trace trace =
      GenerateWorkload({.seed = command.seed, .session_count = command.generated_session_count});
  if (command.request_count_max > 0) trace.Truncate(command.request_count_max);
  return trace;
}

absl::StatusOr<SimulationReport> Simulate(const sim::Trace& trace, const ReplayOptions& options,
                                          const ReplayCommand& command,
                                          const v1::GetTiersResponse& tiers,
                                          const ReplayReport& measured) {
  if (measured.client.reopen_count > 0) {
    return FailedPrecondition(
        "--simulate: the daemon restarted meanwhile, which the simulation does not follow");
  }
  core::VirtualCoreOptions sizes =
      SimOptionsFor(tiers, static_cast<uint32_t>(kernels::BlockBytes(options.layout.shape)),
                    {.high = command.high_watermark, .low = command.low_watermark});
  KVT_ASSIGN_OR_RETURN(sizes.nvme_admission, policy::ParseAdmission(command.admission));
  KVT_ASSIGN_OR_RETURN(sizes.eviction, policy::ParseEviction(command.eviction));
  SimulationReport report;
  report.hits = core::SimulateReplay(trace, options.rules, sizes, measured.event_ms);
  report.tolerance = command.simulate_tolerance;
  report.difference = std::abs(report.hits.HitRate() - measured.hits.HitRate());
  for (policy::TierIdx tier = 0; tier < policy::kTierCount; ++tier) {
    report.difference = std::max(report.difference, std::abs(report.hits.TierHitRate(tier) -
                                                             measured.hits.TierHitRate(tier)));
  }
  report.within = report.difference <= report.tolerance;
  return report;
}

// What a run must have shown beside not having failed.
absl::Status Judge(const ReplayReport& report, const std::optional<SimulationReport>& simulation) {
  if (report.wrong_block_count > 0) return DataLoss("%d wrong blocks", report.wrong_block_count);
  if (report.client.copied_bytes > 0) {
    return Internal("the client copied %d payload bytes; replay leases and fills are in place",
                    report.client.copied_bytes);
  }
  if (simulation && !simulation->within) {
    return Internal(
        "the token hit rate of a tier or of all is %.2f points from the simulation's, more than "
        "%.2f",
        100 * simulation->difference, 100 * simulation->tolerance);
  }
  return absl::OkStatus();
}

absl::Status CheckEmpty(client::AdminClient* admin) {
  KVT_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, admin->GetStatus());
  if (status.block_count() == 0) return absl::OkStatus();
  return FailedPrecondition("--simulate begins with empty tiers, but the daemon holds %d blocks",
                            status.block_count());
}

}  // namespace

core::VirtualCoreOptions SimOptionsFor(const v1::GetTiersResponse& tiers, uint32_t block_bytes,
                                       const policy::Watermarks& marks) {
  core::VirtualCoreOptions options;
  options.block_bytes = block_bytes;
  const uint64_t slot_bytes = RoundUpToPage(block_bytes);
  options.tiers[sim::kHbm].footprint_bytes = slot_bytes;
  options.tiers[sim::kHost].footprint_bytes = slot_bytes;
  options.tiers[sim::kNvme].footprint_bytes = kPageBytes + slot_bytes;
  for (const v1::TierStats& tier : tiers.tiers()) {
    if (tier.tier() < v1::TIER_HBM || tier.tier() > v1::TIER_NVME) continue;
    core::VirtualTier& model = options.tiers[static_cast<size_t>(tier.tier() - v1::TIER_HBM)];
    model.capacity_bytes = tier.capacity_bytes();
    model.marks = marks;
    if (tier.block_count() > 0) {
      // Whole pages; a transfer under way may take room for a block that is not counted yet.
      const double pages = static_cast<double>(tier.used_bytes()) /
                           static_cast<double>(tier.block_count() * kPageBytes);
      model.footprint_bytes =
          std::max<uint64_t>(slot_bytes, kPageBytes * static_cast<uint64_t>(std::lround(pages)));
    }
  }
  return options;
}

ProgressLine::ProgressLine(bool enabled)
    : enabled_(enabled),
      terminal_(isatty(STDERR_FILENO) == 1),
      next_(std::chrono::steady_clock::now() + std::chrono::seconds(1)) {}

void ProgressLine::Update(uint64_t done, uint64_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (!enabled_ || now < next_) return;
  next_ = now + std::chrono::seconds(1);
  drawn_ = true;
  std::fprintf(stderr, "%s%llu of %llu requests%s", terminal_ ? "\r" : "",
               static_cast<unsigned long long>(done), static_cast<unsigned long long>(total),
               terminal_ ? "" : "\n");
}

void ProgressLine::Finish() {
  if (drawn_ && terminal_) std::fputs("\n", stderr);
  drawn_ = false;
}

absl::Status RunReplay(const GlobalOptions& global, const ReplayCommand& command) {
  if (!global.tcp.address.empty()) {
    return Invalid(
        "replay maps the daemon's memory: run it on the daemon's node, without --address");
  }
  ReplayOptions options;
  options.run_dir = global.run_dir;
  KVT_ASSIGN_OR_RETURN(options.layout, FindLayoutPreset(command.layout));
  KVT_ASSIGN_OR_RETURN(const sim::Trace trace, LoadTrace(command));
  options.rules.decode_every = command.decode_every;
  options.rules.schedule.resume_ahead_ms = command.resume_ahead_ms;
  options.rules.schedule.pauses = command.pauses;
  options.speed = command.speed;
  options.seed = command.seed;
  options.oracle_cache_bytes = command.oracle_cache_mib << 20;
  options.transfer_timeout_ms = global.timeout_ms();
  options.restart_timeout_ms = command.restart_timeout_ms;
  ProgressLine progress(command.progress);
  options.progress = [&progress](uint64_t done, uint64_t total) { progress.Update(done, total); };

  client::AdminClient admin(global.admin());
  if (command.simulate) KVT_RETURN_IF_ERROR(CheckEmpty(&admin));
  const ReplayOptions simulated = options;
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<Replayer> replayer,
                       Replayer::Create(&trace, &admin, std::move(options)));
  const absl::Status played = replayer->Play(sim::ScheduleOf(trace, simulated.rules.schedule));
  progress.Finish();
  const ReplayReport report = replayer->Report();
  std::optional<SimulationReport> simulation;
  absl::Status outcome = played;
  if (played.ok() && command.simulate) {
    KVT_ASSIGN_OR_RETURN(const v1::GetTiersResponse tiers, admin.GetTiers());
    auto result = Simulate(trace, simulated, command, tiers, report);
    if (result.ok()) simulation = *result;
    outcome = result.status();
  }
  const std::string text =
      global.json ? ReplayJson(report, simulation).dump(2) + "\n" : ReplayText(report, simulation);
  std::fputs(text.c_str(), stdout);
  if (!outcome.ok()) return outcome;
  return Judge(report, simulation);
}

}  // namespace kvtier::ctl
