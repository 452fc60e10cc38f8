// SPDX-License-Identifier: Apache-2.0
#include "client/src/session.h"

#include <pthread.h>

#include <utility>

#include "absl/time/time.h"
#include "client/src/channel.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {

absl::StatusOr<std::shared_ptr<Session>> Session::Open(const Options& options) {
  KVT_ASSIGN_OR_RETURN(
      std::shared_ptr<HandleConnection> connection,
      HandleConnection::Open(options.run_dir + "/handles.sock", options.timeout_ms));
  const std::string token = connection->token();
  std::shared_ptr<Session> session(new Session(options, std::move(connection)));
  session->reader_ = std::jthread([raw = session.get(), token] { raw->ReadStream(token); });
  KVT_RETURN_IF_ERROR(session->AwaitOpened());
  return session;
}

Session::Session(const Options& options, std::shared_ptr<HandleConnection> connection)
    : options_(options),
      stub_(v1::ContextStoreService::NewStub(NewUnixChannel(options.run_dir + "/kvtierd.sock"))),
      epoch_(connection->epoch()),
      segments_(std::move(connection), options.devices) {}

Session::~Session() { MarkLost(); }

void Session::MarkLost() {
  lost_.store(true, std::memory_order_relaxed);
  // The stream's thread sees its end and drops the mappings.
  stream_context_.TryCancel();
}

void Session::ReadStream(const std::string& token) {
  ::pthread_setname_np(::pthread_self(), "kvtier-session");
  v1::OpenSessionRequest request;
  request.set_token(token);
  request.set_client_name(options_.client_name);
  const auto stream = stub_->OpenSession(&stream_context_, request);
  absl::Status status;
  v1::OpenSessionResponse message;
  while (status.ok() && stream->Read(&message)) status = OnMessage(message);
  MarkLost();
  const absl::Status stream_status = FromGrpc(stream->Finish());
  if (status.ok()) status = stream_status;
  segments_.Close();
  absl::MutexLock lock(&mutex_);
  has_ended_ = true;
  end_status_ = status.ok() ? Unavailable("the daemon ended the session") : status;
}

absl::Status Session::OnMessage(const v1::OpenSessionResponse& message) {
  if (message.epoch() != epoch_) {
    return WithReason(Aborted("the daemon restarted"), reason::kSessionUnknown);
  }
  absl::MutexLock lock(&mutex_);
  if (has_opened_) return absl::OkStatus();
  if (!message.has_opened()) return Internal("the daemon began a session with a heartbeat");
  opened_ = message.opened();
  has_opened_ = true;
  return absl::OkStatus();
}

absl::Status Session::AwaitOpened() {
  const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return has_opened_ || has_ended_;
  };
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(&settled),
                               absl::Milliseconds(options_.timeout_ms))) {
    return DeadlineExceeded("the daemon did not open a session in %d ms", options_.timeout_ms);
  }
  return has_opened_ ? absl::OkStatus() : end_status_;
}

std::optional<uint32_t> Session::NamespaceId(uint32_t client_idx) const {
  absl::MutexLock lock(&mutex_);
  const auto place = namespace_ids_.find(client_idx);
  if (place == namespace_ids_.end()) return std::nullopt;
  return place->second;
}

void Session::SetNamespaceId(uint32_t client_idx, uint32_t namespace_id) {
  absl::MutexLock lock(&mutex_);
  namespace_ids_[client_idx] = namespace_id;
}

}  // namespace kvtier::client
