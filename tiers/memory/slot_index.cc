// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/slot_index.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/memory/slot_allocator.h"

namespace kvtier {
namespace {

constexpr uint64_t kIndexPageBytes = 4096;

// A frame's part of the index: its header, then an entry for each page of the frame, which is as
// many slots as it can be carved into.
uint64_t FrameStride(uint64_t segment_bytes) {
  const uint64_t bytes =
      sizeof(SlotIndexFrame) + segment_bytes / kSlotAlignBytes * sizeof(SlotIndexEntry);
  return (bytes + kIndexPageBytes - 1) / kIndexPageBytes * kIndexPageBytes;
}

uint64_t IndexBytes(uint64_t segment_bytes, uint32_t frame_count) {
  return kIndexPageBytes + frame_count * FrameStride(segment_bytes);
}

std::byte* FrameAt(std::span<std::byte> memory, uint64_t segment_bytes, uint32_t frame_idx) {
  return memory.data() + kIndexPageBytes + frame_idx * FrameStride(segment_bytes);
}

SlotIndexEntry* EntryAt(std::byte* frame, uint64_t slot_idx) {
  return reinterpret_cast<SlotIndexEntry*>(frame + sizeof(SlotIndexFrame)) + slot_idx;
}

// Of a struct's bytes before its last four, which hold it.
template <typename Record>
uint32_t CrcBeforeEnd(const Record& record) {
  return Crc32c(std::as_bytes(std::span(&record, 1)).first(offsetof(Record, crc32c)));
}

uint32_t EntryCrc(const FileId& file_id, uint64_t slot_idx, const SlotIndexEntry& entry) {
  const std::array<uint64_t, 3> place = {file_id.device, file_id.inode, slot_idx};
  constexpr size_t kFirst = offsetof(SlotIndexEntry, namespace_hash);
  return Crc32c(std::as_bytes(std::span(&entry, 1)).subspan(kFirst),
                Crc32c(std::as_bytes(std::span(place))));
}

// A later process sees the memory as the kill left it. Release: what the entry says is written
// before its state.
void SetLive(SlotIndexEntry* entry) {
  std::atomic_ref(entry->state).store(SlotIndexEntry::kLive, std::memory_order_release);
}

// Acquire: what comes after this, in the entry or in its slot, is written after it.
void ClearState(SlotIndexEntry* entry) {
  std::atomic_ref(entry->state).exchange(0, std::memory_order_acq_rel);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SlotIndex>> SlotIndex::Create(const Options& options) {
  SlotIndexHeader header;
  header.entry_bytes = sizeof(SlotIndexEntry);
  header.segment_bytes = options.segment_bytes;
  header.frame_count = options.frame_count;
  header.slot_align_bytes = kSlotAlignBytes;
  if (options.boot_id.size() != header.boot_id.size()) {
    return Invalid("boot id \"%s\" has not 36 characters", options.boot_id);
  }
  std::ranges::copy(options.boot_id, header.boot_id.begin());
  header.crc32c = CrcBeforeEnd(header);
  KVT_ASSIGN_OR_RETURN(
      std::shared_ptr<MemorySegment> file,
      MemorySegment::Create({.name = options.name,
                             .bytes = IndexBytes(options.segment_bytes, options.frame_count),
                             .transparent_huge_pages = false,
                             .calls = &KernelMemoryCalls()}));
  std::memcpy(file->memory().data(), &header, sizeof(header));
  return std::unique_ptr<SlotIndex>(new SlotIndex(std::move(file), options.segment_bytes));
}

void SlotIndex::DescribeFrame(uint32_t frame_idx, FileId file_id, uint64_t slot_bytes,
                              const Digest& owner_tag) {
  std::byte* const at = FrameAt(file_->memory(), segment_bytes_, frame_idx);
  SlotIndexFrame old;
  std::memcpy(&old, at, sizeof(old));
  if (old.file_id == file_id && old.slot_bytes == slot_bytes && old.owner_tag == owner_tag) return;
  SlotIndexFrame frame{
      .file_id = file_id, .slot_bytes = slot_bytes, .owner_tag = owner_tag, .frame_idx = frame_idx};
  frame.crc32c = CrcBeforeEnd(frame);
  // Torn, it has a wrong checksum, and no entries that could be lost with it.
  std::memcpy(at, &frame, sizeof(frame));
}

void SlotIndex::Put(uint32_t frame_idx, uint64_t slot_idx, ReplicaId replica,
                    const BlockMeta& meta) {
  std::byte* const at = FrameAt(file_->memory(), segment_bytes_, frame_idx);
  SlotIndexFrame frame;
  std::memcpy(&frame, at, sizeof(frame));
  SlotIndexEntry* const target = EntryAt(at, slot_idx);
  SlotIndexEntry entry{.namespace_hash = meta.namespace_hash,
                       .key = meta.key,
                       .parent = meta.parent,
                       .layout = meta.layout,
                       .depth = meta.depth,
                       .payload_bytes = meta.payload_bytes,
                       .payload_crc32c = meta.crc32c,
                       .replica = replica};
  entry.crc32c = EntryCrc(frame.file_id, slot_idx, entry);
  ClearState(target);
  std::memcpy(reinterpret_cast<std::byte*>(target) + sizeof(target->state),
              reinterpret_cast<const std::byte*>(&entry) + sizeof(entry.state),
              sizeof(entry) - sizeof(entry.state));
  SetLive(target);
}

void SlotIndex::Clear(uint32_t frame_idx, uint64_t slot_idx) {
  ClearState(EntryAt(FrameAt(file_->memory(), segment_bytes_, frame_idx), slot_idx));
}

absl::Status CheckLeftover(int fd, uint64_t bytes, uid_t uid) {
  struct stat status{};
  if (fstat(fd, &status) != 0) return FailedPrecondition("no descriptor");
  if (status.st_uid != uid) return FailedPrecondition("belongs to uid %d", status.st_uid);
  const int seals = fcntl(fd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return FailedPrecondition("its size is not sealed");
  }
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    return FailedPrecondition("has %d bytes, not %d", status.st_size, bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LeftoverIndex>> LeftoverIndex::Open(int fd,
                                                                   const Expected& expected) {
  const auto refuse = [fd](absl::Status status) {
    close(fd);
    return status;
  };
  SlotIndexHeader header;
  if (pread(fd, &header, sizeof(header), 0) != static_cast<ssize_t>(sizeof(header)) ||
      header.magic != kSlotIndexMagic) {
    return refuse(FailedPrecondition("no index of blocks"));
  }
  if (header.version != kSlotIndexVersion || header.entry_bytes != sizeof(SlotIndexEntry) ||
      header.slot_align_bytes != kSlotAlignBytes) {
    return refuse(FailedPrecondition("an index of version %d, this daemon has version %d",
                                     header.version, kSlotIndexVersion));
  }
  if (header.crc32c != CrcBeforeEnd(header)) {
    return refuse(FailedPrecondition("the header of the index is damaged"));
  }
  const std::string_view boot_id(header.boot_id.data(), header.boot_id.size());
  if (boot_id != expected.boot_id) {
    return refuse(FailedPrecondition("an index of another boot, %s", boot_id));
  }
  if (header.segment_bytes == 0 || header.segment_bytes % kSlotAlignBytes != 0 ||
      header.segment_bytes > (1ULL << 40) || header.frame_count > (1U << 30)) {
    return refuse(FailedPrecondition("the header of the index is impossible"));
  }
  const uint64_t bytes = IndexBytes(header.segment_bytes, header.frame_count);
  if (absl::Status ours = CheckLeftover(fd, bytes, expected.uid); !ours.ok()) {
    return refuse(Annotate(ours, "the index"));
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return refuse(ErrnoStatus(errno, "map the index"));
  return std::unique_ptr<LeftoverIndex>(
      new LeftoverIndex(fd, {static_cast<std::byte*>(base), bytes}, header));
}

LeftoverIndex::~LeftoverIndex() {
  munmap(memory_.data(), memory_.size());
  close(fd_);
}

std::optional<SlotIndexFrame> LeftoverIndex::Frame(uint32_t frame_idx) const {
  SlotIndexFrame frame;
  std::memcpy(&frame, FrameAt(memory_, header_.segment_bytes, frame_idx), sizeof(frame));
  if (frame.crc32c != CrcBeforeEnd(frame) || frame.frame_idx != frame_idx ||
      frame.slot_bytes == 0 || frame.slot_bytes % kSlotAlignBytes != 0 ||
      frame.slot_bytes > header_.segment_bytes) {
    return std::nullopt;
  }
  return frame;
}

absl::StatusOr<BlockMeta> LeftoverIndex::Entry(const SlotIndexFrame& frame,
                                               uint64_t slot_idx) const {
  SlotIndexEntry entry;
  std::memcpy(&entry, EntryAt(FrameAt(memory_, header_.segment_bytes, frame.frame_idx), slot_idx),
              sizeof(entry));
  if (entry.state == 0) return NotFound("no entry");
  if (entry.state != SlotIndexEntry::kLive ||
      entry.crc32c != EntryCrc(frame.file_id, slot_idx, entry) || entry.payload_bytes == 0 ||
      entry.payload_bytes > frame.slot_bytes) {
    return DataLoss("the entry of slot %d is damaged", slot_idx);
  }
  return BlockMeta{.namespace_hash = entry.namespace_hash,
                   .key = entry.key,
                   .parent = entry.parent,
                   .layout = entry.layout,
                   .depth = entry.depth,
                   .payload_bytes = entry.payload_bytes,
                   .crc32c = entry.payload_crc32c};
}

void LeftoverIndex::Erase(const SlotIndexFrame& frame, uint64_t slot_idx) {
  ClearState(EntryAt(FrameAt(memory_, header_.segment_bytes, frame.frame_idx), slot_idx));
}

}  // namespace kvtier
