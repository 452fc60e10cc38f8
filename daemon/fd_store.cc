// SPDX-License-Identifier: Apache-2.0
#include "daemon/fd_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "daemon/supervisor.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr char kOurPrefix[] = "kvtier-";

int EnvironmentNumber(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

std::vector<KeptFd> SystemdFdStore::TakeStarted(int first_fd) {
  std::vector<KeptFd> started;
  // Set for somebody else, they are inherited by mistake.
  const bool for_us = EnvironmentNumber("LISTEN_PID") == getpid();
  const int count = for_us ? EnvironmentNumber("LISTEN_FDS") : 0;
  const char* const names = std::getenv("LISTEN_FDNAMES");
  std::istringstream rest(names == nullptr ? "" : names);
  for (int fd = first_fd; fd < first_fd + count; ++fd) {
    std::string name;
    std::getline(rest, name, ':');
    if (!name.starts_with(kOurPrefix) || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) continue;
    started.push_back({.name = std::move(name), .fd = fd});
  }
  for (const char* variable : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) unsetenv(variable);
  return started;
}

SystemdFdStore::~SystemdFdStore() {
  absl::MutexLock lock(&mutex_);
  for (const KeptFd& kept : started_) close(kept.fd);
}

absl::Status SystemdFdStore::Keep(const std::string& name, int fd) {
  return NotifySystemd("FDSTORE=1\nFDNAME=" + name, fd);
}

absl::Status SystemdFdStore::Forget(const std::string& name) {
  return NotifySystemd("FDSTOREREMOVE=1\nFDNAME=" + name);
}

absl::StatusOr<std::vector<KeptFd>> SystemdFdStore::TakeKept() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(started_, std::vector<KeptFd>());
}

}  // namespace kvtier
