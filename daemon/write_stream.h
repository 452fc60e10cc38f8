// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
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

namespace kvtier {

// The Write call: reserves host slots for one chain, copies the chunks into them as they come,
// commits the blocks whose checksum is right. Holds one chunk at a time. Owned by itself until
// OnDone, and by LiveCalls.
class WriteStream final : public grpc::ServerReadReactor<v1::WriteRequest>, public LiveCall {
 public:
  static WriteStream* Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                            v1::WriteResponse* response);

  WriteStream(const ServiceContext& service, grpc::CallbackServerContext* context,
              v1::WriteResponse* response);

  void OnReadDone(bool ok) override;
  // As for WaitingCall.
  bool InternalInlineable() override { return true; }
  void OnCancel() override;
  void OnDone() override;
  void OnBeat(uint64_t now_ms) override;
  void OnDrain() override {}

 private:
  // First message: checks the header and asks for slots. OnReserved goes on.
  absl::Status Begin();
  void OnReserved(absl::StatusOr<std::vector<core::PlacedBlock>> placed);
  // The chunk of message_ into its slots, while these are ours.
  absl::Status CopyChunk();
  absl::Status TakeChunk(std::string_view chunk);
  void EndOfBlock();
  // The client has sent all.
  absl::Status Publish();
  void FinishWith(const absl::Status& status);

  const ServiceContext service_;
  grpc::CallbackServerContext* const context_;
  v1::WriteResponse* const response_;
  PrivateSession session_;
  std::shared_ptr<WriteStream> self_;

  // The reactions of a call come one after the other, and so does the core's answer.
  v1::WriteRequest message_;
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
