// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_tier.h"

#include <fcntl.h>

#include <cerrno>
#include <string>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/memory/checked_copy.h"
#include "tiers/memory/memory_limit.h"

namespace kvtier {

namespace {

absl::Status CheckSizes(const MemoryTier::Options& options) {
  const char* name = TierName(options.id);
  if (options.segment_bytes < MemoryTier::kSegmentBytesMin ||
      options.segment_bytes % kSlotAlignBytes != 0) {
    return Invalid("%s: segment_bytes %d: must be a multiple of %d, %d or more", name,
                   options.segment_bytes, kSlotAlignBytes, MemoryTier::kSegmentBytesMin);
  }
  const uint64_t capacity_bytes_max = (1ULL << SlotAllocator::kSlotBits) * kSlotAlignBytes;
  if (options.capacity_bytes < options.segment_bytes ||
      options.capacity_bytes > capacity_bytes_max) {
    return Invalid("%s: capacity_bytes %d: must be %d (one segment) to %d", name,
                   options.capacity_bytes, options.segment_bytes, capacity_bytes_max);
  }
  KVT_ASSIGN_OR_RETURN(const MemoryLimit limit, ReadMemoryLimit());
  if (options.capacity_bytes > limit.bytes) {
    return FailedPrecondition("%s: capacity_bytes %d is more than the %d bytes of %s; lower it",
                              name, options.capacity_bytes, limit.bytes, limit.source);
  }
  if (options.promised_bytes > limit.bytes - options.capacity_bytes) {
    return FailedPrecondition(
        "%s: capacity_bytes %d and the %d bytes of other tiers are more than the %d bytes of %s; "
        "lower one of them",
        name, options.capacity_bytes, options.promised_bytes, limit.bytes, limit.source);
  }
  return absl::OkStatus();
}

// Empty: the process may lock the whole capacity.
std::string WhyNotLocked(const MemoryTier::Options& options) {
  const uint64_t lockable_bytes = options.calls->LockableBytes();
  if (lockable_bytes >= options.capacity_bytes) return "";
  return absl::StrFormat(
      "memory is not locked: capacity_bytes %d is more than the %d bytes of RLIMIT_MEMLOCK; raise "
      "it (LimitMEMLOCK= of the service, ulimit -l)",
      options.capacity_bytes, lockable_bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryTier>> MemoryTier::Create(const Options& options) {
  KVT_RETURN_IF_ERROR(CheckSizes(options));
  std::string shortfall;
  if (options.lock_memory != LockMemory::kOff) shortfall = WhyNotLocked(options);
  if (options.lock_memory == LockMemory::kOn && !shortfall.empty()) {
    return FailedPrecondition("%s: %s, or set %s.lock_memory = auto", TierName(options.id),
                              shortfall, TierName(options.id));
  }
  const bool locks = options.lock_memory != LockMemory::kOff && shortfall.empty();
  std::unique_ptr<SlotIndex> index;
  if (options.keeper != nullptr) {
    KVT_CHECK(options.prepare_thread_count > 0);
    KVT_ASSIGN_OR_RETURN(
        index, SlotIndex::Create({.name = absl::StrFormat("kvtier-%s-index", TierName(options.id)),
                                  .segment_bytes = options.segment_bytes,
                                  .frame_count = static_cast<uint32_t>(options.capacity_bytes /
                                                                       options.segment_bytes),
                                  .boot_id = options.boot_id}));
  }
  return std::unique_ptr<MemoryTier>(
      new MemoryTier(options, locks, std::move(shortfall), std::move(index)));
}

MemoryTier::MemoryTier(const Options& options, bool locks, std::string shortfall,
                       std::unique_ptr<SlotIndex> index)
    : options_(options),
      allocator_(
          {.frame_bytes = options.segment_bytes,
           .frame_count = static_cast<uint32_t>(options.capacity_bytes / options.segment_bytes)}),
      index_(std::move(index)),
      locks_(locks),
      shortfall_(std::move(shortfall)) {}

MemoryTier::~MemoryTier() {
  StopPreparing();
  if (index_ != nullptr) index_->KeepContents();
  absl::MutexLock lock(&mutex_);
  for (auto& [segment_idx, live] : segments_) {
    if (IsKept(live.owner)) live.segment->KeepContents();
  }
  while (!segments_.empty()) Unmap(segments_.begin()->first);
  for (const std::shared_ptr<MemorySegment>& spare : spares_) {
    for (SegmentObserver* observer : options_.observers) observer->OnUnmapping(spare->memory());
  }
}

void MemoryTier::Unmap(uint32_t segment_idx) {
  const auto it = segments_.find(segment_idx);
  if (it == segments_.end()) return;
  it->second.segment->Retire();
  // Its order may still be coming.
  if (IsKept(it->second.owner) && !stopping_) OrderForget(*it->second.segment);
  for (SegmentObserver* observer : options_.observers) {
    observer->OnUnmapping(it->second.segment->memory());
  }
  segments_.erase(it);
}

MemorySegment::Options MemoryTier::NextSegment() {
  return {.name = absl::StrFormat("kvtier-%s-%d", TierName(options_.id), named_count_++),
          .bytes = options_.segment_bytes,
          .reserved_huge_pages = options_.reserved_huge_pages,
          .node_idx = options_.node_idx,
          .calls = options_.calls};
}

absl::StatusOr<std::shared_ptr<MemorySegment>> MemoryTier::TakeSegment() {
  std::shared_ptr<MemorySegment> segment;
  if (!spares_.empty()) {
    // Observers know it since it was ready.
    segment = std::move(spares_.front());
    spares_.pop_front();
    return segment;
  }
  if (!coming_.empty()) {
    segment = std::move(coming_.front());
    coming_.pop_front();
  } else {
    KVT_ASSIGN_OR_RETURN(segment, MemorySegment::Create(NextSegment()));
    if (options_.prepare_thread_count > 0) cold_.push_back(segment);
  }
  for (SegmentObserver* observer : options_.observers) observer->OnMapped(segment->memory());
  return segment;
}

absl::Status MemoryTier::Map(uint32_t segment_idx, OwnerIdx owner) {
  auto segment = TakeSegment();
  map_status_ = segment.status();
  if (!segment.ok()) {
    return Unavailable("%s: %s", TierName(options_.id), segment.status().ToString());
  }
  const bool is_kept = (*segment)->kept();
  if (IsKept(owner) && !is_kept) {
    keeper_orders_.push_back({KeptName("segment", (*segment)->file_id()), *segment});
  } else if (!IsKept(owner) && is_kept) {
    OrderForget(**segment);
  }
  segments_.emplace(segment_idx, Live{.segment = std::move(segment).value(), .owner = owner});
  return absl::OkStatus();
}

absl::StatusOr<ReplicaId> MemoryTier::Reserve(uint32_t payload_bytes, OwnerIdx owner) {
  absl::MutexLock lock(&mutex_);
  KVT_ASSIGN_OR_RETURN(const SlotAllocator::Reservation reservation,
                       allocator_.Reserve(payload_bytes, owner));
  if (reservation.retired_segment_idx) Unmap(*reservation.retired_segment_idx);
  const uint32_t segment_idx = reservation.slot.place.segment_idx;
  if (!segments_.contains(segment_idx)) {
    if (absl::Status mapped = Map(segment_idx, owner); !mapped.ok()) {
      allocator_.Free(reservation.replica);
      return mapped;
    }
  }
  return reservation.replica;
}

uint32_t MemoryTier::FrameOf(ReplicaId replica) const {
  const uint64_t page_idx = replica & ((1ULL << SlotAllocator::kSlotBits) - 1);
  return static_cast<uint32_t>(page_idx / (options_.segment_bytes / kSlotAlignBytes));
}

std::optional<std::pair<uint32_t, uint64_t>> MemoryTier::IndexPlace(ReplicaId replica) const {
  const SlotAllocator::Slot slot = allocator_.Find(replica);
  if (!IsKept(segments_.at(slot.place.segment_idx).owner)) return std::nullopt;
  return std::pair(FrameOf(replica), slot.place.offset_bytes / slot.slot_bytes);
}

void MemoryTier::OnCommitted(ReplicaId replica, const BlockMeta& meta) {
  absl::MutexLock lock(&mutex_);
  const auto place = IndexPlace(replica);
  if (!place.has_value()) return;
  const SlotAllocator::Slot slot = allocator_.Find(replica);
  const Live& live = segments_.at(slot.place.segment_idx);
  // The first entry of a frame that was carved or mapped anew finds it described as it was.
  index_->DescribeFrame(place->first, live.segment->file_id(), slot.slot_bytes,
                        options_.owner_tags[live.owner]);
  index_->Put(place->first, place->second, replica, meta);
}

void MemoryTier::Free(ReplicaId replica) {
  absl::MutexLock lock(&mutex_);
  // Before the slot can be anybody else's.
  if (const auto place = IndexPlace(replica); place.has_value()) {
    index_->Clear(place->first, place->second);
  }
  allocator_.Free(replica);
}

uint64_t MemoryTier::FootprintBytes(uint32_t payload_bytes) const {
  return SlotAllocator::SlotBytes(payload_bytes);
}

uint64_t MemoryTier::OwnerSegmentBytes(OwnerIdx owner) const {
  absl::MutexLock lock(&mutex_);
  return allocator_.owner_bytes(owner);
}

TierUsage MemoryTier::Usage() const {
  absl::MutexLock lock(&mutex_);
  return {.capacity_bytes = allocator_.capacity_bytes(),
          .used_bytes = allocator_.used_bytes(),
          .physical_bytes = SegmentCount() * options_.segment_bytes,
          .ready_bytes = PreparedSoFar().ready_bytes};
}

std::span<std::byte> MemoryTier::SlotBytes(ReplicaId replica) const {
  absl::MutexLock lock(&mutex_);
  const SlotAllocator::Slot slot = allocator_.Find(replica);
  const MemorySegment& segment = *segments_.at(slot.place.segment_idx).segment;
  return segment.memory().subspan(slot.place.offset_bytes, slot.slot_bytes);
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
    // Of the copy: `source` may be memory that a client can still change.
    if (CopyWithCrc32c(slot, source.first(meta.payload_bytes)) != meta.crc32c) {
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
    if (CopyWithCrc32c(target, slot.first(meta.payload_bytes)) != meta.crc32c) {
      status = DataLoss("%s: block %s: checksum mismatch", TierName(options_.id), meta.key.Hex());
    }
  }
  std::move(done)(std::move(status));
}

std::span<std::byte> MemoryTier::Mapped(ReplicaId replica) { return SlotBytes(replica); }

absl::Status MemoryTier::Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  if (index_ != nullptr) AdoptAll(found);
  // Not before what earlier processes left has given its memory back.
  StartPreparing();
  return absl::OkStatus();
}

TierHealth MemoryTier::Health() const {
  absl::MutexLock lock(&mutex_);
  if (map_status_.ok()) return {};
  return {.degraded = true, .reason = map_status_.ToString()};
}

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
  const int segment_fd = it->second.segment->fd();
  const std::string self = "/proc/self/fd/" + std::to_string(segment_fd);
  const int fd =
      writable ? fcntl(segment_fd, F_DUPFD_CLOEXEC, 0) : open(self.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "export a segment descriptor");
  return SegmentHandle{
      .fd = fd, .segment_bytes = options_.segment_bytes, .owner = it->second.owner};
}

}  // namespace kvtier
