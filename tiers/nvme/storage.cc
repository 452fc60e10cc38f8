// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/storage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "proto/base/status_util.h"

namespace kvtier::nvme {

absl::StatusOr<bool> Storage::MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), S_IRWXU) == 0) return true;
  if (errno == EEXIST) return false;
  return ErrnoStatus(errno, "mkdir " + path);
}

absl::StatusOr<int> Storage::Open(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
  if (fd < 0) return ErrnoStatus(errno, "open " + path);
  return fd;
}

absl::Status Storage::Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "rename " + from + " to " + to);
}

absl::Status Storage::Remove(const std::string& path) {
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return ErrnoStatus(errno, "unlink " + path);
}

absl::Status Storage::WriteAndSync(int fd, std::span<const std::byte> bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t put =
        pwrite(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return ErrnoStatus(put < 0 ? errno : EIO, "write a small file");
    done += static_cast<size_t>(put);
  }
  if (fdatasync(fd) != 0) return ErrnoStatus(errno, "sync a small file");
  return absl::OkStatus();
}

absl::Status Storage::SyncFolder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return ErrnoStatus(errno, "open " + path);
  const int result = fsync(fd);
  // File systems without folders to sync say EINVAL.
  const int error = result == 0 || errno == EINVAL ? 0 : errno;
  close(fd);
  if (error != 0) return ErrnoStatus(error, "sync " + path);
  return absl::OkStatus();
}

std::unique_ptr<IoEngine> Storage::WrapEngine(std::unique_ptr<IoEngine> engine) { return engine; }

Storage& Storage::Plain() {
  static Storage storage;
  return storage;
}

}  // namespace kvtier::nvme
