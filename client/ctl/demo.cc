// SPDX-License-Identifier: Apache-2.0
//
// `kvtierctl demo`: agents on a small daemon, a kill -9 in the middle, and everything checked.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "client/ctl/commands.h"
#include "client/ctl/daemon_process.h"
#include "client/ctl/format.h"
#include "client/ctl/replay_command.h"
#include "client/ctl/replay_format.h"
#include "client/ctl/table.h"
#include "client/ctl/workload.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr int kStartTimeoutMs = 20'000;
constexpr uint32_t kSessionCount = 64;
// Requests before the kill, of all.
constexpr double kFirstPart = 0.6;

// Small enough that hbm and host overflow into the next tier.
const std::vector<std::string> kTierSizes = {
    "--hbm.capacity_bytes=1 MiB",   "--hbm.segment_bytes=256 KiB",   "--host.capacity_bytes=2 MiB",
    "--host.segment_bytes=256 KiB", "--nvme.capacity_bytes=128 MiB", "--nvme.segment_bytes=4 MiB",
};

class Demo {
 public:
  Demo(const GlobalOptions& global, const DemoCommand& command)
      : json_(global.json),
        command_(command),
        run_dir_(command.dir + "/run"),
        trace_(GenerateWorkload({.seed = command.seed, .session_count = kSessionCount})),
        admin_({.run_dir = run_dir_, .timeout_ms = global.timeout_ms()}) {
    options_.run_dir = run_dir_;
    options_.layout = LayoutPresets()[0];
    options_.rules.decode_every = 8;
    options_.seed = command.seed;
    options_.transfer_timeout_ms = global.timeout_ms();
  }

  absl::Status Run() {
    std::error_code error;
    for (const std::string& dir : {command_.dir, run_dir_, DataDir()}) {
      std::filesystem::create_directories(dir, error);
      if (error) return Internal("create %s: %s", dir, error.message());
    }
    KVT_RETURN_IF_ERROR(StartDaemon());
    KVT_ASSIGN_OR_RETURN(replayer_, Replayer::Create(&trace_, &admin_, options_));
    const std::vector<sim::TraceEvent> events = sim::ScheduleOf(trace_, options_.rules.schedule);
    const size_t split = SplitAt(events);
    KVT_RETURN_IF_ERROR(PlayFirstPart(std::span(events).first(split)));
    KVT_RETURN_IF_ERROR(KillAndResume());
    Say("Playing the rest of the workload.");
    KVT_RETURN_IF_ERROR(replayer_->Play(std::span(events).subspan(split)));
    return Conclude();
  }

 private:
  std::string DataDir() const { return command_.dir + "/data"; }
  std::string LogPath() const { return command_.dir + "/kvtierd.log"; }

  void Say(const std::string& text) const {
    std::fprintf(json_ ? stderr : stdout, "%s\n", text.c_str());
    std::fflush(json_ ? stderr : stdout);
  }

  absl::Status StartDaemon() {
    std::vector<std::string> arguments = {command_.daemon_path, "--server.run_dir=" + run_dir_,
                                          "--server.data_dir=" + DataDir()};
    arguments.insert(arguments.end(), kTierSizes.begin(), kTierSizes.end());
    KVT_ASSIGN_OR_RETURN(daemon_, DaemonProcess::Start(arguments, LogPath(), kStartTimeoutMs));
    return absl::OkStatus();
  }

  // The first event after kFirstPart of the requests.
  size_t SplitAt(std::span<const sim::TraceEvent> events) const {
    const auto first_part =
        static_cast<size_t>(kFirstPart * static_cast<double>(trace_.requests.size()));
    size_t request_count = 0;
    size_t split = 0;
    while (split < events.size() && request_count < first_part) {
      if (events[split].kind == sim::TraceEventKind::kRequest) ++request_count;
      ++split;
    }
    return split;
  }

  absl::Status ShowTiersNow(const std::string& title) {
    KVT_ASSIGN_OR_RETURN(const v1::GetTiersResponse tiers, admin_.GetTiers());
    Say("\n" + title + "\n");
    Say(TiersText(tiers));
    return absl::OkStatus();
  }

  absl::Status PlayFirstPart(std::span<const sim::TraceEvent> events) {
    Say(absl::StrFormat("kvtierd runs as pid %d in %s", daemon_->pid(), command_.dir));
    Say(absl::StrFormat(
        "Workload: %d agents and sub-agents, %d requests over %s of virtual time; their KV is %s "
        "in "
        "%d blocks.",
        trace_.contexts.size(), trace_.requests.size(),
        HumanDuration(trace_.requests.back().arrival_ms),
        HumanBytes(trace_.blocks.size() * kernels::BlockBytes(options_.layout.shape)),
        trace_.blocks.size()));
    Say("Agents talk, pause for tools, and are resumed ahead of their next request.");
    KVT_RETURN_IF_ERROR(replayer_->Play(events));
    return ShowTiersNow("Tiers after the first part:");
  }

  absl::Status KillAndResume() {
    KVT_ASSIGN_OR_RETURN(const v1::FlushResponse flushed, admin_.Flush());
    Say(absl::StrFormat("Flushed %d blocks to nvme. Now: kill -9 %d", flushed.flushed_block_count(),
                        daemon_->pid()));
    daemon_->Kill();
    KVT_RETURN_IF_ERROR(StartDaemon());
    Say(absl::StrFormat("Restarted as pid %d. Resuming every open context:", daemon_->pid()));
    KVT_ASSIGN_OR_RETURN(resumed_, replayer_->ResumeAll());
    TextTable table({"RESUMED AFTER KILL -9", "COUNT>"});
    table.Add({"contexts", HumanCount(resumed_.context_count)});
    table.Add({"blocks of their chains", HumanCount(resumed_.block_count)});
    table.Add({"found on nvme", HumanCount(resumed_.tier_block_count[sim::kNvme])});
    table.Add(
        {"found in memory, brought back by another context",
         HumanCount(resumed_.tier_block_count[sim::kHbm] + resumed_.tier_block_count[sim::kHost])});
    table.Add({"missing", HumanCount(resumed_.missing_block_count)});
    table.Add({"read and compared bit for bit", HumanCount(resumed_.verified_block_count)});
    Say("\n" + table.Print());
    return absl::OkStatus();
  }

  absl::Status Conclude() {
    KVT_RETURN_IF_ERROR(ShowTiersNow("Tiers at the end:"));
    const ReplayReport report = replayer_->Report();
    KVT_RETURN_IF_ERROR(daemon_->Stop());
    if (json_) {
      Json json = ReplayJson(report, std::nullopt);
      json["resumed"] = {{"context_count", resumed_.context_count},
                         {"block_count", resumed_.block_count},
                         {"nvme_block_count", resumed_.tier_block_count[sim::kNvme]},
                         {"missing_block_count", resumed_.missing_block_count},
                         {"verified_block_count", resumed_.verified_block_count}};
      std::fputs((json.dump(2) + "\n").c_str(), stdout);
    } else {
      std::fputs(ReplayText(report, std::nullopt).c_str(), stdout);
    }
    return Judge(report);
  }

  absl::Status Judge(const ReplayReport& report) const {
    if (report.wrong_block_count > 0 || report.client.copied_bytes > 0) {
      return DataLoss("%d wrong blocks, %d bytes copied", report.wrong_block_count,
                      report.client.copied_bytes);
    }
    if (report.client.reopen_count == 0 || resumed_.context_count == 0) {
      return Internal("the restart went unnoticed");
    }
    if (resumed_.tier_block_count[sim::kNvme] == 0 || resumed_.missing_block_count > 0) {
      return Internal("after the restart %d blocks were on nvme and %d were missing",
                      resumed_.tier_block_count[sim::kNvme], resumed_.missing_block_count);
    }
    if (resumed_.verified_block_count < resumed_.block_count) {
      return Internal("after the restart only %d of %d blocks could be read",
                      resumed_.verified_block_count, resumed_.block_count);
    }
    if (report.decode_check_count == 0) return Internal("no decode step was checked");
    Say(absl::StrFormat("\nAll %s blocks were right, before and after the kill.\n",
                        HumanCount(report.verified_block_count)));
    if (!command_.hints) return absl::OkStatus();
    Say(
        absl::StrFormat("What to try next:\n"
                        "  %s --server.run_dir=%s --server.data_dir=%s &\n"
                        "  kvtierctl --run-dir %s status\n"
                        "  kvtierctl --run-dir %s tiers --json\n"
                        "  kvtierctl --run-dir %s replay --generate --progress",
                        command_.daemon_path, run_dir_, DataDir(), run_dir_, run_dir_, run_dir_));
    return absl::OkStatus();
  }

  const bool json_;
  const DemoCommand command_;
  const std::string run_dir_;
  const sim::Trace trace_;
  client::AdminClient admin_;
  ReplayOptions options_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Replayer> replayer_;
  ResumeReport resumed_;
};

}  // namespace

absl::Status RunDemo(const GlobalOptions& global, const DemoCommand& command) {
  return Demo(global, command).Run();
}

}  // namespace kvtier::ctl
