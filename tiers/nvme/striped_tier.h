// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/timed_wait.h"
#include "tiers/memory/segment_observer.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/tier.h"

namespace kvtier {

// Several directories, each on a drive of its own, as one nvme tier. A block lies whole on one of
// them, chosen with a probability in proportion to its free room, so that drives of any size fill
// up together and serve reads together. A drive that fails takes its blocks with it and nothing
// else, and comes back by itself when the failure passes: one that was in use goes on, and one that
// could not be opened or recovered at the start is tried again (StartRejoining).
//
// Owns its members. Thread-safe; blocks as NvmeTier does. A replica's id is the member's id times
// kMemberCountMax plus the member's index.
class StripedTier final : public Tier, private SegmentObserver {
 public:
  static constexpr size_t kMemberCountMax = 256;

  // One NvmeTier for each of `dirs`, which differ, with `options` but for `dir`, and an equal share
  // of its capacity, budget and scrub rate. A directory that cannot be used is left out, and Health
  // says so. Errors: FAILED_PRECONDITION and INVALID_ARGUMENT of any directory, which no other
  // drive makes good; the first one if no directory can be used and none may be once its drive
  // works (UNAVAILABLE, RESOURCE_EXHAUSTED: full, read-only, I/O errors).
  static absl::StatusOr<std::unique_ptr<StripedTier>> Create(const std::vector<std::string>& dirs,
                                                             const NvmeOptions& options);
  ~StripedTier() override { EndRejoining(); }

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override;
  // Of the member where a block takes most; the same on all that were created with one segment
  // size.
  uint64_t FootprintBytes(uint32_t payload_bytes) const override;
  TierUsage Usage() const override;
  TierId id() const override { return TierId::kNvme; }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override;
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override;
  void ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                 Done done) override;
  void Expedite(ReplicaId replica) override;
  std::span<std::byte> Mapped(ReplicaId) override { return {}; }
  // A block that several members hold (a directory from elsewhere) is kept on the first.
  // Drives that cannot be recovered are left out. Errors: as of Create, when none is left.
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override;
  // Degraded when no member takes blocks. `reason` names every member that does not, also while
  // others do.
  TierHealth Health() const override;

  using Blocks = std::vector<std::pair<BlockMeta, ReplicaId>>;
  // From now on tries the directories that are left out again, one at a time, every five
  // heal_interval_ms. `joined` is given the blocks of one that has come back, on a thread of this;
  // the receiver frees those it has no use for. Once, after Recover.
  void StartRejoining(std::function<void(const Blocks&)> joined);
  // Waits for a try in progress. `joined` is called no more. Idempotent; Close does it.
  void EndRejoining();

  // See NvmeTier; tells every member. Calls are allowed from Create on, also while Recover runs,
  // and after Close.
  SegmentObserver& memory_observer() { return *this; }

  // Sums; `io_engine` is the slowest in use.
  NvmeStats Stats() const;
  // Of each member in use, by index in `dirs`.
  struct Member {
    std::string dir;
    // Empty: in use.
    std::string failure;
    TierUsage usage;
  };
  std::vector<Member> Members() const;
  void Close();

 private:
  struct Drive {
    NvmeOptions options;
    // Null: left out. After Recover it changes once at most, as the last step of joining.
    std::atomic<NvmeTier*> in_use = nullptr;
    // Under memory_mutex_. Null: could not be opened. One that could not be recovered is closed and
    // stays until another takes its place, for it was told of memory.
    std::unique_ptr<NvmeTier> tier;
    // Under mutex_: why it is left out, as of the last try.
    absl::Status failure;
  };
  struct Choice {
    size_t drive_idx = 0;
    uint64_t free_bytes = 0;
  };

  StripedTier() = default;
  // SegmentObserver.
  void OnMapped(std::span<std::byte> segment) override;
  void OnUnmapping(std::span<std::byte> segment) override;

  NvmeTier& TierOf(ReplicaId replica) const;
  // Without a copy: the core asks for usage and footprints all the time.
  template <typename Visit>
  void ForEachInUse(Visit&& visit) const {
    for (const auto& drive : drives_) {
      if (NvmeTier* const tier = drive->in_use; tier != nullptr) visit(*tier);
    }
  }
  std::vector<Choice> DrawOrder();
  absl::Status FailureOf(const Drive& drive) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Says it if it is news.
  void LeaveOut(Drive& drive, const absl::Status& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  // All that are left out, once.
  void TryAgain(const std::function<void(const Blocks&)>& joined);
  // Opens and recovers the drive. Its blocks.
  absl::StatusOr<Blocks> Join(size_t drive_idx) ABSL_LOCKS_EXCLUDED(memory_mutex_);

  // Fixed but for their fields.
  std::vector<std::unique_ptr<Drive>> drives_;
  absl::Mutex memory_mutex_;
  // What a drive that joins is to be told of.
  std::vector<std::span<std::byte>> memory_ ABSL_GUARDED_BY(memory_mutex_);
  mutable absl::Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_){std::random_device{}()};
  TimedNotification rejoining_ends_;
  std::jthread rejoining_;
};

}  // namespace kvtier
