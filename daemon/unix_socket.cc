// SPDX-License-Identifier: Apache-2.0
#include "daemon/unix_socket.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Ends the connections of this process whose own address `is_here`; not the listeners.
template <typename IsHere>
void ShutDownAcceptedAt(IsHere is_here) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage address{};
    socklen_t address_bytes = sizeof(address);
    // Not a socket, or closed meanwhile: passed over. One that is reused meanwhile is either no
    // socket of this address, or one to be ended too.
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &address_bytes) != 0) continue;
    if (!is_here(address)) continue;
    int is_listener = 0;
    socklen_t option_bytes = sizeof(is_listener);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listener, &option_bytes) != 0) continue;
    if (is_listener == 0) shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

UniqueFd::~UniqueFd() { Reset(); }

void UniqueFd::Reset() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

absl::Status CheckSocketPath(const std::string& path) {
  if (path.size() <= kSocketPathBytesMax) return absl::OkStatus();
  return Invalid("server.run_dir: the socket path %s has %d bytes, more than %d", path, path.size(),
                 kSocketPathBytesMax);
}

PrivateUmask::PrivateUmask() : previous_(umask(0077)) {}

PrivateUmask::~PrivateUmask() { umask(previous_); }

absl::StatusOr<UniqueFd> ListenSeqpacket(const std::string& path, mode_t mode) {
  KVT_RETURN_IF_ERROR(CheckSocketPath(path));
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, "unlink " + path);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  {
    const PrivateUmask umask_guard;
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return ErrnoStatus(errno, "bind " + path);
    }
  }
  if (chmod(path.c_str(), mode) != 0) return ErrnoStatus(errno, "chmod " + path);
  if (listen(fd.get(), SOMAXCONN) != 0) return ErrnoStatus(errno, "listen " + path);
  return fd;
}

absl::StatusOr<UniqueFd> ConnectSeqpacket(const std::string& path) {
  KVT_RETURN_IF_ERROR(CheckSocketPath(path));
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Unavailable("connect to %s: %s", path, strerrordesc_np(errno));
  }
  return fd;
}

void AttachFd(int fd, std::span<char, kFdControlBytes> control, msghdr* message) {
  message->msg_control = control.data();
  message->msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
}

absl::Status SendWithFd(int socket, std::span<const std::byte> message, std::optional<int> fd) {
  iovec payload{.iov_base = const_cast<std::byte*>(message.data()), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &payload;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, kFdControlBytes> control{};
  if (fd.has_value()) AttachFd(*fd, control, &header);
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(message.size())) {
    return Unavailable("send: %s", strerrordesc_np(errno));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> ReceiveWithFd(int socket, std::span<std::byte> message, UniqueFd* fd) {
  iovec payload{.iov_base = message.data(), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &payload;
  header.msg_iovlen = 1;
  // Room for one: the kernel closes the rest.
  alignas(cmsghdr) std::array<char, kFdControlBytes> control{};
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t got = -1;
  do {
    got = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return Unavailable("receive: %s", strerrordesc_np(errno));
  const cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    int passed = -1;
    std::memcpy(&passed, CMSG_DATA(rights), sizeof(passed));
    *fd = UniqueFd(passed);
  }
  return static_cast<size_t>(got);
}

void ShutDownAccepted(const std::string& path) {
  ShutDownAcceptedAt([&path](const sockaddr_storage& local) {
    const auto& address = reinterpret_cast<const sockaddr_un&>(local);
    return local.ss_family == AF_UNIX && address.sun_path == path;
  });
}

void ShutDownAcceptedTcp(uint16_t port) {
  ShutDownAcceptedAt([port](const sockaddr_storage& local) {
    if (local.ss_family == AF_INET) {
      return reinterpret_cast<const sockaddr_in&>(local).sin_port == htons(port);
    }
    return local.ss_family == AF_INET6 &&
           reinterpret_cast<const sockaddr_in6&>(local).sin6_port == htons(port);
  });
}

absl::StatusOr<uid_t> PeerUid(int fd) {
  ucred peer{};
  socklen_t peer_bytes = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) != 0) {
    return ErrnoStatus(errno, "SO_PEERCRED");
  }
  return peer.uid;
}

}  // namespace kvtier
