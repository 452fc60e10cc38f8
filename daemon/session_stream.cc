// SPDX-License-Identifier: Apache-2.0
#include "daemon/session_stream.h"

#include <utility>

#include "daemon/audit.h"
#include "daemon/call_admission.h"
#include "daemon/log.h"
#include "daemon/peer_names.h"
#include "daemon/requests.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/base/version.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {
namespace {

constexpr size_t kClientNameBytesMax = 128;

absl::Status UnknownToken() {
  return WithReason(
      PermissionDenied("token: not one that the handle socket gave out, used already, "
                       "expired, or its connection is closed"),
      reason::kTokenUnknown);
}

}  // namespace

SessionStream* SessionStream::Start(const ServiceContext& service,
                                    const grpc::CallbackServerContext& context,
                                    const v1::OpenSessionRequest& request) {
  auto stream = std::make_shared<SessionStream>(service);
  stream->self_ = stream;
  const absl::Status opened = stream->Open(context, request);
  if (!opened.ok()) {
    AuditRefusal({.who = service.is_tcp() ? JoinPeerNames(PeerNames(*context.auth_context()))
                                          : "client " + request.client_name(),
                  .peer = service.is_tcp() ? context.peer() : "unix",
                  .what = "OpenSession",
                  .outcome = opened.ToString(absl::StatusToStringMode::kWithNoExtraData)});
    stream->RequestFinish(opened);
    return stream.get();
  }
  {
    absl::MutexLock lock(&stream->mutex_);
    stream->writing_ = true;
  }
  stream->StartWrite(&stream->message_);
  service.session_calls->Add(stream);
  return stream.get();
}

absl::StatusOr<core::SessionId> SessionStream::OpenInCore(OwnerIdx owner) {
  return service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms,
                                 core::Effects*) -> absl::StatusOr<core::SessionId> {
    KVT_ASSIGN_OR_RETURN(const core::SessionId session, core.OpenSession(owner, now_ms));
    if (!service_.is_tcp()) core.AttachMapping(session);
    return session;
  });
}

std::shared_ptr<TicketBoard> SessionStream::MakeBoard(core::SessionId core_id) {
  auto board = TicketBoard::Create();
  if (!board.ok()) {
    Log(LogLevel::kWarning, "a session has no ticket board: its client asks with calls",
        {{"session", core_id}, {"error", FromAbsl(board.status().message())}});
    return nullptr;
  }
  // The page lives as long as the board.
  const std::shared_ptr<TicketBoardPage> page(*board, &(*board)->page());
  service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
    core.ShowTickets(core_id, page);
  });
  return *std::move(board);
}

absl::StatusOr<HandleServer::Claim> SessionStream::Identify(
    const grpc::CallbackServerContext& context, const v1::OpenSessionRequest& request) const {
  if (service_.is_tcp()) {
    KVT_ASSIGN_OR_RETURN(const OwnerIdx owner,
                         TenantOfPeer(*service_.tenants, *context.auth_context()));
    return HandleServer::Claim{.owner = owner};
  }
  const auto claim = service_.handles->ClaimToken(request.token());
  if (!claim.has_value()) return UnknownToken();
  return *claim;
}

absl::Status SessionStream::Open(const grpc::CallbackServerContext& context,
                                 const v1::OpenSessionRequest& request) {
  KVT_RETURN_IF_ERROR(CheckTextBytes(request.client_name(), kClientNameBytesMax, "client_name"));
  KVT_ASSIGN_OR_RETURN(const HandleServer::Claim claim, Identify(context, request));
  if (service_.rates != nullptr) KVT_RETURN_IF_ERROR(service_.rates->Take(claim.owner));
  KVT_ASSIGN_OR_RETURN(const core::SessionId core_id, OpenInCore(claim.owner));
  const uint64_t wire_id = service_.sessions->Add({.core_id = core_id, .owner = claim.owner});
  {
    absl::MutexLock lock(&mutex_);
    core_id_ = core_id;
    wire_id_ = wire_id;
  }
  if (!service_.is_tcp() &&
      !service_.handles->Bind(claim.connection, core_id, MakeBoard(core_id))) {
    service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.DetachMapping(core_id, now_ms, effects);
    });
    EndSession();
    return UnknownToken();
  }
  const std::string& tenant = service_.tenants->Name(claim.owner);
  Log(LogLevel::kInfo, "session opened",
      {{"session", core_id},
       {"tenant", tenant},
       {"client", request.client_name()},
       {"peer", service_.is_tcp() ? context.peer() : "unix"}});
  message_.set_epoch(service_.epoch);
  v1::SessionOpened* opened = message_.mutable_opened();
  opened->set_session_id(wire_id);
  opened->set_tenant(tenant);
  opened->set_heartbeat_ms(kHeartbeatMs);
  opened->set_server_version(kVersion);
  v1::Limits* limits = opened->mutable_limits();
  limits->set_keys_per_call_max(kKeysPerCallMax);
  limits->set_chunk_bytes_max(kChunkBytesMax);
  limits->set_default_deadline_ms(kDefaultDeadlineMs);
  return absl::OkStatus();
}

void SessionStream::EndSession() {
  uint64_t wire_id = 0;
  core::SessionId core_id = 0;
  {
    absl::MutexLock lock(&mutex_);
    wire_id = std::exchange(wire_id_, 0);
    core_id = std::exchange(core_id_, 0);
  }
  if (wire_id == 0) return;
  service_.sessions->Remove(wire_id);
  service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.EndSession(core_id, now_ms, effects);
  });
  Log(LogLevel::kInfo, "session ended", {{"session", core_id}});
}

void SessionStream::RequestFinish(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finish_status_.has_value()) return;
    finish_status_ = status;
    if (writing_) return;
    finished_ = true;
  }
  Finish(ToGrpc(status));
}

void SessionStream::OnWriteDone(bool ok) {
  absl::Status status = absl::CancelledError("the stream is closed");
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (finish_status_.has_value()) {
      status = *finish_status_;
    } else if (ok) {
      return;
    }
    finish_status_ = status;
    if (finished_) return;
    finished_ = true;
  }
  Finish(ToGrpc(status));
}

void SessionStream::OnCancel() {
  EndSession();
  RequestFinish(absl::CancelledError("the client closed the stream"));
}

void SessionStream::OnDone() {
  EndSession();
  service_.session_calls->Remove(this);
  // May be the last reference.
  const std::shared_ptr<SessionStream> self = std::move(self_);
}

void SessionStream::OnBeat(uint64_t /*now_ms*/) {
  {
    absl::MutexLock lock(&mutex_);
    if (writing_ || finish_status_.has_value()) return;
    writing_ = true;
  }
  message_.Clear();
  message_.set_epoch(service_.epoch);
  StartWrite(&message_);
}

void SessionStream::OnDrain() {
  EndSession();
  RequestFinish(WithReason(Unavailable("the daemon is stopping"), reason::kDraining));
}

}  // namespace kvtier
