// SPDX-License-Identifier: Apache-2.0
#include "daemon/read_stream.h"

#include <algorithm>
#include <utility>

#include "daemon/requests.h"
#include "proto/base/packed.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {

ReadStream* ReadStream::Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                              const v1::ReadRequest& request) {
  auto stream = std::make_shared<ReadStream>(service, context);
  stream->self_ = stream;
  const bool full = service.data_calls->count() >= service.data_streams_max;
  service.data_calls->Add(stream);
  const absl::Status begun =
      full ? WithReason(Exhausted("%d Write and Read streams are open, which is the limit",
                                  service.data_streams_max),
                        reason::kLimitReached)
           : stream->Begin(request);
  if (!begun.ok()) stream->FinishWith(begun);
  return stream.get();
}

ReadStream::ReadStream(const ServiceContext& service, grpc::CallbackServerContext* context)
    : service_(service),
      context_(context),
      session_(service.store, context, DeadlineMs(*context, kDefaultTransferDeadlineMs)) {}

absl::Status ReadStream::Begin(const v1::ReadRequest& request) {
  KVT_ASSIGN_OR_RETURN(const auto client, service_.sessions->Find(request.session_id()));
  KVT_ASSIGN_OR_RETURN(
      const core::NamespaceSpec spec,
      service_.sessions->FindNamespace(request.session_id(), request.namespace_id()));
  KVT_ASSIGN_OR_RETURN(keys_, ParseKeys(request.keys()));
  block_bytes_ = spec.block_bytes;
  KVT_ASSIGN_OR_RETURN(opened_, session_.Open(client.owner, spec));
  // Half of the time for reading from nvme, half for sending.
  const core::TimeMs deadline_ms =
      MonotonicMs() + BudgetMs(*context_, kDefaultTransferDeadlineMs) / 2;
  service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.Acquire(
        opened_.session, opened_.ns, keys_, deadline_ms, now_ms,
        [this](absl::StatusOr<core::AcquireResult> result) { OnAcquired(std::move(result)); },
        effects);
  });
  return absl::OkStatus();
}

void ReadStream::OnAcquired(absl::StatusOr<core::AcquireResult> result) {
  if (!result.ok()) {
    FinishWith(result.status());
    return;
  }
  std::vector<BlockStatus> statuses;
  std::vector<uint32_t> crc32cs;
  for (const core::PlacedBlock& block : result->blocks) {
    const bool prefix = blocks_.size() == statuses.size();
    if (prefix && block.status == BlockStatus::kOk) blocks_.push_back(block);
    statuses.push_back(block.status);
    crc32cs.push_back(block.crc32c);
  }
  v1::ReadHeader* header = message_.mutable_header();
  header->set_epoch(service_.epoch);
  header->set_statuses(PackStatuses(statuses));
  header->set_crc32cs(PackRecords<uint32_t>(crc32cs));
  SendChunk();
}

void ReadStream::SendChunk() {
  if (!session_.BeginCopying()) {
    FinishWith(absl::CancelledError("cancelled"));
    return;
  }
  FillChunk();
}

void ReadStream::FillChunk() {
  std::string* chunk = message_.mutable_chunk();
  const uint64_t total_bytes = blocks_.size() * block_bytes_;
  while (sent_bytes_ < total_bytes && chunk->size() < kChunkBytesMax) {
    const size_t block_idx = sent_bytes_ / block_bytes_;
    const core::PlacedBlock& block = blocks_[block_idx];
    std::span<const std::byte> payload =
        service_.store->tiers().Memory(block.tier)->Mapped(block.replica);
    if (payload.empty()) {
      if (fetched_idx_ != block_idx) return Fetch(block_idx);
      payload = fetched_;
    }
    const uint64_t at = sent_bytes_ % block_bytes_;
    const size_t part_bytes = std::min<uint64_t>(block_bytes_ - at, kChunkBytesMax - chunk->size());
    chunk->append(reinterpret_cast<const char*>(payload.data()) + at, part_bytes);
    sent_bytes_ += part_bytes;
  }
  session_.EndCopying();
  StartWrite(&message_);
}

void ReadStream::Fetch(size_t block_idx) {
  const core::PlacedBlock& block = blocks_[block_idx];
  BlockMeta meta;
  meta.key = keys_[block_idx];
  meta.payload_bytes = static_cast<uint32_t>(block_bytes_);
  meta.crc32c = block.crc32c;
  fetched_.resize(block_bytes_);
  service_.store->tiers()
      .Memory(block.tier)
      ->Read(block.replica, meta, fetched_,
             [this, block_idx](absl::Status status) { OnFetched(block_idx, status); });
}

void ReadStream::OnFetched(size_t block_idx, const absl::Status& status) {
  if (status.ok()) {
    fetched_idx_ = block_idx;
    FillChunk();
    return;
  }
  if (absl::IsDataLoss(status)) {
    service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.ReportBad(opened_.session, opened_.ns, std::span(&keys_[block_idx], 1), now_ms, effects)
          .IgnoreError();
    });
  }
  session_.EndCopying();
  FinishWith(status);
}

void ReadStream::OnWriteDone(bool ok) {
  if (!ok) {
    FinishWith(absl::CancelledError("the client cancelled"));
  } else if (sent_bytes_ == blocks_.size() * block_bytes_) {
    FinishWith(absl::OkStatus());
  } else {
    message_.Clear();
    SendChunk();
  }
}

void ReadStream::FinishWith(const absl::Status& status) {
  session_.End();
  Finish(ToGrpc(status));
}

void ReadStream::OnCancel() { session_.Cancel(); }

void ReadStream::OnDone() {
  session_.Detach();
  service_.data_calls->Remove(this);
  // May be the last reference.
  const std::shared_ptr<ReadStream> self = std::move(self_);
}

void ReadStream::OnBeat(uint64_t now_ms) { session_.CancelIfExpired(now_ms); }

}  // namespace kvtier
