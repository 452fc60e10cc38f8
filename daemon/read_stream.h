// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
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
#include "proto/rpc/chunk_message.h"

namespace kvtier {

// The Read call: leases one chain, sends the bytes of its OK prefix in chunks, releases. Fills one
// chunk while the one before it is sent. Owned by itself until OnDone, and by LiveCalls.
class ReadStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public LiveCall {
 public:
  static ReadStream* Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                           grpc::ByteBuffer request);

  ReadStream(const ServiceContext& service, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  // As for WaitingCall.
  bool InternalInlineable() override { return true; }
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override {}

 private:
  absl::Status Begin(grpc::ByteBuffer* bytes);
  void OnAcquired(absl::StatusOr<core::AcquireResult> result);
  // One of the steps that the next message waits for is done: the filling of its chunk, or the
  // sending of the message before it. Goes on after the last one; the call may be over then.
  void OnStepDone();
  // Fills the next chunk while the blocks are ours. False: OnFetched goes on, maybe has by now.
  bool FillChunk();
  bool CopyToChunk();
  void Fetch(size_t block_idx);
  void OnFetched(size_t block_idx, const absl::Status& status);
  void SendChunk();
  bool AllIsSent() const { return header_sent_ && !chunk_.has_value(); }
  void FinishWith(const absl::Status& status);

  const ServiceContext service_;
  grpc::CallbackServerContext* const context_;
  PrivateSession session_;
  std::shared_ptr<ReadStream> self_;

  PrivateSession::Opened opened_;
  std::vector<Key> keys_;
  // The OK prefix.
  std::vector<core::PlacedBlock> blocks_;
  uint64_t block_bytes_ = 0;
  v1::ReadHeader header_;

  std::atomic<int> steps_left_ = 0;
  // Of the message that is being sent.
  grpc::ByteBuffer message_;
  bool header_sent_ = false;
  bool written_ok_ = true;
  // Of the chunk that is being filled; none when there is nothing left.
  std::optional<ChunkBuffer> chunk_;
  size_t chunk_filled_bytes_ = 0;
  // How much of the prefix is in chunks by now.
  uint64_t taken_bytes_ = 0;
  absl::Status fill_status_;
  // A copy of the block that is being sent, if its memory is out of the CPU's reach.
  std::vector<std::byte> fetched_;
  std::optional<size_t> fetched_idx_;
};

}  // namespace kvtier
