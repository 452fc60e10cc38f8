// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::ctl {

// A kvtierd started as a child of this process. Killed when the object is destroyed. Single-thread.
class DaemonProcess {
 public:
  // Starts `arguments` (the first one is the program) with standard error and output appended to
  // `log_path`, and returns once the daemon says that it serves. Errors: UNAVAILABLE when it cannot
  // be started or ends before, DEADLINE_EXCEEDED after `timeout_ms`.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(
      const std::vector<std::string>& arguments, const std::string& log_path, int timeout_ms);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  pid_t pid() const { return pid_; }
  // SIGKILL, and waits for the end.
  void Kill();
  // SIGTERM, and waits for the end. INTERNAL unless it exits with 0.
  absl::Status Stop();

 private:
  explicit DaemonProcess(pid_t pid) : pid_(pid) {}
  // The wait status.
  int Wait();

  pid_t pid_;  // -1 once it has ended
};

}  // namespace kvtier::ctl
