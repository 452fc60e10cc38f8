// SPDX-License-Identifier: Apache-2.0
#include "daemon/supervisor.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "daemon/unix_socket.h"
#include "proto/base/status_util.h"

namespace kvtier {

absl::Status NotifySystemd(const std::string& state, std::optional<int> passed_fd) {
  const char* const path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || *path == '\0') return absl::OkStatus();
  const size_t path_bytes = std::strlen(path);
  sockaddr_un address{};
  if (path_bytes >= sizeof(address.sun_path)) return Invalid("NOTIFY_SOCKET: path too long");
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, path_bytes);
  // An abstract address is written with '@' for its leading zero.
  if (path[0] == '@') address.sun_path[0] = '\0';
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  const auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path_bytes);
  iovec payload{.iov_base = const_cast<char*>(state.data()), .iov_len = state.size()};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = address_bytes;
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, kFdControlBytes> control{};
  if (passed_fd.has_value()) AttachFd(*passed_fd, control, &message);
  if (sendmsg(fd.get(), &message, MSG_NOSIGNAL) < 0) return ErrnoStatus(errno, "notify systemd");
  return absl::OkStatus();
}

std::optional<uint64_t> WatchdogMs() {
  const char* const microseconds = std::getenv("WATCHDOG_USEC");
  const char* const pid = std::getenv("WATCHDOG_PID");
  uint64_t value = 0;
  if (microseconds == nullptr || !absl::SimpleAtoi(microseconds, &value)) return std::nullopt;
  // Inherited from a parent that is watched itself.
  if (pid != nullptr && pid != std::to_string(getpid())) return std::nullopt;
  if (value < 1000) return std::nullopt;
  return value / 1000;
}

absl::Status NotifyReadyFd(int fd) {
  const UniqueFd owned(fd);
  const std::string line = "READY\n";
  if (write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return ErrnoStatus(errno, "--ready-fd");
  }
  return absl::OkStatus();
}

}  // namespace kvtier
