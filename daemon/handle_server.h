// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/tenants.h"
#include "daemon/ticket_board.h"
#include "daemon/unix_socket.h"
#include "proto/base/handle_wire.h"
#include "tiers/tier.h"

namespace kvtier {

// The handle socket (proto/base/handle_wire.h): proves who a peer is, gives out one-time tokens and
// segment descriptors, and knows when a session's process is gone. Thread-safe; one thread of its
// own, which never waits for a peer.
class HandleServer {
 public:
  // A connection, never reused.
  using ConnectionId = uint64_t;
  using SessionId = uint64_t;

  struct Options {
    std::string socket_path;
    mode_t socket_mode = 0660;
    uint64_t epoch = 0;
    uint32_t connections_max = 2048;
    uint64_t token_lifetime_ms = 30'000;
  };
  // What the server asks the daemon; called from its thread, without a lock.
  struct Callbacks {
    // Segment `segment_idx` of hbm or host.
    std::function<absl::StatusOr<SegmentHandle>(TierId, uint32_t segment_idx, bool writable)>
        export_segment;
    // The connection of this session is closed: its process reaches no slot any more.
    std::function<void(SessionId)> on_session_gone;
  };

  static absl::StatusOr<std::unique_ptr<HandleServer>> Start(const Options& options,
                                                             const TenantTable* tenants,
                                                             Callbacks callbacks);
  // Closes every connection; no callback comes afterwards.
  ~HandleServer();
  HandleServer(const HandleServer&) = delete;
  HandleServer& operator=(const HandleServer&) = delete;

  struct Claim {
    ConnectionId connection = 0;
    OwnerIdx owner = 0;
  };
  // Uses up a token. Empty: not given out, used, expired, or its connection is closed.
  std::optional<Claim> ClaimToken(std::string_view token);
  // From now on the connection belongs to the session, whose ticket board it may ask for (null: it
  // has none). False: it is closed, and on_session_gone is never called for this session.
  bool Bind(ConnectionId connection, SessionId session, std::shared_ptr<TicketBoard> board);

  size_t connection_count() const;

 private:
  using Token = std::array<uint8_t, sizeof(HandleReply::token)>;

  struct Connection {
    UniqueFd fd;
    OwnerIdx owner = 0;
    std::optional<Token> token;
    // Until when the connection may wait to be claimed; each hello begins anew.
    uint64_t token_expires_ms = 0;
    // Says that its token was claimed; no second one is given out.
    bool claimed = false;
    std::optional<SessionId> session;
    std::shared_ptr<TicketBoard> board;
  };

  HandleServer(const Options& options, const TenantTable* tenants, Callbacks callbacks,
               UniqueFd listener, UniqueFd epoll, UniqueFd stop_event);

  void Serve();
  void AcceptAll();
  void RefuseOne();
  // Takes one accepted connection in, or refuses it.
  void Admit(UniqueFd fd);
  // Serves what has arrived; closes the connection at its end.
  void ReadAll(ConnectionId id, bool hung_up);
  void CloseUnclaimed() ABSL_LOCKS_EXCLUDED(mutex_);
  // False: close the connection.
  bool Answer(ConnectionId id, int fd, const void* message, size_t message_bytes);
  HandleReply Hello(ConnectionId id);
  HandleReply GetSegment(ConnectionId id, const HandleRequest& request, UniqueFd* segment_fd);
  HandleReply GetBoard(ConnectionId id, UniqueFd* board_fd);
  void Close(ConnectionId id);
  HandleReply NewReply(HandleStatus status) const;
  // False when the peer does not take it at once.
  static bool Send(int fd, const HandleReply& reply, int segment_fd);

  const Options options_;
  const TenantTable* const tenants_;
  const Callbacks callbacks_;
  const UniqueFd listener_;
  const UniqueFd epoll_;
  const UniqueFd stop_event_;
  UniqueFd spare_;
  mutable absl::Mutex mutex_;
  ConnectionId next_id_ ABSL_GUARDED_BY(mutex_);
  // Descriptors are closed by the serving thread only, so it may use one without the lock.
  absl::flat_hash_map<ConnectionId, Connection> connections_ ABSL_GUARDED_BY(mutex_);
  std::map<Token, ConnectionId> connection_of_token_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;
};

}  // namespace kvtier
