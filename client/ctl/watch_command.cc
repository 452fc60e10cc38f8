// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/watch_command.h"

#include <algorithm>
#include <cstdio>

#include "client/ctl/watch_lines.h"
#include "client/include/kvtier/watch.h"
#include "proto/base/status_util.h"
#include "proto/base/timed_wait.h"

namespace kvtier::ctl {
namespace {

constexpr uint32_t kNextTimeoutMs = 500;

absl::Status Write(const std::string& lines) {
  if (std::fwrite(lines.data(), 1, lines.size(), stdout) == lines.size() &&
      std::fflush(stdout) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, "write to standard output");
}

}  // namespace

absl::Status RunWatch(const GlobalOptions& global, const WatchCommand& command) {
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<client::Client> client,
                       client::Client::Connect({.run_dir = global.run_dir,
                                                .client_name = "kvtierctl watch",
                                                .reconnect_timeout_ms = global.timeout_ms()}));
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<client::Watch> watch,
                       client::Watch::Start(client.get()));
  const MonotonicTime deadline = MonotonicDeadline(absl::Seconds(command.seconds));
  bool away = false;
  while (command.seconds == 0 || TimeUntil(deadline) > absl::ZeroDuration()) {
    const absl::StatusOr<client::WatchUpdate> update = watch->Next(kNextTimeoutMs);
    if (!update.ok()) {
      if (absl::IsDeadlineExceeded(update.status())) continue;
      if (!absl::IsUnavailable(update.status())) return update.status();
      if (!away) {
        std::fprintf(stderr, "kvtierctl: %s\n",
                     std::string(FromAbsl(update.status().message())).c_str());
      }
      away = true;
      continue;
    }
    away = false;
    KVT_RETURN_IF_ERROR(Write(WatchLines(*update, global.json)));
    if (command.snapshot_only && update->complete) break;
  }
  return absl::OkStatus();
}

}  // namespace kvtier::ctl
