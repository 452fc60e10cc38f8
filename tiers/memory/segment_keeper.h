// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier {

// A descriptor that outlived the process that made it.
struct KeptFd {
  std::string name;
  // The receiver closes it.
  int fd = -1;
};

// Keeps descriptors, and so the memory behind them, beyond the end of this process: systemd, or a
// process that does nothing else. Thread-safe; calls may block for as long as the keeper's socket
// does.
class SegmentKeeper {
 public:
  virtual ~SegmentKeeper() = default;

  // Names have letters, digits, '-' and '.', and at most 63 of them. A second descriptor of the
  // same name is kept besides the first. `fd` stays the caller's. Errors: UNAVAILABLE; the keeper
  // may or may not have it then.
  virtual absl::Status Keep(const std::string& name, int fd) = 0;
  // Closes the keeper's descriptors of that name; an unknown one is ignored. Errors: UNAVAILABLE.
  virtual absl::Status Forget(const std::string& name) = 0;
  // What earlier processes left, all of it; each is given out once. The keeper still has them.
  // Errors: UNAVAILABLE, and nothing was given out.
  virtual absl::StatusOr<std::vector<KeptFd>> TakeKept() = 0;
};

}  // namespace kvtier
