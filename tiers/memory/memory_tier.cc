// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_tier.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/memory/memory_limit.h"

namespace kvtier {

struct MemoryTier::Segment {
  int fd = -1;
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  OwnerIdx owner = 0;

  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    if (base != nullptr) munmap(base, bytes);
    if (fd < 0) return;
    // Clients may still map this segment: without its pages a stale mapping holds no memory.
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes));
    close(fd);
  }

  static absl::StatusOr<std::unique_ptr<Segment>> Create(const std::string& name, uint64_t bytes,
                                                         OwnerIdx owner) {
    auto segment = std::make_unique<Segment>();
    segment->bytes = bytes;
    segment->owner = owner;
    segment->fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (segment->fd < 0) return ErrnoStatus(errno, "memfd_create " + name);
    // Mode 0400: a client of another uid cannot reopen its read-only descriptor for writing.
    if (ftruncate(segment->fd, static_cast<off_t>(bytes)) != 0 ||
        fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
        fchmod(segment->fd, S_IRUSR) != 0) {
      return ErrnoStatus(errno, "set up memfd " + name);
    }
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, 0);
    if (base == MAP_FAILED) return ErrnoStatus(errno, "mmap " + name);
    segment->base = static_cast<std::byte*>(base);
    // Both are wishes: a kernel without them still serves the memory.
    madvise(base, bytes, MADV_HUGEPAGE);
    madvise(base, bytes, MADV_DONTDUMP);
    return segment;
  }
};

absl::StatusOr<std::unique_ptr<MemoryTier>> MemoryTier::Create(const Options& options) {
  const char* name = TierName(options.id);
  if (options.segment_bytes < kSegmentBytesMin || options.segment_bytes % kSlotAlignBytes != 0) {
    return Invalid("%s: segment_bytes %d: must be a multiple of %d, %d or more", name,
                   options.segment_bytes, kSlotAlignBytes, kSegmentBytesMin);
  }
  const uint64_t capacity_bytes_max = (1ULL << SlotAllocator::kSlotBits) * kSlotAlignBytes;
  if (options.capacity_bytes < options.segment_bytes ||
      options.capacity_bytes > capacity_bytes_max) {
    return Invalid("%s: capacity_bytes %d: must be %d (one segment) to %d", name,
                   options.capacity_bytes, options.segment_bytes, capacity_bytes_max);
  }
  KVT_ASSIGN_OR_RETURN(const MemoryLimit limit, ReadMemoryLimit());
  if (options.capacity_bytes > limit.bytes) {
    return FailedPrecondition("%s: capacity_bytes %d is more than the %d bytes of %s", name,
                              options.capacity_bytes, limit.bytes, limit.source);
  }
  return std::unique_ptr<MemoryTier>(new MemoryTier(options));
}

MemoryTier::MemoryTier(const Options& options)
    : options_(options),
      allocator_(
          {.frame_bytes = options.segment_bytes,
           .frame_count = static_cast<uint32_t>(options.capacity_bytes / options.segment_bytes)}) {}

MemoryTier::~MemoryTier() {
  absl::MutexLock lock(&mutex_);
  while (!segments_.empty()) Unmap(segments_.begin()->first);
}

void MemoryTier::Unmap(uint32_t segment_idx) {
  const auto it = segments_.find(segment_idx);
  if (it == segments_.end()) return;
  for (SegmentObserver* observer : options_.observers) {
    observer->OnUnmapping({it->second->base, it->second->bytes});
  }
  segments_.erase(it);
}

absl::StatusOr<ReplicaId> MemoryTier::Reserve(uint32_t payload_bytes, OwnerIdx owner) {
  absl::MutexLock lock(&mutex_);
  KVT_ASSIGN_OR_RETURN(const SlotAllocator::Reservation reservation,
                       allocator_.Reserve(payload_bytes, owner));
  if (reservation.retired_segment_idx) Unmap(*reservation.retired_segment_idx);
  const uint32_t segment_idx = reservation.slot.place.segment_idx;
  if (!segments_.contains(segment_idx)) {
    const std::string name =
        std::string("kvtier-") + TierName(options_.id) + "-" + std::to_string(segment_idx);
    auto segment = Segment::Create(name, options_.segment_bytes, owner);
    if (!segment.ok()) {
      allocator_.Free(reservation.replica);
      return Unavailable("%s: %s", TierName(options_.id), segment.status().ToString());
    }
    const Segment& mapped =
        *segments_.emplace(segment_idx, std::move(segment).value()).first->second;
    for (SegmentObserver* observer : options_.observers) {
      observer->OnMapped({mapped.base, mapped.bytes});
    }
  }
  return reservation.replica;
}

void MemoryTier::Free(ReplicaId replica) {
  absl::MutexLock lock(&mutex_);
  allocator_.Free(replica);
}

uint64_t MemoryTier::FootprintBytes(uint32_t payload_bytes) const {
  return SlotAllocator::SlotBytes(payload_bytes);
}

TierUsage MemoryTier::Usage() const {
  absl::MutexLock lock(&mutex_);
  return {.capacity_bytes = allocator_.capacity_bytes(),
          .used_bytes = allocator_.used_bytes(),
          .physical_bytes = segments_.size() * options_.segment_bytes};
}

std::span<std::byte> MemoryTier::SlotBytes(ReplicaId replica) const {
  absl::MutexLock lock(&mutex_);
  const SlotAllocator::Slot slot = allocator_.Find(replica);
  const Segment& segment = *segments_.at(slot.place.segment_idx);
  return {segment.base + slot.place.offset_bytes, slot.slot_bytes};
}

absl::Status MemoryTier::CheckRoom(std::span<const std::byte> slot, const BlockMeta& meta,
                                   size_t buffer_bytes) const {
  if (meta.payload_bytes == 0 || meta.payload_bytes > slot.size()) {
    return DataLoss("%s: block %s of %d bytes does not fit its slot of %d bytes",
                    TierName(options_.id), meta.key.Hex(), meta.payload_bytes, slot.size());
  }
  if (buffer_bytes < meta.payload_bytes) {
    return Invalid("%s: block %s of %d bytes: the caller's buffer has %d bytes",
                   TierName(options_.id), meta.key.Hex(), meta.payload_bytes, buffer_bytes);
  }
  return absl::OkStatus();
}

void MemoryTier::Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
                       Done done) {
  const std::span<std::byte> slot = SlotBytes(replica);
  absl::Status status = CheckRoom(slot, meta, source.size());
  if (status.ok()) {
    std::memcpy(slot.data(), source.data(), meta.payload_bytes);
    // Over the copy: `source` may be memory that a client can still change.
    if (Crc32c(slot.first(meta.payload_bytes)) != meta.crc32c) {
      status = DataLoss("%s: block %s: the bytes to write do not match their checksum",
                        TierName(options_.id), meta.key.Hex());
    }
  }
  std::move(done)(std::move(status));
}

void MemoryTier::Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                      Done done) {
  const std::span<std::byte> slot = SlotBytes(replica);
  absl::Status status = CheckRoom(slot, meta, target.size());
  if (status.ok()) {
    std::memcpy(target.data(), slot.data(), meta.payload_bytes);
    if (Crc32c(target.first(meta.payload_bytes)) != meta.crc32c) {
      status = DataLoss("%s: block %s: checksum mismatch", TierName(options_.id), meta.key.Hex());
    }
  }
  std::move(done)(std::move(status));
}

std::span<std::byte> MemoryTier::Mapped(ReplicaId replica) { return SlotBytes(replica); }

absl::Status MemoryTier::Recover(const std::function<void(const BlockMeta&, ReplicaId)>&) {
  return absl::OkStatus();
}

TierHealth MemoryTier::Health() const { return {}; }

SlotPlace MemoryTier::Place(ReplicaId replica) const {
  absl::MutexLock lock(&mutex_);
  if (!allocator_.IsReserved(replica)) return {};
  return allocator_.Find(replica).place;
}

absl::StatusOr<SegmentHandle> MemoryTier::ExportSegment(uint32_t segment_idx, bool writable) const {
  absl::MutexLock lock(&mutex_);
  const auto it = segments_.find(segment_idx);
  if (it == segments_.end()) {
    return NotFound("%s: no segment %d", TierName(options_.id), segment_idx);
  }
  const Segment& segment = *it->second;
  const std::string self = "/proc/self/fd/" + std::to_string(segment.fd);
  const int fd =
      writable ? fcntl(segment.fd, F_DUPFD_CLOEXEC, 0) : open(self.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "export a segment descriptor");
  return SegmentHandle{.fd = fd, .segment_bytes = segment.bytes, .owner = segment.owner};
}

}  // namespace kvtier
