// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier {

// A descriptor that is closed when its owner ends. Move-only.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Reset();
  // The caller closes it from now on.
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Bytes of a path that fit into sockaddr_un with its terminator.
inline constexpr size_t kSocketPathBytesMax = 107;

// INVALID_ARGUMENT when the path does not fit.
absl::Status CheckSocketPath(const std::string& path);

// While it lives, files and sockets this process makes are the owner's alone. The umask belongs to
// the whole process: for start-up only.
class PrivateUmask {
 public:
  PrivateUmask();
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;
  ~PrivateUmask();

 private:
  mode_t previous_;
};

// A listening, non-blocking SEQPACKET socket at `path` with exactly `mode`. Takes the place of a
// stale socket: the caller holds the lock of the directory.
absl::StatusOr<UniqueFd> ListenSeqpacket(const std::string& path, mode_t mode);

// UNAVAILABLE when nobody listens there.
absl::StatusOr<UniqueFd> ConnectSeqpacket(const std::string& path);

inline constexpr size_t kFdControlBytes = CMSG_SPACE(sizeof(int));
// Makes `fd` part of the message. `control` is aligned as a cmsghdr and outlives the message.
void AttachFd(int fd, std::span<char, kFdControlBytes> control, msghdr* message);

// One message, and a copy of the descriptor if there is one. UNAVAILABLE when the peer is gone.
absl::Status SendWithFd(int socket, std::span<const std::byte> message, std::optional<int> fd);
// The bytes of one message; 0 when the peer is gone. Descriptors beyond the first are closed.
absl::StatusOr<size_t> ReceiveWithFd(int socket, std::span<std::byte> message, UniqueFd* fd);

// Ends every connection that this process accepted on the stream socket at `path`, whoever holds
// its descriptor. For stopping: gRPC waits for peers that take nothing.
void ShutDownAccepted(const std::string& path);
// The same for the TCP connections that were accepted at `port`.
void ShutDownAcceptedTcp(uint16_t port);

// Requires: `fd` is a connected unix socket.
absl::StatusOr<uid_t> PeerUid(int fd);

}  // namespace kvtier
