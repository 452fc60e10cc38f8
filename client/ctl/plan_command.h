// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/status.h"
#include "client/ctl/plan.h"

namespace kvtier::ctl {

// What the command line says; sizes as text.
struct PlanCommand {
  PlanInput input;
  std::string model_config_path;
  std::string context_tokens = "128K";
  std::string total_tokens;
  std::string card;
  std::string runtime;
  std::string weights;
  std::string bandwidth;
  std::string host;
  std::string nvme;
};

void AddPlan(CLI::App* app, PlanCommand* command);
// Needs no daemon.
absl::Status RunPlan(const PlanCommand& command, bool json);

}  // namespace kvtier::ctl
