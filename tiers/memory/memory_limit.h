// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace kvtier {

// The memory this process may use at all.
struct MemoryLimit {
  uint64_t bytes = 0;
  // What sets it, for messages: "memory of the machine" or the path of a cgroup file.
  std::string source;
};

// The least of physical memory and the limits of this process's control group (v1 or v2) and its
// ancestors. The roots are for tests. Blocks on small file reads. Errors: UNAVAILABLE when
// <proc_root>/meminfo cannot be read.
absl::StatusOr<MemoryLimit> ReadMemoryLimit(const std::string& proc_root = "/proc",
                                            const std::string& cgroup_root = "/sys/fs/cgroup");

}  // namespace kvtier
