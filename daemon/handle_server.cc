// SPDX-License-Identifier: Apache-2.0
#include "daemon/handle_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "daemon/audit.h"
#include "daemon/log.h"
#include "daemon/monotonic.h"
#include "daemon/random_bytes.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// epoll data of the two descriptors that are no connections.
constexpr uint64_t kListenerId = 0;
constexpr uint64_t kStopId = 1;
constexpr uint64_t kFirstConnectionId = 2;

absl::Status Watch(int epoll, int fd, uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) return ErrnoStatus(errno, "epoll_ctl");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<HandleServer>> HandleServer::Start(const Options& options,
                                                                  const TenantTable* tenants,
                                                                  Callbacks callbacks) {
  KVT_ASSIGN_OR_RETURN(UniqueFd listener,
                       ListenSeqpacket(options.socket_path, options.socket_mode));
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus(errno, "epoll_create1");
  UniqueFd stop_event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_event.valid()) return ErrnoStatus(errno, "eventfd");
  KVT_RETURN_IF_ERROR(Watch(epoll.get(), listener.get(), kListenerId));
  KVT_RETURN_IF_ERROR(Watch(epoll.get(), stop_event.get(), kStopId));
  std::unique_ptr<HandleServer> server(new HandleServer(options, tenants, std::move(callbacks),
                                                        std::move(listener), std::move(epoll),
                                                        std::move(stop_event)));
  server->thread_ = std::jthread([raw = server.get()] {
    pthread_setname_np(pthread_self(), "kvtier-handles");
    raw->Serve();
  });
  return server;
}

HandleServer::HandleServer(const Options& options, const TenantTable* tenants, Callbacks callbacks,
                           UniqueFd listener, UniqueFd epoll, UniqueFd stop_event)
    : options_(options),
      tenants_(tenants),
      callbacks_(std::move(callbacks)),
      listener_(std::move(listener)),
      epoll_(std::move(epoll)),
      stop_event_(std::move(stop_event)),
      spare_(open("/dev/null", O_RDONLY | O_CLOEXEC)),
      next_id_(kFirstConnectionId) {}

HandleServer::~HandleServer() {
  const uint64_t one = 1;
  KVT_CHECK(write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
}

std::optional<HandleServer::Claim> HandleServer::ClaimToken(std::string_view token) {
  Token wanted;
  if (token.size() != wanted.size()) return std::nullopt;
  std::memcpy(wanted.data(), token.data(), wanted.size());
  const uint64_t now_ms = MonotonicMs();
  absl::MutexLock lock(&mutex_);
  const auto found = connection_of_token_.find(wanted);
  if (found == connection_of_token_.end()) return std::nullopt;
  const ConnectionId id = found->second;
  connection_of_token_.erase(found);
  Connection& connection = connections_.at(id);
  connection.token.reset();
  if (now_ms >= connection.token_expires_ms) return std::nullopt;
  connection.claimed = true;
  return Claim{.connection = id, .owner = connection.owner};
}

bool HandleServer::Bind(ConnectionId id, SessionId session, std::shared_ptr<TicketBoard> board) {
  absl::MutexLock lock(&mutex_);
  const auto found = connections_.find(id);
  if (found == connections_.end()) return false;
  found->second.session = session;
  found->second.board = std::move(board);
  return true;
}

size_t HandleServer::connection_count() const {
  absl::MutexLock lock(&mutex_);
  return connections_.size();
}

void HandleServer::Serve() {
  std::vector<epoll_event> events(64);
  while (true) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    KVT_CHECK(count >= 0 || errno == EINTR);
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kStopId) return;
      if (id == kListenerId) {
        AcceptAll();
      } else {
        ReadAll(id, (events[static_cast<size_t>(i)].events & EPOLLHUP) != 0);
      }
    }
  }
}

void HandleServer::AcceptAll() {
  while (true) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      Admit(std::move(fd));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return;
    const int error_number = errno;
    if ((error_number == EMFILE || error_number == ENFILE) && spare_.valid()) RefuseOne();
    Log(LogLevel::kWarning, "handle connection refused",
        {{"error", strerrordesc_np(error_number)}});
    return;
  }
}

// Out of descriptors: with the spare one, the first in the queue is taken and closed, or the
// listener would stay ready for ever.
void HandleServer::RefuseOne() {
  spare_.Reset();
  {
    const UniqueFd refused(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  spare_ = UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void HandleServer::Admit(UniqueFd fd) {
  const absl::StatusOr<uid_t> uid = PeerUid(fd.get());
  const std::optional<OwnerIdx> owner = uid.ok() ? tenants_->OwnerOf(*uid) : std::nullopt;
  if (!owner.has_value()) {
    AuditRefusal({.who = uid.ok() ? absl::StrFormat("uid %d", *uid) : "unknown",
                  .peer = "unix",
                  .what = "handle connection",
                  .outcome = "PERMISSION_DENIED: no tenant has this uid"});
    Send(fd.get(), NewReply(HandleStatus::kForbidden), -1);
    return;
  }
  if (connection_count() >= options_.connections_max) CloseUnclaimed();
  if (connection_count() >= options_.connections_max) {
    Send(fd.get(), NewReply(HandleStatus::kLimitReached), -1);
    return;
  }
  absl::MutexLock lock(&mutex_);
  const ConnectionId id = next_id_++;
  if (!Watch(epoll_.get(), fd.get(), id).ok()) return;
  Connection connection;
  connection.fd = std::move(fd);
  connection.owner = *owner;
  connection.token_expires_ms = MonotonicMs() + options_.token_lifetime_ms;
  connections_.emplace(id, std::move(connection));
}

// Connections that no session claimed in time hold nothing, and must not keep others out.
void HandleServer::CloseUnclaimed() {
  const uint64_t now_ms = MonotonicMs();
  absl::MutexLock lock(&mutex_);
  for (auto it = connections_.begin(); it != connections_.end();) {
    const Connection& connection = it->second;
    if (connection.claimed || connection.token_expires_ms > now_ms) {
      ++it;
      continue;
    }
    if (connection.token.has_value()) connection_of_token_.erase(*connection.token);
    connections_.erase(it++);
  }
}

void HandleServer::ReadAll(ConnectionId id, bool hung_up) {
  int fd = -1;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    fd = found->second.fd.get();
  }
  // A peer that floods is served this many messages, then the others.
  for (int served = 0; served < 16; ++served) {
    std::array<std::byte, sizeof(HandleRequest) + 1> message;
    const ssize_t got = recv(fd, message.data(), message.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    // Without a hang-up, no bytes are an empty message, not the end of the process.
    const bool gone = got < 0 || (got == 0 && hung_up);
    if (gone || !Answer(id, fd, message.data(), static_cast<size_t>(got))) {
      Close(id);
      return;
    }
  }
}

bool HandleServer::Answer(ConnectionId id, int fd, const void* message, size_t message_bytes) {
  HandleRequest request;
  HandleReply reply = NewReply(HandleStatus::kBadRequest);
  UniqueFd segment_fd;
  if (message_bytes == sizeof(request)) {
    std::memcpy(&request, message, sizeof(request));
    if (request.version != kHandleWireVersion) {
      reply.status = HandleStatus::kVersionMismatch;
    } else if (request.reserved == 0 && request.kind == HandleRequestKind::kHello) {
      reply = Hello(id);
    } else if (request.reserved == 0 && request.kind == HandleRequestKind::kGetSegment) {
      reply = GetSegment(id, request, &segment_fd);
    } else if (request.reserved == 0 && request.kind == HandleRequestKind::kGetBoard) {
      reply = GetBoard(id, &segment_fd);
    }
  }
  const bool sent = Send(fd, reply, segment_fd.get());
  absl::MutexLock lock(&mutex_);
  // Closing says that the process reaches no slot any more, which we cannot say of a process with a
  // session: its connection is closed by its end alone, whatever it sends.
  if (connections_.at(id).claimed) return true;
  return sent && (reply.status == HandleStatus::kOk || reply.status == HandleStatus::kNoSegment ||
                  reply.status == HandleStatus::kUnavailable);
}

HandleReply HandleServer::Hello(ConnectionId id) {
  HandleReply reply = NewReply(HandleStatus::kOk);
  Token token;
  FillRandom(token);
  const uint64_t now_ms = MonotonicMs();
  absl::MutexLock lock(&mutex_);
  Connection& connection = connections_.at(id);
  if (connection.claimed) return NewReply(HandleStatus::kBadRequest);
  if (connection.token.has_value()) connection_of_token_.erase(*connection.token);
  connection.token = token;
  connection.token_expires_ms = now_ms + options_.token_lifetime_ms;
  connection_of_token_.emplace(token, id);
  std::copy(token.begin(), token.end(), reply.token);
  return reply;
}

HandleReply HandleServer::GetSegment(ConnectionId id, const HandleRequest& request,
                                     UniqueFd* segment_fd) {
  // Numbers of kvtier.v1.Tier.
  if ((request.tier != 1 && request.tier != 2) || request.writable > 1) {
    return NewReply(HandleStatus::kBadRequest);
  }
  OwnerIdx owner = 0;
  {
    absl::MutexLock lock(&mutex_);
    const Connection& connection = connections_.at(id);
    if (!connection.session.has_value()) return NewReply(HandleStatus::kNoSegment);
    owner = connection.owner;
  }
  absl::StatusOr<SegmentHandle> handle = callbacks_.export_segment(
      request.tier == 1 ? TierId::kHbm : TierId::kHost, request.segment_idx, request.writable == 1);
  if (!handle.ok()) {
    return NewReply(absl::IsNotFound(handle.status()) ? HandleStatus::kNoSegment
                                                      : HandleStatus::kUnavailable);
  }
  UniqueFd fd(handle->fd);
  if (handle->owner != owner) return NewReply(HandleStatus::kNoSegment);
  *segment_fd = std::move(fd);
  HandleReply reply = NewReply(HandleStatus::kOk);
  reply.segment_bytes = handle->segment_bytes;
  std::ranges::copy(handle->device_uuid, reply.device_uuid);
  return reply;
}

HandleReply HandleServer::GetBoard(ConnectionId id, UniqueFd* board_fd) {
  std::shared_ptr<TicketBoard> board;
  {
    absl::MutexLock lock(&mutex_);
    board = connections_.at(id).board;
  }
  if (board == nullptr) return NewReply(HandleStatus::kBadRequest);
  auto fd = board->Export();
  if (!fd.ok()) return NewReply(HandleStatus::kUnavailable);
  *board_fd = std::move(fd).value();
  HandleReply reply = NewReply(HandleStatus::kOk);
  reply.segment_bytes = sizeof(TicketBoardPage);
  return reply;
}

void HandleServer::Close(ConnectionId id) {
  std::optional<SessionId> session;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = connections_.find(id);
    session = found->second.session;
    if (found->second.token.has_value()) connection_of_token_.erase(*found->second.token);
    connections_.erase(found);
  }
  if (session.has_value()) callbacks_.on_session_gone(*session);
}

HandleReply HandleServer::NewReply(HandleStatus status) const {
  HandleReply reply;
  reply.status = status;
  reply.epoch = options_.epoch;
  return reply;
}

bool HandleServer::Send(int fd, const HandleReply& reply, int segment_fd) {
  iovec payload{};
  payload.iov_base = const_cast<HandleReply*>(&reply);  // sendmsg only reads it
  payload.iov_len = sizeof(reply);
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (segment_fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &segment_fd, sizeof(int));
  }
  ssize_t sent = -1;
  do {
    sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof(reply));
}

}  // namespace kvtier
