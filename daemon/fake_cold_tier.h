// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/status_util.h"
#include "tiers/tier.h"

namespace kvtier {

// A cold tier in a map, for tests of what drives tiers: answers at once, inside the call (the worst
// case for recursion), or, after Hold, when Release is called. Thread-safe.
class FakeColdTier final : public Tier {
 public:
  void Hold() {
    absl::MutexLock lock(&mutex_);
    holding_ = true;
  }
  // Answers everything held, and at once from now on.
  void Release() {
    std::vector<std::pair<Done, absl::Status>> held;
    {
      absl::MutexLock lock(&mutex_);
      holding_ = false;
      held.swap(held_);
    }
    for (auto& [done, status] : held) std::move(done)(std::move(status));
  }
  size_t held_count() const {
    absl::MutexLock lock(&mutex_);
    return held_.size();
  }
  void AwaitHeld(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [this, count]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return held_.size() >= count; };
    mutex_.Await(absl::Condition(&enough));
  }
  void FailWith(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    failure_ = std::move(status);
  }
  // Found by the next Recover.
  ReplicaId AddRecoverable(const BlockMeta& meta) {
    absl::MutexLock lock(&mutex_);
    contents_[next_] = {};
    recoverable_.emplace_back(meta, next_);
    return next_++;
  }
  // Of ReadAhead, and of Expedite, in order.
  std::vector<ReplicaId> read_ahead() const {
    absl::MutexLock lock(&mutex_);
    return read_ahead_;
  }
  std::vector<ReplicaId> expedited() const {
    absl::MutexLock lock(&mutex_);
    return expedited_;
  }
  bool Holds(ReplicaId replica) const {
    absl::MutexLock lock(&mutex_);
    return contents_.contains(replica);
  }

  absl::StatusOr<ReplicaId> Reserve(uint32_t, OwnerIdx) override {
    absl::MutexLock lock(&mutex_);
    contents_[next_] = {};
    return next_++;
  }
  void Free(ReplicaId replica) override {
    absl::MutexLock lock(&mutex_);
    contents_.erase(replica);
  }
  uint64_t FootprintBytes(uint32_t payload_bytes) const override { return payload_bytes; }
  TierUsage Usage() const override { return {.capacity_bytes = 1ULL << 40}; }
  TierId id() const override { return TierId::kNvme; }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override {
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      contents_[replica].assign(source.begin(), source.begin() + meta.payload_bytes);
      status = failure_;
    }
    Answer(std::move(done), std::move(status));
  }
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override {
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      const std::vector<std::byte>& bytes = contents_[replica];
      status = failure_;
      if (status.ok() && bytes.size() != meta.payload_bytes) status = DataLoss("no such bytes");
      if (status.ok()) std::copy(bytes.begin(), bytes.end(), target.begin());
    }
    Answer(std::move(done), std::move(status));
  }
  void ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                 Done done) override {
    {
      absl::MutexLock lock(&mutex_);
      read_ahead_.push_back(replica);
    }
    Read(replica, meta, target, std::move(done));
  }
  void Expedite(ReplicaId replica) override {
    absl::MutexLock lock(&mutex_);
    expedited_.push_back(replica);
  }
  std::span<std::byte> Mapped(ReplicaId) override { return {}; }
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override {
    std::vector<std::pair<BlockMeta, ReplicaId>> recoverable;
    {
      absl::MutexLock lock(&mutex_);
      recoverable.swap(recoverable_);
    }
    for (const auto& [meta, replica] : recoverable) found(meta, replica);
    return absl::OkStatus();
  }
  TierHealth Health() const override { return {}; }

 private:
  void Answer(Done done, absl::Status status) {
    {
      absl::MutexLock lock(&mutex_);
      if (holding_) {
        held_.emplace_back(std::move(done), std::move(status));
        return;
      }
    }
    std::move(done)(std::move(status));
  }

  mutable absl::Mutex mutex_;
  std::map<ReplicaId, std::vector<std::byte>> contents_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<BlockMeta, ReplicaId>> recoverable_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<Done, absl::Status>> held_ ABSL_GUARDED_BY(mutex_);
  std::vector<ReplicaId> read_ahead_ ABSL_GUARDED_BY(mutex_);
  std::vector<ReplicaId> expedited_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool holding_ ABSL_GUARDED_BY(mutex_) = false;
  ReplicaId next_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace kvtier
