// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/timed_wait.h"
#include "tiers/cuda/copy_lane.h"
#include "tiers/cuda/driver.h"
#include "tiers/cuda/owned.h"
#include "tiers/cuda/pinned_segments.h"
#include "tiers/memory/slot_allocator.h"
#include "tiers/tier.h"

namespace kvtier {

// hbm in the memory of a GPU. Segments are allocations of the driver's virtual memory management,
// zeroed, and given to clients as POSIX file descriptors; the CPU cannot touch them, so Mapped() is
// empty and bytes go in and out through Write and Read alone, which queue and return.
//
// All segments are allocated by Create and stay this tier's, so that what was configured is there
// when it is needed. One that goes to another owner is replaced by new memory, not cleared: the old
// owner's processes may map it for as long as they like. That happens in the background; until it
// is done, Reserve answers UNAVAILABLE for the new owner.
//
// A slot whose copy is late is given back by Free only when the device has finished with it. When
// the device is lost (an error that sticks, or work that never ends), every call answers
// UNAVAILABLE from then on, Health() says why, and `on_lost` is called.
//
// Owns the device, two lanes of copies with their threads (copy_lane.h), a thread that pins host
// memory (pinned_segments.h), and one that keeps segments ready.
// Thread-safe. Reserve and Free do not call the driver.
class CudaTier final : public MappedTier {
 public:
  struct Options {
    // Rounded down to whole segments.
    uint64_t capacity_bytes = 0;
    // A multiple of the device's granularity (2 MiB as a rule).
    uint64_t segment_bytes = 64ULL << 20;
    // See CopyLane::Options.
    uint64_t piece_bytes = 1ULL << 20;
    uint64_t late_ms = 10'000;
    uint64_t hung_ms = 30'000;
    uint64_t abandon_ms = 5'000;
    // Limits what leaves the device, in bytes a second; 0: nothing does. What comes to it never
    // waits for what leaves it.
    uint64_t demote_bytes_per_second = 0;
    // Of the host memory that host_observer() pins; see PinnedSegments::Options.
    uint64_t pin_chunk_bytes = 64ULL << 20;
    std::function<void(const absl::Status&)> on_pin_failure = {};
    std::function<uint64_t()> now_ms = {};
    // How often a device that is asked nothing is asked whether it is still there.
    uint64_t probe_ms = 500;
    // Called once, from a thread of the tier, if the device is lost; may call the tier, must not
    // destroy it.
    std::function<void(const absl::Status&)> on_lost = {};
  };

  // Allocates and zeroes everything. Blocks meanwhile. Errors: INVALID_ARGUMENT (sizes),
  // UNIMPLEMENTED (no memory that can be shared), FAILED_PRECONDITION (more than the device has
  // free; the message has the numbers), those of CudaDevice.
  static absl::StatusOr<std::unique_ptr<CudaTier>> Create(std::unique_ptr<CudaDevice> device,
                                                          const Options& options);
  // Requires: no call is in progress. Waits for the copies in flight.
  ~CudaTier() override;

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override;
  uint64_t FootprintBytes(uint32_t payload_bytes) const override;
  TierUsage Usage() const override;
  uint64_t OwnerSegmentBytes(OwnerIdx owner) const override;
  TierId id() const override { return TierId::kHbm; }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override;
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override;
  std::span<std::byte> Mapped(ReplicaId) override { return {}; }
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override;
  TierHealth Health() const override;
  SlotPlace Place(ReplicaId replica) const override;
  // Always writable: the driver's descriptors know no less.
  absl::StatusOr<SegmentHandle> ExportSegment(uint32_t segment_idx, bool writable) const override;

  // For the tier that blocks are demoted to and promoted from: pins its memory, so that copies are
  // direct. Must outlive that tier, as this tier then does.
  SegmentObserver* host_observer() { return &pinned_; }
  PinnedSegments::Progress pin_progress() const { return pinned_.progress(); }
  // For the end, when there is no engine left that needs the link.
  void LiftDemoteLimit() { to_host_->LiftLimit(); }
  CopyLane::Traffic promoted() const { return to_device_->traffic(); }
  CopyLane::Traffic demoted() const { return to_host_->traffic(); }

  const CudaDeviceInfo& device_info() const { return device_->info(); }
  // The slot's device address in this process. For tests.
  CudaAddress AddressOf(ReplicaId replica) const;

 private:
  struct Segment {
    // Shared with the exports under way.
    std::shared_ptr<CudaMemory> memory;
    OwnerIdx owner = 0;
  };

  CudaTier(std::unique_ptr<CudaDevice> device, const Options& options, OwnedStream zero_stream,
           OwnedEvent zeroed);

  absl::Status AllocateAll();
  absl::Status StartLanes();
  absl::StatusOr<std::unique_ptr<CudaMemory>> NewSegment();
  absl::Status AwaitZeroed();
  void Copy(CopyLane* lane, ReplicaId replica, const BlockMeta& meta, std::span<std::byte> host,
            size_t host_bytes, Done done);
  absl::Status CheckRoom(const SlotAllocator::Slot& slot, const BlockMeta& meta,
                         size_t host_bytes) const;
  // No copy touches the slot any more.
  void Released(ReplicaId replica) ABSL_LOCKS_EXCLUDED(mutex_);
  void MarkLost(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets the keeper look at what has changed.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The keeper's thread: destroys retired segments, makes new ones, probes the device, tells of its
  // loss.
  void Keep();
  void Replace(std::vector<std::shared_ptr<CudaMemory>> retired) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::unique_ptr<CudaDevice> device_;
  const Options options_;
  // Of Create, then of the keeper's thread.
  const OwnedStream zero_stream_;
  const OwnedEvent zeroed_;

  mutable absl::Mutex mutex_;
  SlotAllocator allocator_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint32_t, Segment> segments_ ABSL_GUARDED_BY(mutex_);
  // Zeroed segments that nobody has yet.
  std::vector<std::shared_ptr<CudaMemory>> spares_ ABSL_GUARDED_BY(mutex_);
  // Segments of frames that have another owner now, and how many new ones are due in their place.
  std::vector<std::shared_ptr<CudaMemory>> retired_ ABSL_GUARDED_BY(mutex_);
  size_t due_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // Copies that touch a slot, and slots that were freed meanwhile.
  absl::flat_hash_map<ReplicaId, uint32_t> copy_count_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<ReplicaId> freed_ ABSL_GUARDED_BY(mutex_);
  // Why no new segment can be had; OK when none is missing.
  absl::Status allocation_status_ ABSL_GUARDED_BY(mutex_);
  // The first reason.
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // For the keeper: anything above that concerns it has changed.
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  TimedCondition wake_;

  PinnedSegments pinned_;
  std::unique_ptr<CopyLane> to_device_;
  std::unique_ptr<CopyLane> to_host_;
  std::jthread keeper_;
};

}  // namespace kvtier
