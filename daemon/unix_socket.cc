// SPDX-License-Identifier: Apache-2.0
#include "daemon/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "proto/base/status_util.h"

namespace kvtier {

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

void ShutDownAccepted(const std::string& path) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_un address{};
    socklen_t address_bytes = sizeof(address);
    // Not a socket, or closed meanwhile: passed over. One that is reused meanwhile is either no
    // socket of this path, or one to be ended too.
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &address_bytes) != 0) continue;
    if (address.sun_family != AF_UNIX || address.sun_path != path) continue;
    int is_listener = 0;
    socklen_t option_bytes = sizeof(is_listener);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listener, &option_bytes) != 0) continue;
    if (is_listener == 0) shutdown(fd, SHUT_RDWR);
  }
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
