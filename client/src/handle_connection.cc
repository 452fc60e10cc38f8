// SPDX-License-Identifier: Apache-2.0
#include "client/src/handle_connection.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::client {
namespace {

// More than the protocol ever sends, so that surplus descriptors are seen, and closed.
constexpr size_t kDescriptorsMax = 4;

absl::StatusOr<UniqueFd> Connect(const std::string& socket_path, uint32_t timeout_ms) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof(address.sun_path)) {
    return Invalid("socket path %s has %d bytes; at most %d", socket_path, socket_path.size(),
                   sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, socket_path.data(), socket_path.size());

  UniqueFd socket_fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) return ErrnoStatus(errno, "socket for " + socket_path);
  const timeval timeout = {.tv_sec = timeout_ms / 1000,
                           .tv_usec = static_cast<suseconds_t>(timeout_ms % 1000) * 1000};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (::setsockopt(socket_fd.get(), SOL_SOCKET, option, &timeout, sizeof(timeout)) != 0) {
      return ErrnoStatus(errno, "timeout of " + socket_path);
    }
  }
  if (::connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
      0) {
    return ErrnoStatus(errno, "connect to " + socket_path);
  }
  return socket_fd;
}

absl::Status StatusOfReply(HandleStatus status) {
  switch (status) {
    case HandleStatus::kOk:
      return absl::OkStatus();
    case HandleStatus::kBadRequest:
      return Internal("the daemon found a handle request malformed");
    case HandleStatus::kForbidden:
      return PermissionDenied("no tenant of the daemon is configured for this process");
    case HandleStatus::kNoSegment:
      // Clients ask only for segments that a reply has just named.
      return Internal("the daemon does not give out a segment that it named");
    case HandleStatus::kVersionMismatch:
      return FailedPrecondition("the daemon speaks another version of the handle socket than %d",
                                kHandleWireVersion);
    case HandleStatus::kUnavailable:
      return WithReason(Unavailable("the daemon cannot give out the segment: it is out of "
                                    "descriptors (LimitNOFILE=), or the segment's device is lost"),
                        reason::kTierUnavailable);
    case HandleStatus::kLimitReached:
      return Exhausted("the daemon holds as many handle connections as it allows");
  }
  return Internal("the daemon sent unknown handle status %d", static_cast<uint32_t>(status));
}

// Takes ownership of every descriptor of a received message.
std::vector<UniqueFd> DescriptorsOf(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t fd_count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < fd_count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    if (valid()) ::close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

UniqueFd::~UniqueFd() {
  if (valid()) ::close(fd_);
}

int UniqueFd::Release() { return std::exchange(fd_, -1); }

absl::StatusOr<std::shared_ptr<HandleConnection>> HandleConnection::Open(
    const std::string& socket_path, uint32_t timeout_ms) {
  KVT_ASSIGN_OR_RETURN(UniqueFd socket_fd, Connect(socket_path, timeout_ms));
  std::shared_ptr<HandleConnection> connection(new HandleConnection(std::move(socket_fd)));
  KVT_RETURN_IF_ERROR(Annotate(connection->Hello(), socket_path));
  return connection;
}

absl::Status HandleConnection::Hello() {
  absl::MutexLock lock(&mutex_);
  HandleReply reply;
  KVT_ASSIGN_OR_RETURN(const SegmentHandle handle,
                       Exchange({.kind = HandleRequestKind::kHello}, reply));
  if (handle.fd.valid()) return Internal("the daemon answered hello with a descriptor");
  epoch_ = reply.epoch;
  token_.assign(reinterpret_cast<const char*>(reply.token), sizeof(reply.token));
  return absl::OkStatus();
}

absl::StatusOr<SegmentHandle> HandleConnection::GetSegment(const SegmentId& id) {
  absl::MutexLock lock(&mutex_);
  HandleReply reply;
  KVT_ASSIGN_OR_RETURN(SegmentHandle handle, Exchange({.kind = HandleRequestKind::kGetSegment,
                                                       .tier = id.tier,
                                                       .segment_idx = id.segment_idx,
                                                       .writable = id.writable ? 1U : 0U},
                                                      reply));
  if (!handle.fd.valid()) return Internal("the daemon sent a segment without a descriptor");
  if (reply.epoch != epoch_) return Internal("the daemon changed its epoch within a connection");
  return handle;
}

absl::StatusOr<UniqueFd> HandleConnection::GetBoard() {
  absl::MutexLock lock(&mutex_);
  HandleReply reply;
  KVT_ASSIGN_OR_RETURN(SegmentHandle handle,
                       Exchange({.kind = HandleRequestKind::kGetBoard}, reply));
  if (!handle.fd.valid()) return Internal("the daemon sent a ticket board without a descriptor");
  return std::move(handle.fd);
}

absl::StatusOr<SegmentHandle> HandleConnection::Exchange(const HandleRequest& request,
                                                         HandleReply& reply) {
  if (out_of_step_) return Unavailable("an earlier exchange on the handle socket failed");
  out_of_step_ = true;
  ssize_t sent;
  do {
    sent = ::send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  // A daemon that refuses a connection says why and closes it, without waiting for a request.
  if (sent < 0 && errno != EPIPE && errno != ECONNRESET) {
    return ErrnoStatus(errno, "send on the handle socket");
  }
  KVT_ASSIGN_OR_RETURN(UniqueFd fd, Receive(reply));
  out_of_step_ = false;
  KVT_RETURN_IF_ERROR(StatusOfReply(reply.status));
  SegmentHandle handle{.fd = std::move(fd), .segment_bytes = reply.segment_bytes};
  std::ranges::copy(reply.device_uuid, handle.device_uuid.begin());
  return handle;
}

absl::StatusOr<UniqueFd> HandleConnection::Receive(HandleReply& reply) {
  iovec buffer = {.iov_base = &reply, .iov_len = sizeof(reply)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kDescriptorsMax * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t received;
  bool reset = false;
  do {
    received = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    // The kernel tells once that the peer closed without reading, and then gives what it had sent.
  } while (received < 0 &&
           (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (received < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return DeadlineExceeded("no answer on the handle socket");
    }
    return ErrnoStatus(errno, "receive on the handle socket");
  }
  std::vector<UniqueFd> fds = DescriptorsOf(message);
  if (received == 0) return Unavailable("the daemon closed the handle socket");
  // Before the size, which other versions may have changed.
  if (received >= static_cast<ssize_t>(offsetof(HandleReply, version) + sizeof(reply.version)) &&
      reply.version != kHandleWireVersion) {
    return StatusOfReply(HandleStatus::kVersionMismatch);
  }
  if (received != sizeof(reply) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Internal("the daemon sent a handle reply %s than the %d bytes of this version",
                    received < static_cast<ssize_t>(sizeof(reply)) ? "shorter" : "longer",
                    sizeof(reply));
  }
  if (fds.size() > 1) return Internal("the daemon sent %d descriptors at once", fds.size());
  return fds.empty() ? UniqueFd() : std::move(fds.front());
}

}  // namespace kvtier::client
