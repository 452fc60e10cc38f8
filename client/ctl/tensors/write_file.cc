// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/write_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

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

}  // namespace

absl::Status WriteFile(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  const std::string staging = absl::StrFormat("%s.%d.tmp", path, getpid());
  const int fd = open(staging.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return ErrnoStatus(errno, "write " + path);
  int error = 0;
  for (const auto& part : parts) {
    if (error == 0) error = WriteAll(fd, part);
  }
  if (error == 0 && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && rename(staging.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  unlink(staging.c_str());
  return ErrnoStatus(error, "write " + path);
}

}  // namespace kvtier::ctl
