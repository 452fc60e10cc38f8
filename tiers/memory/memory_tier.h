// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tiers/memory/memory_calls.h"
#include "tiers/memory/memory_segment.h"
#include "tiers/memory/segment_keeper.h"
#include "tiers/memory/segment_observer.h"
#include "tiers/memory/slot_allocator.h"
#include "tiers/memory/slot_index.h"
#include "tiers/tier.h"

namespace kvtier {

// A tier in shared memory: segments are memfds that clients map. Serves host, and hbm on the cpu
// device.
//
// Without preparation a segment is made when it is needed and its memory is charged by the kernel
// when a slot is first touched. With it, background threads make all segments, touch them (huge
// pages where the kernel has them) and lock them, piece by piece; the tier serves meanwhile and
// gives out what is ready first, and memory that is not when it must.
//
// Owns its segments, their mappings and the threads. Thread-safe. Write and Read copy in the
// calling thread and call `done` before they return; Reserve may create a segment (memfd_create and
// mmap, no I/O). In-place fills go through Mapped(); Read then verifies against the caller's meta.
class MemoryTier final : public MappedTier {
 public:
  // Whether pages are locked, so that they are never swapped out.
  enum class LockMemory : uint8_t {
    kOff,
    kAuto,  // if the process may lock the whole capacity
    kOn,    // or the tier is not created
  };

  // What the preparation has come to.
  struct Prepared {
    uint64_t ready_bytes = 0;
    uint64_t locked_bytes = 0;
    // In segments of the kernel's reserve of huge pages.
    uint64_t reserved_huge_bytes = 0;
    // Why some memory is not ready or not locked, in one line; empty when all is as was asked for.
    std::string shortfall;
  };

  // What Recover made of what earlier processes left, in blocks.
  struct Adoption {
    uint64_t kept_count = 0;
    uint64_t kept_bytes = 0;
    // The bytes are not those that were committed.
    uint64_t corrupt_count = 0;
    // The entry is wrong in itself, or its memory is missing or may change, and the block was
    // nowhere else.
    uint64_t damaged_count = 0;
    // Of owners that this process does not know.
    uint64_t foreign_count = 0;
    uint64_t no_room_count = 0;
    // Why something was refused, in one line: the first reason. Empty: nothing was.
    std::string refusal;

    uint64_t refused_count() const {
      return corrupt_count + damaged_count + foreign_count + no_room_count;
    }
  };

  struct Options {
    TierId id = TierId::kHost;
    // Rounded down to whole segments.
    uint64_t capacity_bytes = 0;
    // A multiple of 4 KiB, 64 KiB or more; a multiple of 2 MiB lets the kernel use huge pages.
    uint64_t segment_bytes = 64ULL << 20;
    // Memory that this process has promised to others, hbm on the cpu device for one.
    uint64_t promised_bytes = 0;
    // Told of every segment. Not owned.
    std::vector<SegmentObserver*> observers = {};
    // 0: no preparation. The threads begin with Recover.
    uint32_t prepare_thread_count = 0;
    LockMemory lock_memory = LockMemory::kOff;
    bool reserved_huge_pages = false;
    std::optional<uint32_t> node_idx = std::nullopt;
    // Keeps segments and what they hold beyond the end of this process. Not owned; needs a thread
    // of preparation, which gives every segment to the keeper before it can hold a block. One that
    // was made because none was there follows from a thread of its own, at once: Reserve waits for
    // no keeper. Null: they end with the process.
    SegmentKeeper* keeper = nullptr;
    // Who each owner is, whatever number the next process gives him. The memory of owners without a
    // tag is not kept.
    std::vector<Digest> owner_tags = {};
    // As /proc/sys/kernel/random/boot_id has it; what another boot left is refused.
    std::string boot_id = {};
    // Called once, from a background thread, when everything is prepared or cannot be. Must not
    // call the tier.
    std::function<void(const Prepared&)> on_prepared = {};
    // Not owned.
    MemoryCalls* calls = &KernelMemoryCalls();
  };
  static constexpr uint64_t kSegmentBytesMin = 64ULL << 10;
  // Touched and locked at once: the address space is held by the kernel that long.
  static constexpr uint64_t kPieceBytes = 16ULL << 20;

  // Errors: INVALID_ARGUMENT (sizes), FAILED_PRECONDITION (more than the machine or the control
  // group allows, or than the process may lock although it must; the message has the numbers).
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Create(const Options& options);
  ~MemoryTier() override;

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override;
  uint64_t FootprintBytes(uint32_t payload_bytes) const override;
  TierUsage Usage() const override;
  uint64_t OwnerSegmentBytes(OwnerIdx owner) const override;
  TierId id() const override { return options_.id; }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override;
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override;
  std::span<std::byte> Mapped(ReplicaId replica) override;
  // Takes over, with a keeper, what earlier processes left there: each block is copied into memory
  // that no process of that time has mapped, and its checksum is that of the copy. Blocks for as
  // long as that takes. `found` is called by several threads, but by one at a time. Also begins the
  // preparation.
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override;
  // Degraded from when the kernel has no memory for a block until it has some again.
  TierHealth Health() const override;
  SlotPlace Place(ReplicaId replica) const override;
  absl::StatusOr<SegmentHandle> ExportSegment(uint32_t segment_idx, bool writable) const override;

  void OnCommitted(ReplicaId replica, const BlockMeta& meta) override;

  Prepared prepared() const;
  // Requires: Recover has returned.
  const Adoption& adoption() const { return adoption_; }

 private:
  // A segment that has slots.
  struct Live {
    // Shared with the thread that prepares it.
    std::shared_ptr<MemorySegment> segment;
    OwnerIdx owner = 0;
  };

  MemoryTier(const Options& options, bool locks, std::string shortfall,
             std::unique_ptr<SlotIndex> index);
  MemorySegment::Options NextSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the number memory: the best there is.
  absl::Status Map(uint32_t segment_idx, OwnerIdx owner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<MemorySegment>> TakeSegment()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unmap(uint32_t segment_idx) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::span<std::byte> SlotBytes(ReplicaId replica) const;
  bool IsKept(OwnerIdx owner) const {
    return index_ != nullptr && owner < options_.owner_tags.size();
  }
  uint32_t FrameOf(ReplicaId replica) const;
  // Where the replica is in the index; nothing when its memory is not kept.
  std::optional<std::pair<uint32_t, uint64_t>> IndexPlace(ReplicaId replica) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoom(std::span<const std::byte> slot, const BlockMeta& meta,
                         size_t buffer_bytes) const;

  // --- memory_tier_prepare.cc ---
  struct Work {
    // Null: a spare one is to be made.
    std::shared_ptr<MemorySegment> segment = nullptr;
  };
  void StartPreparing();
  void StopPreparing();
  void PrepareAll();
  // What has slots already comes first. Nothing: stop.
  std::optional<Work> NextWork() ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<MemorySegment> MakeSpare() ABSL_LOCKS_EXCLUDED(mutex_);
  void PrepareSegment(MemorySegment& segment) ABSL_LOCKS_EXCLUDED(mutex_);
  void FinishWork(const std::shared_ptr<MemorySegment>& segment) ABSL_LOCKS_EXCLUDED(mutex_);
  bool WantsSpare() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  uint64_t SegmentCount() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  Prepared PreparedSoFar() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  // --- memory_tier_adopt.cc ---
  // Something for the keeper to do, in order.
  struct KeeperOrder {
    std::string name;
    // Null: forget it.
    std::shared_ptr<MemorySegment> segment;
  };
  // What earlier processes left. Memory, and the name that the keeper knows it by.
  struct LeftoverSegment {
    // Owned by Leftovers.
    int fd = -1;
    // Empty: the keeper has forgotten it.
    std::string name;
  };
  struct Leftovers {
    ~Leftovers();
    std::vector<std::unique_ptr<LeftoverIndex>> indexes;
    std::vector<std::string> index_names;
    std::map<FileId, LeftoverSegment> segments;
  };
  struct LeftoverFrame {
    LeftoverIndex* index;
    SlotIndexFrame frame;
    OwnerIdx owner;
    LeftoverSegment* segment;
  };
  std::string KeptName(const char* kind, const FileId& file_id) const;
  // Gives orders until the tier stops and there are none.
  void GiveKeeperOrders() ABSL_LOCKS_EXCLUDED(mutex_);
  void OrderForget(const MemorySegment& segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Keep(MemorySegment& segment) ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(const std::string& name) ABSL_LOCKS_EXCLUDED(mutex_);
  // Notes what the keeper said.
  void NoteKeeper(const absl::Status& said) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: the next process may not find what is in the replica's segment.
  bool AwaitKept(ReplicaId replica) ABSL_LOCKS_EXCLUDED(mutex_);
  bool KeeperFailed() const ABSL_LOCKS_EXCLUDED(mutex_);
  void AdoptAll(const std::function<void(const BlockMeta&, ReplicaId)>& found);
  void OpenLeftovers(const std::vector<KeptFd>& kept, Leftovers* leftovers);
  std::vector<LeftoverFrame> FindLeftovers(Leftovers* leftovers)
      ABSL_LOCKS_EXCLUDED(adoption_mutex_);
  // Blocks whose memory is not there: damaged, unless another index has them.
  void NoteMissing(const LeftoverIndex& index, const SlotIndexFrame& frame,
                   const absl::Status& reason) ABSL_LOCKS_EXCLUDED(adoption_mutex_);
  // Nothing in it is wanted any more.
  void GiveBack(LeftoverSegment* segment) ABSL_LOCKS_EXCLUDED(adoption_mutex_);
  void AdoptFrame(const LeftoverFrame& leftover,
                  const std::function<void(const BlockMeta&, ReplicaId)>& found)
      ABSL_LOCKS_EXCLUDED(adoption_mutex_);
  // False: the original must stay, for the copy is not sure to outlive this process.
  bool AdoptBlock(const LeftoverFrame& leftover, uint64_t slot_idx,
                  std::span<const std::byte> source,
                  const std::function<void(const BlockMeta&, ReplicaId)>& found)
      ABSL_LOCKS_EXCLUDED(adoption_mutex_);
  void Refuse(uint64_t Adoption::* counter, uint64_t count, const absl::Status& reason)
      ABSL_LOCKS_EXCLUDED(adoption_mutex_);

  const Options options_;
  mutable absl::Mutex mutex_;
  SlotAllocator allocator_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint32_t, Live> segments_ ABSL_GUARDED_BY(mutex_);
  // Null without a keeper. What it says is guarded, too.
  const std::unique_ptr<SlotIndex> index_;
  std::deque<KeeperOrder> keeper_orders_ ABSL_GUARDED_BY(mutex_);
  // Then nothing that earlier processes left is erased or forgotten.
  bool keeper_failed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Mutex adoption_mutex_;
  // Guarded by adoption_mutex_ until Recover returns, constant afterwards.
  Adoption adoption_;
  // While Recover runs: blocks that were found only where the memory is missing, and why it is.
  std::set<std::pair<Digest, Key>> missing_ ABSL_GUARDED_BY(adoption_mutex_);
  absl::Status missing_reason_ ABSL_GUARDED_BY(adoption_mutex_);
  // Ready, and nobody's yet.
  std::deque<std::shared_ptr<MemorySegment>> spares_ ABSL_GUARDED_BY(mutex_);
  // Nobody's yet, and being prepared; who needs one takes it all the same.
  std::deque<std::shared_ptr<MemorySegment>> coming_ ABSL_GUARDED_BY(mutex_);
  // In use before they were ready.
  std::deque<std::shared_ptr<MemorySegment>> cold_ ABSL_GUARDED_BY(mutex_);
  // Threads that are at it.
  uint32_t working_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // Spares that are no file yet.
  uint32_t making_count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t named_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool locks_ ABSL_GUARDED_BY(mutex_);
  // Of the last segment that a block needed.
  absl::Status map_status_ ABSL_GUARDED_BY(mutex_);
  // The kernel gave no memory: no more spares.
  bool gave_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool reported_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::string shortfall_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::jthread> preparers_;
  std::jthread keeper_thread_;
};

}  // namespace kvtier
