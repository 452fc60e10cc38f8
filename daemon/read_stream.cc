// SPDX-License-Identifier: Apache-2.0
#include "daemon/read_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/call_admission.h"
#include "daemon/requests.h"
#include "proto/base/packed.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {

ReadStream* ReadStream::Start(const ServiceContext& service, grpc::CallbackServerContext* context,
                              grpc::ByteBuffer request) {
  auto stream = std::make_shared<ReadStream>(service, context);
  stream->self_ = stream;
  const bool full = service.data_calls->count() >= service.data_streams_max;
  service.data_calls->Add(stream);
  const absl::Status begun =
      full ? WithReason(Exhausted("%d Write and Read streams are open, which is the limit",
                                  service.data_streams_max),
                        reason::kLimitReached)
           : stream->Begin(&request);
  if (!begun.ok()) stream->FinishWith(begun);
  return stream.get();
}

ReadStream::ReadStream(const ServiceContext& service, grpc::CallbackServerContext* context)
    : service_(service),
      context_(context),
      session_(service.store, context, DeadlineMs(*context, kDefaultTransferDeadlineMs)) {}

absl::Status ReadStream::Begin(grpc::ByteBuffer* bytes) {
  v1::ReadRequest request;
  KVT_RETURN_IF_ERROR(ParseMessage(bytes, &request));
  KVT_ASSIGN_OR_RETURN(const auto client, AdmitCall(service_, *context_, request.session_id()));
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
  header_.set_epoch(service_.epoch);
  header_.set_statuses(PackStatuses(statuses));
  header_.set_crc32cs(PackRecords<uint32_t>(crc32cs));
  steps_left_ = 1;
  if (FillChunk()) OnStepDone();
}

void ReadStream::OnStepDone() {
  // A step that is done at once comes round again here, and not deeper: chains are long.
  while (steps_left_.fetch_sub(1) == 1) {
    if (!written_ok_) return FinishWith(absl::CancelledError("the client cancelled"));
    if (!fill_status_.ok()) return FinishWith(fill_status_);
    if (AllIsSent()) return FinishWith(absl::OkStatus());
    steps_left_ = 2;
    SendChunk();
    if (!FillChunk()) return;
  }
}

void ReadStream::SendChunk() {
  message_ = MakeChunkMessage(header_sent_ ? nullptr : &header_,
                              chunk_.has_value() ? std::move(chunk_->slice) : grpc::Slice());
  header_sent_ = true;
  chunk_.reset();
  StartWrite(&message_);
}

bool ReadStream::FillChunk() {
  const uint64_t left_bytes = blocks_.size() * block_bytes_ - taken_bytes_;
  if (left_bytes == 0) return true;
  if (!session_.BeginCopying()) {
    fill_status_ = absl::CancelledError("cancelled");
    return true;
  }
  chunk_.emplace(std::min<uint64_t>(left_bytes, kChunkBytesMax));
  chunk_filled_bytes_ = 0;
  return CopyToChunk();
}

bool ReadStream::CopyToChunk() {
  while (chunk_filled_bytes_ < chunk_->bytes.size()) {
    const size_t block_idx = taken_bytes_ / block_bytes_;
    const core::PlacedBlock& block = blocks_[block_idx];
    std::span<const std::byte> payload =
        service_.store->tiers().Memory(block.tier)->Mapped(block.replica);
    if (payload.empty()) {
      if (fetched_idx_ != block_idx) {
        Fetch(block_idx);
        return false;
      }
      payload = fetched_;
    }
    const uint64_t at = taken_bytes_ % block_bytes_;
    const std::span<std::byte> rest = chunk_->bytes.subspan(chunk_filled_bytes_);
    const size_t part_bytes = std::min<uint64_t>(block_bytes_ - at, rest.size());
    std::memcpy(rest.data(), payload.data() + at, part_bytes);
    chunk_filled_bytes_ += part_bytes;
    taken_bytes_ += part_bytes;
  }
  session_.EndCopying();
  return true;
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
    if (CopyToChunk()) OnStepDone();
    return;
  }
  if (absl::IsDataLoss(status)) {
    service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.ReportBad(opened_.session, opened_.ns, std::span(&keys_[block_idx], 1), now_ms, effects)
          .IgnoreError();
    });
  }
  session_.EndCopying();
  fill_status_ = status;
  OnStepDone();
}

void ReadStream::OnWriteDone(bool ok) {
  written_ok_ = ok;
  OnStepDone();
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
