// SPDX-License-Identifier: Apache-2.0
#include "daemon/policy_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "daemon/log.h"
#include "daemon/unix_socket.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// More than any policy saves.
constexpr size_t kBytesMax = 1 << 20;

absl::StatusOr<std::string> Read(const std::string& path) {
  // Whatever it is, opening it does not wait.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "open " + path);
  std::string bytes(kBytesMax, '\0');
  size_t got = 0;
  while (got < bytes.size()) {
    const ssize_t part = read(fd.get(), bytes.data() + got, bytes.size() - got);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return ErrnoStatus(errno, "read " + path);
    if (part == 0) break;
    got += static_cast<size_t>(part);
  }
  bytes.resize(got);
  return bytes;
}

absl::Status WriteAndSync(const std::string& path, std::string_view bytes) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC;
  const UniqueFd fd(open(path.c_str(), kFlags, 0600));
  if (fd.get() < 0) return ErrnoStatus(errno, "open " + path);
  while (!bytes.empty()) {
    const ssize_t written = write(fd.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus(errno, "write " + path);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  if (fsync(fd.get()) != 0) return ErrnoStatus(errno, "fsync " + path);
  return absl::OkStatus();
}

// A crash leaves the old file or the new one. That the new name is durable does not matter.
absl::Status Replace(const std::string& path, std::string_view bytes) {
  const std::string new_path = path + ".new";
  absl::Status status = WriteAndSync(new_path, bytes);
  if (status.ok() && rename(new_path.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus(errno, "rename " + new_path);
  }
  if (!status.ok()) unlink(new_path.c_str());
  return status;
}

}  // namespace

PolicyFile::PolicyFile(std::string path, Store* store, std::chrono::milliseconds interval)
    : path_(std::move(path)), store_(store) {
  Restore();
  thread_ = std::jthread([this, interval = absl::FromChrono(interval)] {
    ::pthread_setname_np(::pthread_self(), "kvtier-policy");
    while (!ending_.WaitFor(interval)) KeepAndSay();
  });
}

PolicyFile::~PolicyFile() {
  ending_.Notify();
  thread_.join();
  KeepAndSay();
}

void PolicyFile::Restore() {
  absl::StatusOr<std::string> bytes = Read(path_);
  if (absl::IsNotFound(bytes.status())) return;
  absl::Status restored = bytes.status();
  if (restored.ok()) {
    restored = store_->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
      return core.RestorePolicy(*bytes);
    });
  }
  if (!restored.ok()) {
    Log(LogLevel::kWarning, "what the eviction policy had learned is lost; it learns anew",
        {{"path", path_}, {"error", FromAbsl(restored.message())}});
    return;
  }
  absl::MutexLock lock(&mutex_);
  kept_ = *std::move(bytes);
}

absl::Status PolicyFile::Keep() {
  std::string learned = store_->Run(
      [](core::StoreCore& core, core::TimeMs, core::Effects*) { return core.SavePolicy(); });
  absl::MutexLock lock(&mutex_);
  if (learned.empty() || learned == kept_) return absl::OkStatus();
  KVT_RETURN_IF_ERROR(Replace(path_, learned));
  kept_ = std::move(learned);
  return absl::OkStatus();
}

void PolicyFile::KeepAndSay() {
  const absl::Status kept = Keep();
  absl::MutexLock lock(&mutex_);
  if (!kept.ok() && !failed_) {
    Log(LogLevel::kWarning, "what the eviction policy learns is not kept for the next start",
        {{"error", FromAbsl(kept.message())}});
  }
  failed_ = !kept.ok();
}

}  // namespace kvtier
