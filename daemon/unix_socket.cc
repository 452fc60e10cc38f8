// SPDX-License-Identifier: Apache-2.0
#include "daemon/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

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

absl::StatusOr<uid_t> PeerUid(int fd) {
  ucred peer{};
  socklen_t peer_bytes = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) != 0) {
    return ErrnoStatus(errno, "SO_PEERCRED");
  }
  return peer.uid;
}

}  // namespace kvtier
