// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "tiers/tier.h"

namespace kvtier {

// A tier that fails on request; otherwise it is the tier it wraps. For tests of everything above
// the tiers. Owns the wrapped tier. Thread-safe, and may be scripted while in use.
class FaultyTier final : public MappedTier {
 public:
  // Place and ExportSegment need a MappedTier inside (checked).
  explicit FaultyTier(std::unique_ptr<Tier> inner) : inner_(std::move(inner)) {}
  // Requires: no completion is held.
  ~FaultyTier() override;

  // The next `count` calls answer `status` and do nothing.
  void FailReserves(int count, absl::Status status);
  void FailWrites(int count, absl::Status status);
  void FailReads(int count, absl::Status status);
  // The next `count` writes get a source with one flipped byte.
  void CorruptWrites(int count);
  // The next `count` reads that end well flip one byte of the target and still say OK, as a tier
  // that does not check would.
  void CorruptReads(int count);
  // Completions of reads and writes wait for a release.
  void HoldCompletions();
  size_t held_count() const;
  // Lets the oldest held completion go; false when there is none.
  bool ReleaseOne();
  // Lets all of them go, and holds no more.
  void ReleaseAll();
  // Health() says so; calls still work.
  void SetHealth(TierHealth health);

  Tier& inner() { return *inner_; }

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override { inner_->Free(replica); }
  void OnCommitted(ReplicaId replica, const BlockMeta& meta) override {
    inner_->OnCommitted(replica, meta);
  }
  uint64_t FootprintBytes(uint32_t payload_bytes) const override {
    return inner_->FootprintBytes(payload_bytes);
  }
  TierUsage Usage() const override { return inner_->Usage(); }
  uint64_t OwnerSegmentBytes(OwnerIdx owner) const override {
    return inner_->OwnerSegmentBytes(owner);
  }
  TierId id() const override { return inner_->id(); }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override;
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override;
  void ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                 Done done) override;
  void Expedite(ReplicaId replica) override { inner_->Expedite(replica); }
  std::span<std::byte> Mapped(ReplicaId replica) override { return inner_->Mapped(replica); }
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override {
    return inner_->Recover(found);
  }
  TierHealth Health() const override;
  SlotPlace Place(ReplicaId replica) const override;
  absl::StatusOr<SegmentHandle> ExportSegment(uint32_t segment_idx, bool writable) const override;

 private:
  struct Failure {
    int count = 0;
    absl::Status status;
    // The scripted status, once per count; OK when there is none.
    absl::Status Take();
  };
  struct Held {
    Done done;
    absl::Status status;
  };
  const MappedTier& mapped() const;
  // `read` is Read or ReadAhead.
  void StartRead(void (Tier::*read)(ReplicaId, const BlockMeta&, std::span<std::byte>, Done),
                 ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target, Done done);
  // Calls `done`, or holds it.
  void Complete(Done done, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::unique_ptr<Tier> inner_;
  mutable absl::Mutex mutex_;
  Failure reserve_failure_ ABSL_GUARDED_BY(mutex_);
  Failure write_failure_ ABSL_GUARDED_BY(mutex_);
  Failure read_failure_ ABSL_GUARDED_BY(mutex_);
  int corrupt_write_count_ ABSL_GUARDED_BY(mutex_) = 0;
  int corrupt_read_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_holding_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Held> held_ ABSL_GUARDED_BY(mutex_);
  TierHealth health_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
