// SPDX-License-Identifier: Apache-2.0
#include "tiers/faulty_tier.h"

#include <vector>

#include "proto/base/check.h"

namespace kvtier {

FaultyTier::~FaultyTier() { KVT_CHECK(held_count() == 0); }

absl::Status FaultyTier::Failure::Take() {
  if (count == 0) return absl::OkStatus();
  --count;
  return status;
}

void FaultyTier::FailReserves(int count, absl::Status status) {
  absl::MutexLock lock(&mutex_);
  reserve_failure_ = {.count = count, .status = std::move(status)};
}

void FaultyTier::FailWrites(int count, absl::Status status) {
  absl::MutexLock lock(&mutex_);
  write_failure_ = {.count = count, .status = std::move(status)};
}

void FaultyTier::FailReads(int count, absl::Status status) {
  absl::MutexLock lock(&mutex_);
  read_failure_ = {.count = count, .status = std::move(status)};
}

void FaultyTier::CorruptWrites(int count) {
  absl::MutexLock lock(&mutex_);
  corrupt_write_count_ = count;
}

void FaultyTier::CorruptReads(int count) {
  absl::MutexLock lock(&mutex_);
  corrupt_read_count_ = count;
}

void FaultyTier::HoldCompletions() {
  absl::MutexLock lock(&mutex_);
  is_holding_ = true;
}

size_t FaultyTier::held_count() const {
  absl::MutexLock lock(&mutex_);
  return held_.size();
}

bool FaultyTier::ReleaseOne() {
  Held held;
  {
    absl::MutexLock lock(&mutex_);
    if (held_.empty()) return false;
    held = std::move(held_.front());
    held_.pop_front();
  }
  std::move(held.done)(std::move(held.status));
  return true;
}

void FaultyTier::ReleaseAll() {
  {
    absl::MutexLock lock(&mutex_);
    is_holding_ = false;
  }
  while (ReleaseOne()) {
  }
}

void FaultyTier::SetHealth(TierHealth health) {
  absl::MutexLock lock(&mutex_);
  health_ = std::move(health);
}

absl::StatusOr<ReplicaId> FaultyTier::Reserve(uint32_t payload_bytes, OwnerIdx owner) {
  {
    absl::MutexLock lock(&mutex_);
    if (absl::Status failure = reserve_failure_.Take(); !failure.ok()) return failure;
  }
  return inner_->Reserve(payload_bytes, owner);
}

void FaultyTier::Complete(Done done, absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    if (is_holding_) {
      held_.push_back({.done = std::move(done), .status = std::move(status)});
      return;
    }
  }
  std::move(done)(std::move(status));
}

void FaultyTier::Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
                       Done done) {
  absl::Status failure;
  bool is_corrupt = false;
  {
    absl::MutexLock lock(&mutex_);
    failure = write_failure_.Take();
    if (failure.ok() && corrupt_write_count_ > 0) {
      --corrupt_write_count_;
      is_corrupt = true;
    }
  }
  if (!failure.ok()) {
    Complete(std::move(done), std::move(failure));
    return;
  }
  // Lives until the inner write is done.
  auto flipped = std::make_unique<std::vector<std::byte>>();
  if (is_corrupt) {
    flipped->assign(source.begin(), source.end());
    flipped->at(flipped->size() / 2) ^= std::byte{1};
    source = *flipped;
  }
  inner_->Write(replica, meta, source,
                [this, flipped = std::move(flipped), done = std::move(done)](
                    absl::Status status) mutable { Complete(std::move(done), std::move(status)); });
}

void FaultyTier::Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                      Done done) {
  StartRead(&Tier::Read, replica, meta, target, std::move(done));
}

void FaultyTier::ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                           Done done) {
  StartRead(&Tier::ReadAhead, replica, meta, target, std::move(done));
}

void FaultyTier::StartRead(void (Tier::*read)(ReplicaId, const BlockMeta&, std::span<std::byte>,
                                              Done),
                           ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                           Done done) {
  absl::Status failure;
  {
    absl::MutexLock lock(&mutex_);
    failure = read_failure_.Take();
  }
  if (!failure.ok()) {
    Complete(std::move(done), std::move(failure));
    return;
  }
  ((*inner_).*read)(replica, meta, target,
                    [this, target, payload_bytes = meta.payload_bytes,
                     done = std::move(done)](absl::Status status) mutable {
                      if (status.ok()) {
                        absl::MutexLock lock(&mutex_);
                        if (corrupt_read_count_ > 0) {
                          --corrupt_read_count_;
                          target[payload_bytes / 2] ^= std::byte{1};
                        }
                      }
                      Complete(std::move(done), std::move(status));
                    });
}

TierHealth FaultyTier::Health() const {
  {
    absl::MutexLock lock(&mutex_);
    if (health_.degraded) return health_;
  }
  return inner_->Health();
}

const MappedTier& FaultyTier::mapped() const {
  const auto* mapped = dynamic_cast<const MappedTier*>(inner_.get());
  KVT_CHECK(mapped != nullptr);
  return *mapped;
}

SlotPlace FaultyTier::Place(ReplicaId replica) const { return mapped().Place(replica); }

absl::StatusOr<SegmentHandle> FaultyTier::ExportSegment(uint32_t segment_idx, bool writable) const {
  return mapped().ExportSegment(segment_idx, writable);
}

}  // namespace kvtier
