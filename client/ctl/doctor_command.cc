// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/doctor_command.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/ctl/doctor.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr const char* kDoctorFooter = R"(
Examples:
  kvtierctl doctor --config /etc/kvtier/kvtierd.toml --disk
  kvtierd --hbm.device=cuda --print-config | kvtierctl doctor --config -
  setpriv --reuid kvtier --regid kvtier --clear-groups kvtierctl doctor

Run it as the daemon's user and with its limits: directories, locked memory and control groups are
judged for whoever runs it.)";

absl::StatusOr<std::string> ReadConfig(const std::string& path) {
  std::ostringstream text;
  if (path == "-") {
    text << std::cin.rdbuf();
    return std::move(text).str();
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno, "open " + path);
  text << file.rdbuf();
  return std::move(text).str();
}

}  // namespace

void AddDoctor(CLI::App* app, DoctorCommand* command) {
  CLI::App* doctor = app->add_subcommand(
      "doctor", "Whether this node is fit for a daemon, and what to do; no daemon");
  doctor->footer(kDoctorFooter);
  doctor->add_option("--config", command->config_path,
                     "The daemon's configuration, - is standard input; default: its defaults");
  doctor->add_flag("--disk", command->measures_disk, "Measure the disk, with 256 MiB");
}

absl::Status RunDoctor(const DoctorCommand& command, bool json) {
  DoctorPlan plan;
  if (!command.config_path.empty()) {
    KVT_ASSIGN_OR_RETURN(const std::string text, ReadConfig(command.config_path));
    const absl::StatusOr<DoctorPlan> read = ReadDoctorPlan(text);
    if (!read.ok()) return Annotate(read.status(), command.config_path);
    plan = *read;
  }
  const std::vector<Finding> findings = Examine(plan, GatherFacts(plan, command.measures_disk));
  const std::string text = json ? DoctorJson(findings).dump(2) + "\n" : DoctorText(findings);
  std::fputs(text.c_str(), stdout);
  const auto problems = std::count_if(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.verdict == Verdict::kProblem;
  });
  if (problems == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("not fit: %d problem%s", problems, problems == 1 ? "" : "s"));
}

}  // namespace kvtier::ctl
