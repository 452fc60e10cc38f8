// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/handle_server.h"
#include "daemon/live_calls.h"
#include "daemon/service_context.h"
#include "kvtier/v1/context_store.pb.h"

namespace kvtier {

// The OpenSession call: a session lives for as long as this stream does. Owned by itself until
// OnDone, and by LiveCalls. At most one message is on its way; a beat that finds one is skipped.
class SessionStream final : public grpc::ServerWriteReactor<v1::OpenSessionResponse>,
                            public LiveCall,
                            public std::enable_shared_from_this<SessionStream> {
 public:
  // The reactor to give to gRPC.
  static SessionStream* Start(const ServiceContext& service,
                              const grpc::CallbackServerContext& context,
                              const v1::OpenSessionRequest& request);

  explicit SessionStream(const ServiceContext& service) : service_(service) {}

  void OnWriteDone(bool ok) override;
  // As for WaitingCall.
  bool InternalInlineable() override { return true; }
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override;

 private:
  // Opens the session and fills the first message.
  absl::Status Open(const grpc::CallbackServerContext& context,
                    const v1::OpenSessionRequest& request);
  // Who opens the session: by its token, or on TCP by its certificate. On TCP no connection of the
  // handle socket belongs to it.
  absl::StatusOr<HandleServer::Claim> Identify(const grpc::CallbackServerContext& context,
                                               const v1::OpenSessionRequest& request) const;
  absl::StatusOr<core::SessionId> OpenInCore(OwnerIdx owner);
  // Null: the system gave none.
  std::shared_ptr<TicketBoard> MakeBoard(core::SessionId core_id);
  void EndSession();
  // Finishes once no message is on its way.
  void RequestFinish(const absl::Status& status);

  const ServiceContext service_;
  // Touched while no message is on its way.
  v1::OpenSessionResponse message_;
  std::shared_ptr<SessionStream> self_;

  absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> finish_status_ ABSL_GUARDED_BY(mutex_);
  // 0: not open.
  uint64_t wire_id_ ABSL_GUARDED_BY(mutex_) = 0;
  core::SessionId core_id_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtier
