// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/nvme_tier.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/nvme_impl.h"

namespace kvtier {

absl::StatusOr<ReplicaId> NvmeTier::Impl::Reserve(uint32_t payload_bytes) {
  const uint64_t footprint_bytes = FootprintBytes(payload_bytes);
  if (payload_bytes == 0 || footprint_bytes > RoomBytes()) {
    return Invalid("nvme: a block of %d bytes: must have 1 to %d bytes (one segment)",
                   payload_bytes, RoomBytes() - nvme::kPageBytes);
  }
  absl::MutexLock lock(&mutex_);
  if (!is_recovered_ || is_closing_) return Unavailable("nvme: not open");
  if (health_.degraded) return Unavailable("nvme: degraded: %s", health_.reason);
  KVT_RETURN_IF_ERROR(budget_.Check(Now()));
  const uint64_t capacity_bytes = segments_->capacity_bytes();
  if (used_bytes_ + footprint_bytes > capacity_bytes) {
    return Exhausted("nvme: no room for %d bytes: %d of %d bytes are reserved", footprint_bytes,
                     used_bytes_, capacity_bytes);
  }
  used_bytes_ += footprint_bytes;
  return replicas_.Add(payload_bytes);
}

void NvmeTier::Impl::Free(ReplicaId replica_id) {
  absl::MutexLock lock(&mutex_);
  Replica& replica = replicas_.At(replica_id);
  KVT_CHECK(!replica.is_freed && replica.state != ReplicaState::kWriting);
  used_bytes_ -= FootprintBytes(replica.payload_bytes);
  if (replica.state != ReplicaState::kLive) {
    replicas_.Remove(replica_id);
    return;
  }
  replica.is_freed = true;
  segments_->Pin(replica.segment_idx);
  segments_->Drop(replica.at(), nvme::RecordBytes(replica.payload_bytes));
  frees_.push_back(replica_id);
}

uint64_t NvmeTier::Impl::FootprintBytes(uint32_t payload_bytes) const {
  const uint64_t record_bytes = nvme::RecordBytes(payload_bytes);
  if (record_bytes > RoomBytes()) return record_bytes;
  const uint64_t share_bytes = RoomBytes() / (RoomBytes() / record_bytes);
  return share_bytes / nvme::kPageBytes * nvme::kPageBytes;
}

TierUsage NvmeTier::Impl::Usage() const {
  absl::MutexLock lock(&mutex_);
  return {.capacity_bytes = segments_->capacity_bytes(),
          .used_bytes = used_bytes_,
          .physical_bytes = physical_bytes_};
}

void NvmeTier::Impl::Write(ReplicaId replica_id, const BlockMeta& meta,
                           std::span<const std::byte> source, Done done) {
  absl::Status status;
  std::optional<WriteRequest> unchecked;
  bool needs_wake = false;
  {
    absl::MutexLock lock(&mutex_);
    Replica& replica = replicas_.At(replica_id);
    KVT_CHECK(!replica.is_freed && replica.state == ReplicaState::kReserved);
    if (meta.payload_bytes != replica.payload_bytes || source.size() < meta.payload_bytes) {
      status = Invalid("nvme: block %s of %d bytes: %d were reserved, the source has %d",
                       meta.key.Hex(), meta.payload_bytes, replica.payload_bytes, source.size());
    } else if (is_closing_) {
      status = Unavailable("nvme: closing");
    } else if (write_count_ >= options_.queue_limit) {
      status = Exhausted("nvme: %d writes are queued", write_count_);
    } else {
      ++write_count_;
      replica.state = ReplicaState::kWriting;
      replicas_.Name(&replica, meta.namespace_hash, meta.key);
      WriteRequest request{.replica_id = replica_id,
                           .meta = meta,
                           .source = source.first(meta.payload_bytes),
                           .done = std::move(done)};
      if (meta.payload_bytes > kCheckedHereBytesMax) {
        ++check_count_;
        unchecked = std::move(request);
      } else {
        needs_wake = QueueWrite(std::move(request));
      }
    }
  }
  if (!status.ok()) {
    std::move(done)(std::move(status));
  } else if (unchecked) {
    checkers_->Submit(
        [this, request = std::move(*unchecked)]() mutable { CheckWrite(std::move(request)); });
  } else if (needs_wake) {
    engine_->Wake();
  }
}

bool NvmeTier::Impl::QueueWrite(WriteRequest request) {
  const bool needs_wake = !HasNewWork();
  new_writes_.push_back(std::move(request));
  return needs_wake;
}

void NvmeTier::Impl::CheckWrite(WriteRequest request) {
  request.check = CheckSource(request);
  bool needs_wake;
  {
    absl::MutexLock lock(&mutex_);
    --check_count_;
    needs_wake = QueueWrite(std::move(request));
  }
  if (needs_wake) engine_->Wake();
}

void NvmeTier::Impl::Read(ReplicaId replica_id, const BlockMeta& meta, std::span<std::byte> target,
                          Urgency urgency, Done done) {
  // What nobody waits for leaves room for what somebody will.
  const int limit = urgency == Urgency::kAhead ? options_.queue_limit / 2 : options_.queue_limit;
  absl::Status status;
  bool needs_wake = false;
  {
    absl::MutexLock lock(&mutex_);
    const Replica& replica = replicas_.At(replica_id);
    KVT_CHECK(!replica.is_freed);
    if (replica.state != ReplicaState::kLive || meta.payload_bytes != replica.payload_bytes) {
      status = DataLoss("nvme: replica %d does not hold block %s", replica_id, meta.key.Hex());
    } else if (target.size() < meta.payload_bytes) {
      status = Invalid("nvme: block %s of %d bytes: the target has %d", meta.key.Hex(),
                       meta.payload_bytes, target.size());
    } else if (is_closing_) {
      status = Unavailable("nvme: closing");
    } else if (read_count_ >= limit) {
      status = Exhausted("nvme: %d reads are queued", read_count_);
    } else {
      ++read_count_;
      // Whoever found the queues empty has woken the I/O thread, which takes all of them.
      needs_wake = !HasNewWork();
      new_reads_.push_back({.replica_id = replica_id,
                            .meta = meta,
                            .target = target.first(meta.payload_bytes),
                            .urgency = urgency,
                            .done = std::move(done)});
    }
  }
  if (!status.ok()) {
    std::move(done)(std::move(status));
  } else if (needs_wake) {
    engine_->Wake();
  }
}

void NvmeTier::Impl::Expedite(ReplicaId replica_id) {
  bool needs_wake;
  {
    absl::MutexLock lock(&mutex_);
    if (read_count_ == 0) return;
    needs_wake = !HasNewWork();
    expedited_.push_back(replica_id);
  }
  if (needs_wake) engine_->Wake();
}

void NvmeTier::Impl::Finish(Finished finished) {
  if (!finished.done) return;
  {
    absl::MutexLock lock(&mutex_);
    --(finished.is_write ? write_count_ : read_count_);
    useful_read_bytes_ += finished.useful_bytes;
  }
  std::move(finished.done)(std::move(finished.status));
}

void NvmeTier::Impl::Degrade(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (health_.degraded) return;
    health_ = {.degraded = true, .reason = reason.ToString()};
  }
  spdlog::error("nvme: degraded: {}: {}", options_.dir, reason.ToString());
}

TierHealth NvmeTier::Impl::Health() const {
  absl::MutexLock lock(&mutex_);
  return health_;
}

NvmeStats NvmeTier::Impl::Stats() const {
  absl::MutexLock lock(&mutex_);
  return {.io_engine = engine_name_,
          .registered_bytes = registered_bytes_,
          .is_direct = dir_ != nullptr && dir_->is_direct(),
          .segment_bytes = segment_bytes_,
          .segment_count = segments_->file_count(),
          .physical_bytes = physical_bytes_,
          .live_bytes = segments_->live_bytes(),
          .moved_bytes = moved_bytes_,
          .recovered_count = recovered_count_,
          .dropped_count = dropped_count_,
          .is_rebuilt = is_rebuilt_,
          .sync_count = sync_count_,
          .written_bytes = written_bytes_,
          .useful_read_bytes = useful_read_bytes_,
          .written_today_bytes = budget_.spent().bytes,
          .scrubbed_count = scrubbed_count_,
          .scrub_lost_count = scrub_lost_count_,
          .scrub_round_count = scrub_round_count_};
}

void NvmeTier::Impl::Close() {
  {
    absl::MutexLock lock(&mutex_);
    is_closing_ = true;
  }
  scrub_end_.Notify();
  if (scrub_thread_.joinable()) scrub_thread_.join();
  if (io_thread_.joinable()) {
    if (engine_ != nullptr) engine_->Wake();
    io_thread_.join();
  }
  // Ends the reads that are being checked.
  checkers_.reset();
  {
    absl::MutexLock lock(&mutex_);
    is_io_done_ = true;
  }
  if (index_thread_.joinable()) {
    index_thread_.join();
    KeepSpent(/*is_due_only=*/false);
  }
  index_.reset();
  dir_.reset();
}

NvmeTier::NvmeTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NvmeTier::~NvmeTier() = default;

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Create(const NvmeOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  KVT_RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<NvmeTier>(new NvmeTier(std::move(impl)));
}

absl::StatusOr<ReplicaId> NvmeTier::Reserve(uint32_t payload_bytes, OwnerIdx) {
  return impl_->Reserve(payload_bytes);
}
void NvmeTier::Free(ReplicaId replica) { impl_->Free(replica); }
uint64_t NvmeTier::FootprintBytes(uint32_t payload_bytes) const {
  return impl_->FootprintBytes(payload_bytes);
}
TierUsage NvmeTier::Usage() const { return impl_->Usage(); }
void NvmeTier::Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
                     Done done) {
  impl_->Write(replica, meta, source, std::move(done));
}
void NvmeTier::Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                    Done done) {
  impl_->Read(replica, meta, target, Impl::Urgency::kDemand, std::move(done));
}
void NvmeTier::ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                         Done done) {
  impl_->Read(replica, meta, target, Impl::Urgency::kAhead, std::move(done));
}
void NvmeTier::Expedite(ReplicaId replica) { impl_->Expedite(replica); }
absl::Status NvmeTier::Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  return impl_->Recover(found);
}
TierHealth NvmeTier::Health() const { return impl_->Health(); }
NvmeStats NvmeTier::Stats() const { return impl_->Stats(); }
SegmentObserver& NvmeTier::memory_observer() { return *impl_; }
void NvmeTier::Close() { impl_->Close(); }

}  // namespace kvtier
