// SPDX-License-Identifier: Apache-2.0
//
// What the segments of a memory tier hold, in a memfd beside them that no client maps: so a later
// process can take the blocks over. FORMAT.md has the tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"
#include "proto/base/key.h"
#include "tiers/memory/memory_segment.h"
#include "tiers/tier.h"

namespace kvtier {

inline constexpr uint32_t kSlotIndexVersion = 1;
inline constexpr std::array<char, 8> kSlotIndexMagic = {'K', 'V', 'T', 'H', 'I', 'D', 'X', '1'};

// Native byte order: it never leaves the machine.
struct SlotIndexHeader {
  std::array<char, 8> magic = kSlotIndexMagic;
  uint32_t version = kSlotIndexVersion;
  uint32_t entry_bytes = 0;
  uint64_t segment_bytes = 0;
  uint32_t frame_count = 0;
  uint32_t slot_align_bytes = 0;
  // As /proc/sys/kernel/random/boot_id has it.
  std::array<char, 36> boot_id{};
  // CRC-32C of the fields before it.
  uint32_t crc32c = 0;
};
static_assert(sizeof(SlotIndexHeader) == 72 && offsetof(SlotIndexHeader, boot_id) == 32);

// What a frame of the arena is at present.
struct SlotIndexFrame {
  FileId file_id;
  uint64_t slot_bytes = 0;
  // Who the memory belongs to; OwnerIdx may mean somebody else to the next process.
  Digest owner_tag;
  uint32_t frame_idx = 0;
  // CRC-32C of the fields before it. Never right in zeros.
  uint32_t crc32c = 0;
};
static_assert(sizeof(SlotIndexFrame) == 64 && offsetof(SlotIndexFrame, owner_tag) == 24);

struct SlotIndexEntry {
  // kLive, written last and cleared first; else nothing else in the entry means anything.
  uint32_t state = 0;
  // CRC-32C of the frame's file id, the slot's number and the fields after this one.
  uint32_t crc32c = 0;
  NamespaceHash namespace_hash;
  Key key;
  Key parent;
  LayoutFingerprint layout;
  uint32_t depth = 0;
  uint32_t payload_bytes = 0;
  uint32_t payload_crc32c = 0;
  uint32_t reserved = 0;
  // The replica's id: its upper bits are the slot's generation.
  ReplicaId replica = kNoReplica;

  static constexpr uint32_t kLive = 0x4556494C;  // "LIVE"
};
static_assert(sizeof(SlotIndexEntry) == 160 && offsetof(SlotIndexEntry, depth) == 136);
static_assert(std::is_trivially_copyable_v<SlotIndexEntry>);

// The index that a tier writes. At every instant an entry names the block that is in its slot, or
// is no entry: the process may be killed anywhere. Thread-compatible.
class SlotIndex {
 public:
  struct Options {
    std::string name;
    uint64_t segment_bytes = 0;
    uint32_t frame_count = 0;
    std::string boot_id;
  };

  // Takes memory as entries are used, not at once. Errors: those of the system.
  static absl::StatusOr<std::unique_ptr<SlotIndex>> Create(const Options& options);

  int fd() const { return file_->fd(); }
  FileId file_id() const { return file_->file_id(); }

  // Requires: if this differs from what the frame was, none of its slots has an entry.
  void DescribeFrame(uint32_t frame_idx, FileId file_id, uint64_t slot_bytes,
                     const Digest& owner_tag);
  // Requires: DescribeFrame came before.
  void Put(uint32_t frame_idx, uint64_t slot_idx, ReplicaId replica, const BlockMeta& meta);
  // Before the slot may hold anything else.
  void Clear(uint32_t frame_idx, uint64_t slot_idx);

  // The index is handed on: its contents outlive this object.
  void KeepContents() { file_->KeepContents(); }

 private:
  SlotIndex(std::shared_ptr<MemorySegment> file, uint64_t segment_bytes)
      : file_(std::move(file)), segment_bytes_(segment_bytes) {}

  const std::shared_ptr<MemorySegment> file_;
  const uint64_t segment_bytes_;
};

// An index that an earlier process left. Owns its descriptor and mapping. Erase and the rest may be
// called from several threads for different slots.
class LeftoverIndex {
 public:
  struct Expected {
    std::string boot_id;
    uid_t uid = 0;
  };

  // Takes `fd`. FAILED_PRECONDITION, with the reason: not ours, of another boot or version, or
  // damaged.
  static absl::StatusOr<std::unique_ptr<LeftoverIndex>> Open(int fd, const Expected& expected);
  ~LeftoverIndex();
  LeftoverIndex(const LeftoverIndex&) = delete;
  LeftoverIndex& operator=(const LeftoverIndex&) = delete;

  uint64_t segment_bytes() const { return header_.segment_bytes; }
  uint32_t frame_count() const { return header_.frame_count; }
  // Nothing when the frame is unused.
  std::optional<SlotIndexFrame> Frame(uint32_t frame_idx) const;
  uint64_t SlotCount(const SlotIndexFrame& frame) const {
    return header_.segment_bytes / frame.slot_bytes;
  }
  // NOT_FOUND: the slot has no entry. DATA_LOSS: it has one that is wrong in itself.
  absl::StatusOr<BlockMeta> Entry(const SlotIndexFrame& frame, uint64_t slot_idx) const;
  void Erase(const SlotIndexFrame& frame, uint64_t slot_idx);

 private:
  LeftoverIndex(int fd, std::span<std::byte> memory, const SlotIndexHeader& header)
      : fd_(fd), memory_(memory), header_(header) {}

  const int fd_;
  const std::span<std::byte> memory_;
  const SlotIndexHeader header_;
};

// FAILED_PRECONDITION unless `fd` is a memfd of `bytes` that belongs to `uid` and whose size nobody
// can change.
absl::Status CheckLeftover(int fd, uint64_t bytes, uid_t uid);

}  // namespace kvtier
