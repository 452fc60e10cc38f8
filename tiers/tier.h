// SPDX-License-Identifier: Apache-2.0
//
// The one interface of hbm, host and nvme. tiers/conformance_test.h is its contract as a test; the
// fault-injecting wrapper (tiers/faulty_tier.h) is a Tier too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/key.h"

namespace kvtier {

// Fastest first; numbers index arrays.
enum class TierId : uint8_t { kHbm = 0, kHost = 1, kNvme = 2 };
inline constexpr size_t kTierCount = 3;
const char* TierName(TierId tier);

// What the bytes of a replica are; the same on every tier. Plain value.
struct BlockMeta {
  NamespaceHash namespace_hash;
  Key key;
  // All zero for the first block of a chain.
  Key parent;
  LayoutFingerprint layout;
  // Blocks before this one in its chain.
  uint32_t depth = 0;
  uint32_t payload_bytes = 0;
  // CRC-32C of the payload.
  uint32_t crc32c = 0;

  friend bool operator==(const BlockMeta&, const BlockMeta&) = default;
};

// Names one replica's room on one tier. Opaque, never 0, never given out twice by one Tier object.
using ReplicaId = uint64_t;
inline constexpr ReplicaId kNoReplica = 0;

// Who a slot's memory belongs to: memory of one owner is never in a segment with another's.
using OwnerIdx = uint32_t;

struct TierUsage {
  uint64_t capacity_bytes = 0;
  // Bytes that reserved replicas take, padding and headers included. <= capacity_bytes.
  uint64_t used_bytes = 0;
  // nvme: bytes the files occupy on the file system; memory tiers: bytes of segments allocated.
  uint64_t physical_bytes = 0;
  // Memory tiers that prepare their memory: of physical_bytes, what is touched (and locked, if that
  // was asked for).
  uint64_t ready_bytes = 0;
};

// Reserve's RESOURCE_EXHAUSTED of a tier that has room, but has written as much today as it may:
// freeing does not help, only the next day does.
bool IsWriteBudgetSpent(const absl::Status& status);
absl::Status WriteBudgetSpent(absl::Status exhausted);

struct TierHealth {
  bool degraded = false;
  // One line; empty when healthy.
  std::string reason;
};

// The pure half of a tier: room. Thread-safe; no call blocks, does I/O or calls back.
class SlotSource {
 public:
  virtual ~SlotSource() = default;

  // Room for one block. RESOURCE_EXHAUSTED: none (free something first, but see
  // IsWriteBudgetSpent). UNAVAILABLE: the tier is
  // degraded and takes nothing now. INVALID_ARGUMENT: payload_bytes is 0 or can never fit.
  virtual absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) = 0;

  // Gives the room back. Requires: `replica` is reserved, no Read or Write of it is in flight.
  // On nvme the contents are forgotten durably in the background; after a crash in between, the
  // replica may be recovered, with its right bytes.
  virtual void Free(ReplicaId replica) = 0;

  // The replica holds this block from now on, until Free. Tiers whose contents outlive the process
  // note it; nvme knows from Write.
  virtual void OnCommitted(ReplicaId /*replica*/, const BlockMeta& /*meta*/) {}

  // Bytes that one block of this payload takes from capacity_bytes.
  virtual uint64_t FootprintBytes(uint32_t payload_bytes) const = 0;

  virtual TierUsage Usage() const = 0;

  // Bytes of the segments that are the owner's now, whole as they are; 0 where owners share.
  virtual uint64_t OwnerSegmentBytes(OwnerIdx /*owner*/) const { return 0; }
};

// Thread-safe.
class Tier : public SlotSource {
 public:
  // Called exactly once, from any thread, possibly before the call that took it returns.
  using Done = absl::AnyInvocable<void(absl::Status) &&>;

  virtual TierId id() const = 0;

  // Fills a reserved replica with `source` (meta.payload_bytes of it), checking it against
  // meta.crc32c. OK on nvme means durable: a later Recover returns it. `source` stays valid and
  // unchanged until `done`. On nvme `source` lies at the start of a slot of a memory tier
  // (4 KiB aligned, readable up to the next multiple of 4 KiB), else it is copied once.
  // Memory tiers copy in the calling thread; nvme and the cuda device queue (bounded) and return.
  // Errors: DATA_LOSS (checksum), RESOURCE_EXHAUSTED (no space), UNAVAILABLE (I/O error; not done
  // in time).
  virtual void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
                     Done done) = 0;

  // Copies a filled replica to `target` (meta.payload_bytes; may be scribbled on up to the next
  // multiple of 4 KiB if its size says so) and verifies that it is exactly `meta`'s block.
  // Errors: DATA_LOSS (wrong key, generation, layout, length or checksum; `target` is garbage),
  // UNAVAILABLE (I/O error; the replica may be readable later).
  virtual void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                    Done done) = 0;

  // As Read, for bytes that nobody waits for yet. Where reads queue for a disk it begins after
  // every Read and before writes, with a small share of the disk while either is there.
  virtual void ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                         Done done) {
    Read(replica, meta, target, std::move(done));
  }

  // Somebody waits now for what ReadAhead of `replica` was asked for: if it has not begun, it
  // queues as a Read from now on. Nothing happens when no such call is in flight, and when
  // `replica` is not reserved any more. Never blocks.
  virtual void Expedite(ReplicaId /*replica*/) {}

  // The slot's memory, whole 4 KiB pages, where the CPU reaches it: on memory tiers, but for hbm on
  // the cuda device. Empty elsewhere. Valid until Free.
  virtual std::span<std::byte> Mapped(ReplicaId replica) = 0;

  // Calls `found` once per replica that survived the last process, before any other use. Memory
  // tiers have none.
  virtual absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) = 0;

  virtual TierHealth Health() const = 0;
};

// Where a mapped slot lies, for clients that map the segment.
struct SlotPlace {
  uint32_t segment_idx = 0;
  uint64_t offset_bytes = 0;
};

// A segment's descriptor, duplicated for the caller, who closes it.
struct SegmentHandle {
  int fd = -1;
  uint64_t segment_bytes = 0;
  OwnerIdx owner = 0;
  // The GPU whose memory `fd` names (an exported allocation); all zero: a memfd.
  std::array<uint8_t, 16> device_uuid{};
};

// What hbm and host have beyond Tier: segments that other processes map.
class MappedTier : public Tier {
 public:
  // All zero for a replica that is not reserved (any more): answers race with the end of sessions.
  virtual SlotPlace Place(ReplicaId replica) const = 0;
  // NOT_FOUND when there is no such segment (any more). Read-only unless `writable`; the driver's
  // descriptors of GPU memory are writable always. UNAVAILABLE: the device is lost.
  virtual absl::StatusOr<SegmentHandle> ExportSegment(uint32_t segment_idx,
                                                      bool writable) const = 0;
};

}  // namespace kvtier
