// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"
#include "client/ctl/commands.h"

namespace kvtier::ctl {

struct WatchCommand {
  // 0: until the program is ended.
  double seconds = 0;
  // Ends where the snapshot does.
  bool snapshot_only = false;
};
// The blocks of the tenant that this user's processes are, event by event.
absl::Status RunWatch(const GlobalOptions& global, const WatchCommand& command);

}  // namespace kvtier::ctl
