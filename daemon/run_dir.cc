// SPDX-License-Identifier: Apache-2.0
#include "daemon/run_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Who holds the lock, for people; empty when the file does not say.
std::string HolderOf(int fd) {
  std::array<char, 32> text{};
  const ssize_t got = pread(fd, text.data(), text.size() - 1, 0);
  std::string holder(text.data(), got > 0 ? static_cast<size_t>(got) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder;
}

absl::Status WritePid(int fd, const std::string& path) {
  const std::string pid = absl::StrFormat("%d\n", getpid());
  if (ftruncate(fd, 0) != 0 ||
      pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return ErrnoStatus(errno, "write " + path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status MakeDirectory(const std::string& path) {
  std::error_code error;
  const bool existed = std::filesystem::is_directory(path, error);
  if (existed) return absl::OkStatus();
  std::filesystem::create_directories(path, error);
  if (error) return ErrnoStatus(error.value(), "create directory " + path);
  if (chmod(path.c_str(), 0750) != 0) return ErrnoStatus(errno, "chmod " + path);
  return absl::OkStatus();
}

absl::StatusOr<RunDir> RunDir::Lock(const std::string& path) {
  // The longest of the names.
  KVT_RETURN_IF_ERROR(CheckSocketPath(path + "/kvtierd.sock"));
  KVT_RETURN_IF_ERROR(MakeDirectory(path));
  const std::string lock_path = path + "/kvtierd.lock";
  UniqueFd fd(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return ErrnoStatus(errno, "open " + lock_path);
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "lock " + lock_path);
    return FailedPrecondition("another kvtierd (pid %s) runs in %s", HolderOf(fd.get()), path);
  }
  KVT_RETURN_IF_ERROR(WritePid(fd.get(), lock_path));
  return RunDir(path, std::move(fd));
}

absl::Status RunDir::RemoveStaleSockets() const {
  for (const std::string& socket : {engine_socket(), handle_socket(), admin_socket()}) {
    if (unlink(socket.c_str()) != 0 && errno != ENOENT) {
      return ErrnoStatus(errno, "remove stale socket " + socket);
    }
  }
  return absl::OkStatus();
}

}  // namespace kvtier
