// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/write_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "absl/strings/str_format.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// 0, or the errno.
int WriteAll(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return 0;
}

int WriteParts(int fd, std::span<const std::span<const std::byte>> parts) {
  int error = 0;
  for (const auto& part : parts) {
    if (error == 0) error = WriteAll(fd, part);
  }
  return error;
}

// Opens a new file beside `path` under a name that nothing has: what lies there, also a link, is
// somebody else's. -1 with errno.
int OpenStaging(const std::string& path, std::string* staging) {
  constexpr int kAttempts = 100;
  int fd = -1;
  for (int i = 0; fd < 0 && i < kAttempts; ++i) {
    *staging = absl::StrFormat("%s.%d.%d.tmp", path, getpid(), i);
    fd = open(staging->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno != EEXIST) break;
  }
  return fd;
}

int Replace(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  std::string staging;
  const int fd = OpenStaging(path, &staging);
  if (fd < 0) return errno;
  int error = WriteParts(fd, parts);
  if (error == 0 && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && rename(staging.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) unlink(staging.c_str());
  return error;
}

int WriteThrough(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return errno;
  int error = WriteParts(fd, parts);
  if (close(fd) != 0 && error == 0) error = errno;
  return error;
}

// Where the links of `path` lead; `path` if nothing is there yet.
std::string TargetOf(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> target(realpath(path.c_str(), nullptr), std::free);
  return target == nullptr ? path : target.get();
}

}  // namespace

absl::Status WriteFile(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  struct stat info{};
  const bool exists = stat(path.c_str(), &info) == 0;
  // Renaming over /dev/null or a pipe would put a file in its place.
  const bool is_stream = exists && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
  const int error = is_stream ? WriteThrough(path, parts) : Replace(TargetOf(path), parts);
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "write " + path);
}

}  // namespace kvtier::ctl
