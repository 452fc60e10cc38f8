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

  // From here to EndCopying the slots stay. False: the session is over, and the slots are gone.
  bool BeginCopying();
  void EndCopying();
  // The call is cancelled, which its reactions may not notice for long (a message to a peer that
  // takes nothing is never done): ends the session now, or as soon as nothing is copied. A wait for
  // the core is answered at once.
  void Cancel();
  // Ends the session: what was not committed is given back. Idempotent. Not while copying.
  void End();

  void CancelIfExpired(core::TimeMs now_ms);
  // gRPC is about to destroy the call's context.
  void Detach();

 private:
  Store* const store_;
  const core::TimeMs expires_ms_;
  absl::Mutex mutex_;
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mutex_);
  core::SessionId session_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: not open
  bool copying_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier
