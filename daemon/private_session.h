// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/store.h"

namespace kvtier {

// The session that one Write or Read stream has towards the core, for as long as the daemon copies.
// Nothing the client does with its own session (Abort, Release, ending it) can then free a slot
// under the copy. Thread-safe.
class PrivateSession {
 public:
  // `context` lives until Detach; at `expires_ms` the call is cancelled.
  PrivateSession(Store* store, grpc::CallbackServerContext* context, core::TimeMs expires_ms);
  ~PrivateSession();
  PrivateSession(const PrivateSession&) = delete;
  PrivateSession& operator=(const PrivateSession&) = delete;

  struct Opened {
    core::SessionId session = 0;
    core::NamespaceIdx ns = 0;
  };
  absl::StatusOr<Opened> Open(OwnerIdx owner, const core::NamespaceSpec& spec);

  // The core has answered: copying begins. False: the wait was cancelled, and the slots are gone.
  bool BeginCopying();
  // Ends the session if the core has not answered yet, so that it answers now.
  void CancelWait();
  // Ends the session: what was not committed is given back. Idempotent. No copying afterwards.
  void End();

  void CancelIfExpired(core::TimeMs now_ms);
  // gRPC is about to destroy the call's context.
  void Detach();

 private:
  void EndIf(bool copying_too);

  Store* const store_;
  const core::TimeMs expires_ms_;
  absl::Mutex mutex_;
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mutex_);
  core::SessionId session_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: not open
  bool copying_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier
