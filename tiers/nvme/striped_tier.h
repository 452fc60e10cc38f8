// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tiers/memory/segment_observer.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/tier.h"

namespace kvtier {

// Several directories, each on a drive of its own, as one nvme tier. A block lies whole on one of
// them, chosen with a probability in proportion to its free room, so that drives of any size fill
// up together and serve reads together. A drive that fails takes its blocks with it and nothing
// else; it comes back with them at the next start, or by itself when the failure passes.
//
// Owns its members. Thread-safe; blocks as NvmeTier does. A replica's id is the member's id times
// kMemberCountMax plus the member's index.
class StripedTier final : public Tier, private SegmentObserver {
 public:
  static constexpr size_t kMemberCountMax = 256;

  // One NvmeTier for each of `dirs`, which differ, with `options` but for `dir`, and an equal share
  // of its capacity, budget and scrub rate. Fails with the first error if no directory can be
  // used, and always for FAILED_PRECONDITION and INVALID_ARGUMENT, which no other drive makes good;
  // a directory with another error is left out, and Health says so.
  static absl::StatusOr<std::unique_ptr<StripedTier>> Create(const std::vector<std::string>& dirs,
                                                             const NvmeOptions& options);

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
  std::span<std::byte> Mapped(ReplicaId) override { return {}; }
  // A block that several members hold (a directory from elsewhere) is kept on the first.
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override;
  // Degraded when no member takes blocks. `reason` names every member that does not, also while
  // others do.
  TierHealth Health() const override;

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
    std::string dir;
    // Null: could not be opened. One that could not be recovered is closed and stays, for the
    // memory it was told of outlives it.
    std::unique_ptr<NvmeTier> tier;
    // Why it is left out; OK: it is not.
    absl::Status failure;
  };
  struct Choice {
    size_t drive_idx = 0;
    uint64_t free_bytes = 0;
  };

  explicit StripedTier(std::vector<Drive> drives) : drives_(std::move(drives)) {}
  // SegmentObserver.
  void OnMapped(std::span<std::byte> segment) override;
  void OnUnmapping(std::span<std::byte> segment) override;

  NvmeTier& TierOf(ReplicaId replica) const;
  std::vector<Choice> DrawOrder();

  std::vector<Drive> drives_;  // fixed but for `failure`, which is after Recover
  absl::Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_){std::random_device{}()};
};

}  // namespace kvtier
