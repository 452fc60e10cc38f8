// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "daemon/live_calls.h"
#include "daemon/private_session.h"
#include "daemon/service_context.h"
#include "kvtier/v1/context_store.pb.h"
#include "proto/base/key.h"

namespace kvtier {

// The Read call: leases one chain, sends the bytes of its OK prefix in chunks, releases. Holds one
// chunk at a time. Owned by itself until OnDone, and by LiveCalls.
class ReadStream final : public grpc::ServerWriteReactor<v1::ReadResponse>, public LiveCall {
 public:
  static ReadStream* Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                           const v1::ReadRequest& request);

  ReadStream(const ServiceContext& service, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  // As for WaitingCall.
  bool InternalInlineable() override { return true; }
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override {}

 private:
  absl::Status Begin(const v1::ReadRequest& request);
  void OnAcquired(absl::StatusOr<core::AcquireResult> result);
  // Fills and sends the next chunk, while the blocks are ours.
  void SendChunk();
  // Goes on where it is; waits for a block that the CPU does not reach.
  void FillChunk();
  void Fetch(size_t block_idx);
  void OnFetched(size_t block_idx, const absl::Status& status);
  void FinishWith(const absl::Status& status);

  const ServiceContext service_;
  grpc::CallbackServerContext* const context_;
  PrivateSession session_;
  std::shared_ptr<ReadStream> self_;

  // The reactions of a call come one after the other, and so does the core's answer.
  v1::ReadResponse message_;
  PrivateSession::Opened opened_;
  std::vector<Key> keys_;
  // The OK prefix, and how much of its bytes is sent.
  std::vector<core::PlacedBlock> blocks_;
  uint64_t block_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
  // A copy of the block that is being sent, if its memory is out of the CPU's reach.
  std::vector<std::byte> fetched_;
  std::optional<size_t> fetched_idx_;
};

}  // namespace kvtier
