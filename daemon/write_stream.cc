// SPDX-License-Identifier: Apache-2.0
#include "daemon/write_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/call_admission.h"
#include "daemon/requests.h"
#include "proto/base/crc32c.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {
WriteStream* WriteStream::Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                                grpc::ByteBuffer* response) {
  auto stream = std::make_shared<WriteStream>(service, context, response);
  stream->self_ = stream;
  const bool full = service.data_calls->count() >= service.data_streams_max;
  service.data_calls->Add(stream);
  if (full) {
    stream->FinishWith(
        WithReason(Exhausted("%d Write and Read streams are open, which is the limit",
                             service.data_streams_max),
                   reason::kLimitReached));
  } else {
    stream->ReadNext();
  }
  return stream.get();
}

WriteStream::WriteStream(const ServiceContext& service, grpc::CallbackServerContext* context,
                         grpc::ByteBuffer* response)
    : service_(service),
      context_(context),
      response_(response),
      session_(service.store, context, DeadlineMs(*context, kDefaultTransferDeadlineMs)) {}

void WriteStream::ReadNext() {
  parsed_ = {};
  message_.Clear();
  StartRead(&message_);
}

void WriteStream::OnReadDone(bool ok) {
  if (!ok) {
    FinishWith(context_->IsCancelled() ? absl::CancelledError("the client cancelled") : Publish());
    return;
  }
  const absl::StatusOr<bool> waits = OnMessage();
  if (!waits.ok()) {
    FinishWith(waits.status());
  } else if (!*waits) {
    ReadNext();
  }
}

absl::StatusOr<bool> WriteStream::OnMessage() {
  v1::WriteHeader header;
  auto parsed = ParseChunkMessage(&message_, &header);
  if (!parsed.ok()) return BadArgument(parsed.status());
  parsed_ = *std::move(parsed);
  if (!begun_) {
    begun_ = true;
    KVT_RETURN_IF_ERROR(Begin(header));
    return true;
  }
  if (parsed_.has_header) return BadArgument(Invalid("header: only in the first message"));
  KVT_RETURN_IF_ERROR(CopyChunk());
  return false;
}

absl::Status WriteStream::Begin(const v1::WriteHeader& header) {
  if (!parsed_.has_header) return BadArgument(Invalid("header: missing in the first message"));
  KVT_ASSIGN_OR_RETURN(const auto client, AdmitCall(service_, *context_, header.session_id()));
  KVT_ASSIGN_OR_RETURN(
      const core::NamespaceSpec spec,
      service_.sessions->FindNamespace(header.session_id(), header.namespace_id()));
  KVT_ASSIGN_OR_RETURN(keys_, ParseKeys(header.keys()));
  KVT_ASSIGN_OR_RETURN(crc32cs_, ParseCrcs(header.crc32cs(), keys_.size()));
  KVT_ASSIGN_OR_RETURN(const std::optional<Key> parent, ParseParentKey(header.parent_key()));
  block_bytes_ = spec.block_bytes;
  KVT_ASSIGN_OR_RETURN(opened_, session_.Open(client.owner, spec));
  // Half of the time for the slots, half for the bytes.
  const core::TimeMs deadline_ms =
      MonotonicMs() + BudgetMs(*context_, kDefaultTransferDeadlineMs) / 2;
  service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.Reserve(
        opened_.session, opened_.ns, parent, keys_, TierId::kHost, deadline_ms, now_ms,
        [this](absl::StatusOr<std::vector<core::PlacedBlock>> placed) {
          OnReserved(std::move(placed));
        },
        effects);
  });
  return absl::OkStatus();
}

void WriteStream::OnReserved(absl::StatusOr<std::vector<core::PlacedBlock>> placed) {
  absl::Status status = placed.status();
  if (status.ok()) {
    placed_ = *std::move(placed);
    for (const core::PlacedBlock& block : placed_) statuses_.push_back(block.status);
    status = CopyChunk();
  }
  if (!status.ok()) {
    FinishWith(status);
  } else {
    ReadNext();
  }
}

absl::Status WriteStream::CopyChunk() {
  KVT_RETURN_IF_ERROR(CheckChunk());
  if (!session_.BeginCopying()) return absl::CancelledError("cancelled");
  for (const std::span<const std::byte> part : parsed_.parts) TakePart(part);
  session_.EndCopying();
  return absl::OkStatus();
}

absl::Status WriteStream::CheckChunk() const {
  const uint64_t chunk_bytes = parsed_.chunk_bytes;
  if (chunk_bytes > kChunkBytesMax) {
    return BadArgument(Invalid("chunk: %d bytes, more than %d", chunk_bytes, kChunkBytesMax));
  }
  const uint64_t total_bytes = keys_.size() * block_bytes_;
  if (chunk_bytes <= total_bytes - received_bytes_) return absl::OkStatus();
  return BadArgument(
      Invalid("chunk: more than the %d bytes of %d blocks", total_bytes, keys_.size()));
}

void WriteStream::TakePart(std::span<const std::byte> rest) {
  while (!rest.empty()) {
    const uint64_t at = received_bytes_ % block_bytes_;
    const auto part = rest.first(std::min<uint64_t>(rest.size(), block_bytes_ - at));
    const core::PlacedBlock& block = placed_[received_bytes_ / block_bytes_];
    // The bytes of blocks that need no filling are left out.
    if (block.status == BlockStatus::kOk) {
      MappedTier* const tier = service_.store->tiers().Memory(block.tier);
      std::memcpy(tier->Mapped(block.replica).data() + at, part.data(), part.size());
      block_crc32c_ = Crc32c(part, block_crc32c_);
    }
    received_bytes_ += part.size();
    rest = rest.subspan(part.size());
    if (received_bytes_ % block_bytes_ == 0) EndOfBlock();
  }
}

void WriteStream::EndOfBlock() {
  const size_t idx = received_bytes_ / block_bytes_ - 1;
  if (statuses_[idx] == BlockStatus::kOk && block_crc32c_ != crc32cs_[idx]) {
    statuses_[idx] = BlockStatus::kCorrupt;
  }
  block_crc32c_ = 0;
}

absl::Status WriteStream::Publish() {
  if (!begun_) return BadArgument(Invalid("header: missing, the stream is empty"));
  const uint64_t total_bytes = keys_.size() * block_bytes_;
  if (received_bytes_ != total_bytes) {
    return BadArgument(
        Invalid("chunk: the stream ended after %d of %d bytes", received_bytes_, total_bytes));
  }
  std::vector<size_t> filled;
  std::vector<Key> keys;
  std::vector<uint32_t> crc32cs;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (statuses_[i] != BlockStatus::kOk) continue;
    filled.push_back(i);
    keys.push_back(keys_[i]);
    crc32cs.push_back(crc32cs_[i]);
  }
  KVT_ASSIGN_OR_RETURN(
      const std::vector<BlockStatus> committed,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.Commit(opened_.session, opened_.ns, keys, crc32cs, now_ms, effects);
      }));
  for (size_t i = 0; i < filled.size(); ++i) statuses_[filled[i]] = committed[i];
  v1::WriteResponse response;
  response.set_epoch(service_.epoch);
  response.set_statuses(PackStatuses(statuses_));
  *response_ = SerializeMessage(response);
  return absl::OkStatus();
}

void WriteStream::FinishWith(const absl::Status& status) {
  // Blocks that were not committed are given back.
  session_.End();
  Finish(ToGrpc(status));
}

void WriteStream::OnCancel() { session_.Cancel(); }

void WriteStream::OnDone() {
  session_.Detach();
  service_.data_calls->Remove(this);
  // May be the last reference.
  const std::shared_ptr<WriteStream> self = std::move(self_);
}

void WriteStream::OnBeat(uint64_t now_ms) { session_.CancelIfExpired(now_ms); }

}  // namespace kvtier
