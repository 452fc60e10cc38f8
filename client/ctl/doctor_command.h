// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/status.h"

namespace kvtier::ctl {

struct DoctorCommand {
  // "-": standard input; empty: kvtierd's defaults.
  std::string config_path;
  bool measures_disk = false;
};

void AddDoctor(CLI::App* app, DoctorCommand* command);
// Needs no daemon. FAILED_PRECONDITION when there is a problem; warnings are none.
absl::Status RunDoctor(const DoctorCommand& command, bool json);

}  // namespace kvtier::ctl
