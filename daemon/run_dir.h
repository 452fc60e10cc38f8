// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "daemon/unix_socket.h"

namespace kvtier {

// Makes the directory (mode 0750) and its parents; one that exists keeps its mode.
// Errors name the path.
absl::Status MakeDirectory(const std::string& path);

// The daemon's hold on its run directory: one process at a time. The kernel lets go of it when the
// process dies, so a lock is never stale.
class RunDir {
 public:
  // Errors: INVALID_ARGUMENT (a socket path would be too long), FAILED_PRECONDITION (another daemon
  // has it; nothing of its is touched), those of the file system.
  static absl::StatusOr<RunDir> Lock(const std::string& path);

  std::string engine_socket() const { return path_ + "/kvtierd.sock"; }
  std::string handle_socket() const { return path_ + "/handles.sock"; }
  std::string admin_socket() const { return path_ + "/admin.sock"; }

  // What a dead daemon left.
  absl::Status RemoveStaleSockets() const;

 private:
  RunDir(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  UniqueFd lock_;
};

}  // namespace kvtier
