// SPDX-License-Identifier: Apache-2.0
#include "daemon/private_session.h"

#include <utility>

#include "proto/base/status_util.h"

namespace kvtier {

PrivateSession::PrivateSession(Store* store, grpc::CallbackServerContext* context,
                               core::TimeMs expires_ms)
    : store_(store), expires_ms_(expires_ms), context_(context) {}

PrivateSession::~PrivateSession() { End(); }

absl::StatusOr<PrivateSession::Opened> PrivateSession::Open(OwnerIdx owner,
                                                            const core::NamespaceSpec& spec) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session,
                       store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects*) {
                         return core.OpenSession(owner, now_ms);
                       }));
  {
    absl::MutexLock lock(&mutex_);
    session_ = session;
    if (cancelled_) return absl::CancelledError("cancelled");
  }
  KVT_ASSIGN_OR_RETURN(const core::NamespaceIdx ns,
                       store_->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
                         return core.OpenNamespace(session, spec);
                       }));
  return Opened{.session = session, .ns = ns};
}

bool PrivateSession::BeginCopying() {
  absl::MutexLock lock(&mutex_);
  copying_ = session_ != 0 && !cancelled_;
  return copying_;
}

void PrivateSession::EndCopying() {
  {
    absl::MutexLock lock(&mutex_);
    copying_ = false;
    if (!cancelled_) return;
  }
  End();
}

void PrivateSession::Cancel() {
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (copying_) return;
  }
  End();
}

void PrivateSession::End() {
  core::SessionId session = 0;
  {
    absl::MutexLock lock(&mutex_);
    session = std::exchange(session_, 0);
  }
  if (session == 0) return;
  store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.EndSession(session, now_ms, effects);
  });
}

void PrivateSession::CancelIfExpired(core::TimeMs now_ms) {
  if (now_ms < expires_ms_) return;
  absl::MutexLock lock(&mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void PrivateSession::Detach() {
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
}

}  // namespace kvtier
