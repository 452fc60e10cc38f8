// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/ctl/commands.h"

namespace kvtier::ctl {

struct SimulateCommand {
  std::string trace_path;
  uint64_t request_count_max = 0;
  std::string sizes = "1%,2%,5%,10%,20%,50%";
  std::string codecs = "bf16";
  std::vector<uint32_t> concurrency;
  uint64_t token_bytes = 327'680;
  bool hints = false;
  bool make_room_first = false;
  // Not empty: sweeps sizes instead and draws them into this file.
  std::string what_if_path;
};
// Needs no daemon.
absl::Status RunSimulate(const GlobalOptions& global, const SimulateCommand& command);

}  // namespace kvtier::ctl
