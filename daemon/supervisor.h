// SPDX-License-Identifier: Apache-2.0
//
// Telling whoever started the daemon how it is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace kvtier {

// Sends `state` ("READY=1") to systemd's socket, if NOTIFY_SOCKET names one, and a copy of the
// descriptor, if there is one.
absl::Status NotifySystemd(const std::string& state, std::optional<int> fd = std::nullopt);

// Within how many milliseconds systemd wants to hear WATCHDOG=1 each time (WatchdogSec=); empty: it
// does not, or not from this process.
std::optional<uint64_t> WatchdogMs();

// Writes "READY\n" to the descriptor and closes it.
absl::Status NotifyReadyFd(int fd);

}  // namespace kvtier
