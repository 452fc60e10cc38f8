// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tiers/memory/segment_observer.h"
#include "tiers/memory/slot_allocator.h"
#include "tiers/tier.h"

namespace kvtier {

// A tier in shared memory: segments are memfds that clients map. Serves host, and hbm on the cpu
// device. Memory is charged by the kernel when a slot is first touched, not at Create.
//
// Owns its segments and their mappings. Thread-safe. Write and Read copy in the calling thread and
// call `done` before they return; Reserve may create a segment (memfd_create and mmap, no I/O).
// In-place fills go through Mapped(); Read then verifies against the caller's meta.
class MemoryTier final : public MappedTier {
 public:
  struct Options {
    TierId id = TierId::kHost;
    // Rounded down to whole segments.
    uint64_t capacity_bytes = 0;
    // A multiple of 4 KiB, 64 KiB or more; a multiple of 2 MiB lets the kernel use huge pages.
    uint64_t segment_bytes = 64ULL << 20;
    // Told of every segment. Not owned.
    std::vector<SegmentObserver*> observers = {};
  };
  static constexpr uint64_t kSegmentBytesMin = 64ULL << 10;

  // Errors: INVALID_ARGUMENT (sizes), FAILED_PRECONDITION (more than the machine or the control
  // group allows; the message has the numbers).
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Create(const Options& options);
  ~MemoryTier() override;

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override;
  uint64_t FootprintBytes(uint32_t payload_bytes) const override;
  TierUsage Usage() const override;
  TierId id() const override { return options_.id; }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override;
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override;
  std::span<std::byte> Mapped(ReplicaId replica) override;
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override;
  TierHealth Health() const override;
  SlotPlace Place(ReplicaId replica) const override;
  absl::StatusOr<SegmentHandle> ExportSegment(uint32_t segment_idx, bool writable) const override;

 private:
  // One memfd and its mapping; gives the memory back when it ends.
  struct Segment;

  explicit MemoryTier(const Options& options);
  void Unmap(uint32_t segment_idx) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::span<std::byte> SlotBytes(ReplicaId replica) const;
  absl::Status CheckRoom(std::span<const std::byte> slot, const BlockMeta& meta,
                         size_t buffer_bytes) const;

  const Options options_;
  mutable absl::Mutex mutex_;
  SlotAllocator allocator_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint32_t, std::unique_ptr<Segment>> segments_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
