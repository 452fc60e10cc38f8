// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "daemon/live_calls.h"
#include "daemon/private_session.h"
#include "daemon/service_context.h"
#include "kvtier/v1/context_store.pb.h"
#include "proto/base/key.h"
#include "proto/rpc/chunk_message.h"

namespace kvtier {

// The Write call: reserves host slots for one chain, copies the chunks into them as they come,
// commits the blocks whose checksum is right. Holds one chunk at a time. Owned by itself until
// OnDone, and by LiveCalls.
class WriteStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public LiveCall {
 public:
  static WriteStream* Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                            grpc::ByteBuffer* response);

  WriteStream(const ServiceContext& service, grpc::CallbackServerContext* context,
              grpc::ByteBuffer* response);

  void OnReadDone(bool ok) override;
  // As for WaitingCall.
  bool InternalInlineable() override { return true; }
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override {}

 private:
  void ReadNext();
  // True: OnReserved goes on.
  absl::StatusOr<bool> OnMessage();
  // First message: checks the header and asks for slots. OnReserved goes on.
  absl::Status Begin(const v1::WriteHeader& header);
  void OnReserved(absl::StatusOr<std::vector<core::PlacedBlock>> placed);
  // The chunk of the message into its slots, while these are ours.
  absl::Status CopyChunk();
  absl::Status CheckChunk() const;
  void TakePart(std::span<const std::byte> rest);
  void EndOfBlock();
  // The client has sent all.
  absl::Status Publish();
  void FinishWith(const absl::Status& status);

  const ServiceContext service_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_;
  PrivateSession session_;
  std::shared_ptr<WriteStream> self_;

  // The reactions of a call come one after the other, and so does the core's answer.
  grpc::ByteBuffer message_;
  // Points into message_.
  ChunkMessage parsed_;
  bool begun_ = false;
  PrivateSession::Opened opened_;
  uint64_t block_bytes_ = 0;
  std::vector<Key> keys_;
  std::vector<uint32_t> crc32cs_;
  std::vector<BlockStatus> statuses_;
  std::vector<core::PlacedBlock> placed_;
  uint64_t received_bytes_ = 0;
  uint32_t block_crc32c_ = 0;
};

}  // namespace kvtier
