// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/src/channel.h"
#include "client/src/segment_map.h"
#include "client/src/ticket_board.h"
#include "kvtier/v1/context_store.grpc.pb.h"
#include "proto/base/packed.h"
#include "proto/base/timed_wait.h"

namespace kvtier::client {

// One session of one daemon process: its channel, its stream and its mappings. Never revived: when
// it is lost, the client opens another one. Thread-safe. Owned by the client and by the calls that
// run in it; its one thread reads the stream and ends in bounded time when the session is
// destroyed.
class Session {
 public:
  using Stub = v1::ContextStoreService::Stub;

  struct Options {
    std::string run_dir;
    // With an address: a session over TCP, which maps nothing.
    TcpOptions tcp;
    std::string client_name;
    // Of each step of opening, and of each exchange on the handle socket.
    uint32_t timeout_ms = 0;
    // Counts the sessions of this client, from 1.
    uint64_t generation = 0;
    std::shared_ptr<DeviceMap> devices;
  };
  // Errors: those of HandleConnection::Open and of the OpenSession call; DEADLINE_EXCEEDED; ABORTED
  // (the daemon restarted meanwhile); INTERNAL (malformed answer).
  static absl::StatusOr<std::shared_ptr<Session>> Open(const Options& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Stub& stub() { return *stub_; }
  grpc::Channel* channel() { return channel_.get(); }
  uint64_t generation() const { return options_.generation; }
  uint64_t epoch() const { return epoch_; }
  uint64_t session_id() const { return opened_.session_id(); }
  const std::string& tenant() const { return opened_.tenant(); }
  const v1::Limits& limits() const { return opened_.limits(); }
  SegmentMap& segments() { return segments_; }

  // The session's ticket board, mapped when it is first asked for: blocks for one exchange on the
  // handle socket then. Null: the daemon has none.
  std::shared_ptr<const TicketBoard> Board();

  // Nothing that belongs to this session is known to the daemon any more.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }
  void MarkLost();

  // The namespace's id in this session, once known.
  std::optional<uint32_t> NamespaceId(uint32_t client_idx) const;
  void SetNamespaceId(uint32_t client_idx, uint32_t namespace_id);

  // Tells the daemon that the lease has ended. If that fails the lease is told of again, with the
  // next one and at each heartbeat: a daemon that did not listen for a while must not keep it for
  // as long as the session lives.
  absl::Status ReleaseLease(uint64_t lease_id, uint32_t timeout_ms);

 private:
  // `connection` is null over TCP.
  Session(const Options& options, std::shared_ptr<grpc::Channel> channel,
          std::shared_ptr<HandleConnection> connection);

  void ReadStream(const std::string& token);
  absl::Status OnMessage(const v1::OpenSessionResponse& message);
  absl::Status AwaitOpened();
  absl::Status SendReleases(grpc::ClientContext& context, uint32_t timeout_ms);
  // In the stream's thread.
  void RepeatReleases();

  const Options options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Stub> stub_;
  // That of the connection; over TCP that of the first message, and 0 before. Constant once the
  // session is open.
  uint64_t epoch_;
  SegmentMap segments_;
  // A flag on its own: nothing is published with it.
  std::atomic<bool> lost_ = false;
  grpc::ClientContext stream_context_;
  // Written by the stream's thread before has_opened_, and constant from then on.
  v1::SessionOpened opened_;

  mutable absl::Mutex mutex_;
  bool has_opened_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  // One of them.
  TimedCondition settled_;
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint32_t, uint32_t> namespace_ids_ ABSL_GUARDED_BY(mutex_);
  // Asked for, whether there is one or not.
  bool has_asked_for_board_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<TicketBoard> board_ ABSL_GUARDED_BY(mutex_);
  // Leases that have ended, and the daemon may not know.
  std::vector<uint64_t> unreleased_ ABSL_GUARDED_BY(mutex_);
  // The call of RepeatReleases in progress, or null.
  grpc::ClientContext* repeat_context_ ABSL_GUARDED_BY(mutex_) = nullptr;

  // Last, so that it has ended before anything it uses is destroyed.
  std::jthread reader_;
};

}  // namespace kvtier::client
