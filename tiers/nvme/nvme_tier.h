// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tiers/memory/segment_observer.h"
#include "tiers/tier.h"

namespace kvtier {

namespace nvme {
class Storage;
}  // namespace nvme

enum class NvmeIoEngine : uint8_t { kAuto, kIoUring, kPread };

// Where a fault hook may strike.
enum class NvmeFaultPoint : uint8_t {
  kRead,
  kWrite,
  kSync,
  kAllocate,
  // Before RocksDB is asked, and after it has written but before we know.
  kIndexBefore,
  kIndexAfter,
};

struct NvmeOptions {
  // Created (mode 0700) when absent; its parent exists. Owned by one process at a time.
  std::string dir = {};
  // Cap on the bytes the directory occupies, index included.
  uint64_t capacity_bytes = 0;
  // A multiple of 4 KiB, 64 KiB or more; 0 chooses: 256 MiB, less when capacity_bytes is below 4
  // GiB. A directory keeps the size it was created with.
  uint64_t segment_bytes = 0;
  NvmeIoEngine io_engine = NvmeIoEngine::kAuto;
  // Transfers in flight.
  int queue_depth = 64;
  // Reads, and writes, accepted and not done; more are refused with RESOURCE_EXHAUSTED, ReadAhead
  // from half of it on.
  int queue_limit = 1024;
  // Between attempts to leave the degraded state, and between looks for files that somebody
  // deleted.
  int heal_interval_ms = 1000;
  // Every live record is read again and again at this rate, and verified; 0: never.
  uint64_t scrub_bytes_per_second = 0;
  // Called on a thread of the tier for a block that the scrub found damaged, or whose file somebody
  // deleted, and that is dropped: reading it is DATA_LOSS from now on. May take its time, but must
  // not close the tier.
  std::function<void(const NamespaceHash&, const Key&)> on_lost = {};
  // Bytes written to the files of segments in a day (UTC), moves and preparation included; what is
  // in flight then may exceed it. 0: no limit.
  uint64_t write_bytes_per_day_max = 0;
  // The time of day; absl::Now when empty.
  std::function<absl::Time()> now = {};

  // Test-only. The hook returns 0 or the errno that the step is to fail with; called from several
  // threads. `attempt_bytes_max` cuts every transfer (see IoEngineOptions).
  std::function<int(NvmeFaultPoint)> fault_hook = {};
  uint64_t attempt_bytes_max = 0;
  // Stands between the tier and the disk; outlives the tier. Null: nothing does.
  nvme::Storage* storage = nullptr;
};

struct NvmeStats {
  // Its name and, when it is less than it could be, in what and why.
  std::string io_engine;
  // Of the memory that memory_observer was told of: registered with the engine.
  uint64_t registered_bytes = 0;
  // O_DIRECT is in use; else the page cache and fdatasync.
  bool is_direct = false;
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  // Refreshed about once a second while the tier works.
  uint64_t physical_bytes = 0;
  // Record bytes that are live, headers and padding included.
  uint64_t live_bytes = 0;
  // Record bytes copied to empty segments.
  uint64_t moved_bytes = 0;
  uint64_t recovered_count = 0;
  // Index entries that Recover refused: impossible place, or no room under today's capacity.
  uint64_t dropped_count = 0;
  // The index was damaged and made anew from the record headers.
  bool is_rebuilt = false;
  uint64_t sync_count = 0;
  // Written to segments since Create, moves and preparation included; payload bytes read and given
  // out. Their ratio is what a useful byte costs the drive.
  uint64_t written_bytes = 0;
  uint64_t useful_read_bytes = 0;
  // Of written_bytes today (UTC), of this process and those before it.
  uint64_t written_today_bytes = 0;
  // Records the scrub has read, those it found damaged and dropped, and rounds over all segments.
  uint64_t scrubbed_count = 0;
  uint64_t scrub_lost_count = 0;
  uint64_t scrub_round_count = 0;
};

// The nvme tier: payloads in append-only segment files, read and written by io_uring (or a pread
// pool) with O_DIRECT; a RocksDB index that only ever names payloads which are durable. FORMAT.md
// describes the files.
//
// Owns its directory, its threads (I/O, index, checksums, and one for a scrub) and the descriptors
// of all segment files: one per segment, so RLIMIT_NOFILE must allow capacity_bytes / segment_bytes
// of them. Thread-safe. Write and Read queue and return; `done` runs on one of these threads and
// must not block. Use: Create, Recover once, anything. Before Recover, Reserve answers UNAVAILABLE.
//
// A key that is written while another replica of it is live takes the index entry over: only the
// newer replica is recovered by the next process.
// EIO, ENOSPC, EROFS and errors of RocksDB make the tier degraded: Reserve and Write answer
// UNAVAILABLE, reads go on, and a probe every heal_interval_ms ends it once the disk works again.
// On a file system with less room than capacity_bytes it uses what there is, and is degraded only
// when that is less than five segments.
class NvmeTier final : public Tier {
 public:
  static constexpr uint64_t kSegmentBytesMin = 64ULL << 10;

  // Opens or creates the directory. Errors: INVALID_ARGUMENT (options), FAILED_PRECONDITION (in use
  // by another process; newer format; capacity that does not go with the segments; io_uring asked
  // for and refused), NOT_FOUND (no directory, or its parent is none), UNAVAILABLE or
  // RESOURCE_EXHAUSTED (I/O). Blocks: a damaged index is made anew from all segments.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Create(const NvmeOptions& options);
  // Closes.
  ~NvmeTier() override;

  // Also RESOURCE_EXHAUSTED: the write budget of the day is spent (IsWriteBudgetSpent).
  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override;
  void Free(ReplicaId replica) override;
  // The record, rounded up so that a segment's unusable rest is paid by the blocks that leave it.
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
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override;
  TierHealth Health() const override;

  NvmeStats Stats() const;
  // To be told of the memory that blocks are read into and written from: transfers to and from it
  // cost less. Lives as long as this, and may be called after Close.
  SegmentObserver& memory_observer();
  // Takes no more reads and writes (UNAVAILABLE), finishes those it has, makes frees durable unless
  // degraded, and closes the index. Blocks. Idempotent; not concurrent with other calls.
  void Close();

 private:
  class Impl;
  explicit NvmeTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier
