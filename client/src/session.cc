// SPDX-License-Identifier: Apache-2.0
#include "client/src/session.h"

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/time/time.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {
namespace {

// Of one Release, as the daemon has it.
constexpr size_t kLeasesPerCallMax = 4096;
// A heartbeat comes every second.
constexpr uint32_t kRepeatTimeoutMs = 1000;

absl::Status Restarted() {
  return WithReason(Aborted("the daemon restarted"), reason::kSessionUnknown);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> Session::Open(const Options& options) {
  std::shared_ptr<grpc::Channel> channel;
  std::shared_ptr<HandleConnection> connection;
  std::string token;
  if (options.tcp.address.empty()) {
    KVT_ASSIGN_OR_RETURN(
        connection, HandleConnection::Open(options.run_dir + "/handles.sock", options.timeout_ms));
    token = connection->token();
    channel = NewUnixChannel(options.run_dir + "/kvtierd.sock");
  } else {
    KVT_ASSIGN_OR_RETURN(channel, NewTcpChannel(options.tcp));
  }
  std::shared_ptr<Session> session(new Session(options, std::move(channel), std::move(connection)));
  session->reader_ = std::jthread([raw = session.get(), token] { raw->ReadStream(token); });
  KVT_RETURN_IF_ERROR(session->AwaitOpened());
  return session;
}

Session::Session(const Options& options, std::shared_ptr<grpc::Channel> channel,
                 std::shared_ptr<HandleConnection> connection)
    : options_(options),
      channel_(std::move(channel)),
      stub_(v1::ContextStoreService::NewStub(channel_)),
      epoch_(connection == nullptr ? 0 : connection->epoch()),
      segments_(std::move(connection), options.devices) {}

Session::~Session() { MarkLost(); }

void Session::MarkLost() {
  lost_.store(true, std::memory_order_relaxed);
  // The stream's thread sees its end and drops the mappings.
  stream_context_.TryCancel();
  absl::MutexLock lock(&mutex_);
  if (board_ != nullptr) board_->MarkLost();
  if (repeat_context_ != nullptr) repeat_context_->TryCancel();
}

void Session::ReadStream(const std::string& token) {
  ::pthread_setname_np(::pthread_self(), "kvtier-session");
  v1::OpenSessionRequest request;
  request.set_token(token);
  request.set_client_name(options_.client_name);
  const auto stream = stub_->OpenSession(&stream_context_, request);
  absl::Status status;
  v1::OpenSessionResponse message;
  while (status.ok() && stream->Read(&message)) {
    status = OnMessage(message);
    RepeatReleases();
  }
  // A stream that ended by itself says why, and would not if it were cancelled first.
  if (!status.ok()) MarkLost();
  const absl::Status stream_status = FromGrpc(stream->Finish());
  MarkLost();
  if (status.ok()) status = stream_status;
  segments_.Close();
  absl::MutexLock lock(&mutex_);
  has_ended_ = true;
  settled_.NotifyAll();
  end_status_ = status.ok() ? Unavailable("the daemon ended the session") : status;
}

absl::Status Session::OnMessage(const v1::OpenSessionResponse& message) {
  absl::MutexLock lock(&mutex_);
  if (epoch_ == 0 && !has_opened_) epoch_ = message.epoch();
  if (message.epoch() != epoch_) return Restarted();
  if (has_opened_) return absl::OkStatus();
  if (!message.has_opened()) return Internal("the daemon began a session with a heartbeat");
  opened_ = message.opened();
  has_opened_ = true;
  settled_.NotifyAll();
  return absl::OkStatus();
}

absl::Status Session::AwaitOpened() {
  const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return has_opened_ || has_ended_;
  };
  absl::MutexLock lock(&mutex_);
  if (!settled_.WaitFor(mutex_, absl::Milliseconds(options_.timeout_ms), settled)) {
    return DeadlineExceeded("the daemon did not open a session in %d ms", options_.timeout_ms);
  }
  return has_opened_ ? absl::OkStatus() : end_status_;
}

std::shared_ptr<const TicketBoard> Session::Board() {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(has_asked_for_board_, true)) return board_;
  }
  auto fd = segments_.GetBoard();
  if (!fd.ok()) return nullptr;
  auto board = TicketBoard::Map(std::move(fd).value());
  if (!board.ok()) return nullptr;
  absl::MutexLock lock(&mutex_);
  board_ = std::move(board).value();
  if (lost()) board_->MarkLost();
  return board_;
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

absl::Status Session::ReleaseLease(uint64_t lease_id, uint32_t timeout_ms) {
  {
    absl::MutexLock lock(&mutex_);
    unreleased_.push_back(lease_id);
  }
  grpc::ClientContext context;
  return SendReleases(context, timeout_ms);
}

absl::Status Session::SendReleases(grpc::ClientContext& context, uint32_t timeout_ms) {
  v1::ReleaseRequest request;
  request.set_session_id(session_id());
  {
    absl::MutexLock lock(&mutex_);
    const size_t count = std::min(unreleased_.size(), kLeasesPerCallMax);
    const auto first = unreleased_.end() - static_cast<std::ptrdiff_t>(count);
    request.mutable_lease_ids()->Add(first, unreleased_.end());
    unreleased_.erase(first, unreleased_.end());
  }
  SetDeadline(context, timeout_ms);
  v1::ReleaseResponse response;
  absl::Status status = FromGrpc(stub_->Release(&context, request, &response));
  if (status.ok() && response.epoch() != epoch_) status = Restarted();
  if (status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  unreleased_.insert(unreleased_.end(), request.lease_ids().begin(), request.lease_ids().end());
  return status;
}

void Session::RepeatReleases() {
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    if (unreleased_.empty() || lost()) return;
    repeat_context_ = &context;
  }
  // What fails is left for the next heartbeat.
  SendReleases(context, kRepeatTimeoutMs).IgnoreError();
  absl::MutexLock lock(&mutex_);
  repeat_context_ = nullptr;
}

}  // namespace kvtier::client
