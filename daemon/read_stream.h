// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/live_calls.h"
#include "daemon/private_session.h"
#include "daemon/service_context.h"
#include "kvtier/v1/context_store.pb.h"

namespace kvtier {

// The Read call: leases one chain, sends the bytes of its OK prefix in chunks, releases. Holds one
// chunk at a time. Owned by itself until OnDone, and by LiveCalls.
class ReadStream final : public grpc::ServerWriteReactor<v1::ReadResponse>, public LiveCall {
 public:
  static ReadStream* Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                           const v1::ReadRequest& request);

  ReadStream(const ServiceContext& service, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override {}

 private:
  absl::Status Begin(const v1::ReadRequest& request);
  void OnAcquired(absl::StatusOr<core::AcquireResult> result, uint32_t block_bytes);
  // The next chunk into message_.
  void FillChunk();
  void FinishWith(const absl::Status& status);

  const ServiceContext service_;
  grpc::CallbackServerContext* const context_;
  PrivateSession session_;
  std::shared_ptr<ReadStream> self_;

  // The reactions of a call come one after the other, and so does the core's answer.
  v1::ReadResponse message_;
  // The payloads still to be sent.
  std::vector<std::span<const std::byte>> payloads_;
  size_t payload_idx_ = 0;
};

}  // namespace kvtier
