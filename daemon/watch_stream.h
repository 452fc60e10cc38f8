// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/live_calls.h"
#include "daemon/service_context.h"
#include "kvtier/v1/context_store.pb.h"

namespace kvtier {

// The Watch call: a snapshot, then events, one message on its way at a time. Takes the next ones
// when that has left, or at a beat; what it does not take stays in the core until newer events need
// the room. Owned by itself until OnDone, and by LiveCalls.
class WatchStream final : public grpc::ServerWriteReactor<v1::WatchResponse>,
                          public LiveCall,
                          public std::enable_shared_from_this<WatchStream> {
 public:
  // The reactor to give to gRPC.
  static WatchStream* Start(const ServiceContext& service,
                            const grpc::CallbackServerContext& context,
                            const v1::WatchRequest& request);

  explicit WatchStream(const ServiceContext& service) : service_(service) {}

  void OnWriteDone(bool ok) override;
  // As for WaitingCall.
  bool InternalInlineable() override { return true; }
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override;

 private:
  absl::Status Begin(const grpc::CallbackServerContext& context, const v1::WatchRequest& request);
  // Fills the next message; false when there is nothing to say.
  absl::StatusOr<bool> FillMessage();
  absl::StatusOr<bool> FillWithSnapshot();
  absl::StatusOr<bool> FillWithEvents();
  void AddBlocks(const std::vector<core::BlockEvent>& events);
  // Says what there is to say, if nobody is about to. Requires: not `writing_` by anybody else.
  void Advance();
  // True: the caller, and nobody else, may write or finish.
  bool TakeTurn();
  // Finishes once no message is on its way.
  void RequestFinish(const absl::Status& status);

  const ServiceContext service_;
  std::shared_ptr<WatchStream> self_;

  // Touched by whose turn it is.
  v1::WatchResponse message_;
  core::SessionId session_ = 0;
  uint64_t sequence_ = 0;
  // Of the snapshot under way.
  std::optional<uint64_t> snapshot_position_;

  absl::Mutex mutex_;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> finish_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
