// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "tiers/tier.h"

namespace kvtier {

// Slots are whole pages, so that they can be mapped, registered and written with O_DIRECT.
inline constexpr uint64_t kSlotAlignBytes = 4096;

// The room of a memory tier: equal frames, each carved into slots of one size for one owner.
//
// A frame that holds memory carries a segment number. Emptied frames return to a pool; the same
// owner takes one back under its old number, another owner under a new one (numbers are never
// reused within one allocator), and then the old number is retired: its memory must be replaced.
// Deterministic: the lowest free slot of the lowest open frame, then the lowest emptied frame of
// the owner, then an unused frame, then the lowest emptied frame of anybody else.
//
// A pure state machine: no memory, no I/O, no clock. Thread-compatible.
class SlotAllocator {
 public:
  // ReplicaId = generation << kSlotBits | page index of the slot's start among all frames.
  static constexpr int kSlotBits = 30;
  static constexpr uint64_t kGenerationMax = (1ULL << (64 - kSlotBits)) - 1;

  struct Options {
    // A multiple of kSlotAlignBytes.
    uint64_t frame_bytes = 0;
    // frame_count * frame_bytes / kSlotAlignBytes fits into kSlotBits.
    uint32_t frame_count = 0;
    // A slot that was given out this often is never used again, so that no ReplicaId repeats.
    uint64_t generation_max = kGenerationMax;
  };

  struct Slot {
    SlotPlace place;
    uint64_t slot_bytes = 0;
  };

  struct Reservation {
    ReplicaId replica = kNoReplica;
    Slot slot;
    // A segment number that ended with this call: the memory behind it is to be given up.
    std::optional<uint32_t> retired_segment_idx;
  };

  // Requires: options as described above.
  explicit SlotAllocator(const Options& options);

  // Errors: INVALID_ARGUMENT (0 bytes, or more than a frame), RESOURCE_EXHAUSTED.
  absl::StatusOr<Reservation> Reserve(uint32_t payload_bytes, OwnerIdx owner);
  // Requires: `replica` is reserved (checked: a stale or foreign id aborts).
  void Free(ReplicaId replica);
  // Requires: `replica` is reserved (checked).
  Slot Find(ReplicaId replica) const;
  bool IsReserved(ReplicaId replica) const;

  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t capacity_bytes() const {
    return static_cast<uint64_t>(options_.frame_count) * options_.frame_bytes;
  }
  // Of the frames that hold blocks of this owner.
  uint64_t owner_bytes(OwnerIdx owner) const;
  // Frames that have a segment number now.
  uint32_t segment_count() const { return next_frame_idx_; }
  static uint64_t SlotBytes(uint32_t payload_bytes);

 private:
  struct Frame {
    uint32_t segment_idx = 0;
    OwnerIdx owner = 0;
    uint64_t slot_bytes = 0;
    uint32_t used_count = 0;
    uint32_t worn_out_count = 0;
    // One bit a slot, 1 = free.
    std::vector<uint64_t> free_bits;
    // The generation of each slot's last reservation.
    std::vector<uint64_t> generations;
    // Above every generation this frame gave out under earlier carvings.
    uint64_t generation_base = 0;
    bool HasRoom() const;
  };
  // In place of the generation of a slot that is never used again; no ReplicaId carries it.
  static constexpr uint64_t kWornOut = ~0ULL;
  struct Decoded {
    uint32_t frame_idx = 0;
    uint32_t slot_idx = 0;
    uint64_t generation = 0;
  };

  std::optional<Decoded> Decode(ReplicaId replica) const;
  std::optional<uint32_t> TakeFrame(OwnerIdx owner, uint64_t slot_bytes,
                                    std::optional<uint32_t>& retired_segment_idx);
  void Carve(Frame& frame, uint64_t slot_bytes);
  uint32_t TakeLowestSlot(Frame& frame);
  Slot SlotAt(const Frame& frame, uint32_t slot_idx) const;

  const Options options_;
  const uint64_t frame_pages_;
  std::vector<Frame> frames_;
  // Frames below this number have memory; those above were never used.
  uint32_t next_frame_idx_ = 0;
  uint32_t next_segment_idx_ = 0;
  uint64_t used_bytes_ = 0;
  // Frames in use that have a free slot, by what they are carved for.
  std::map<std::pair<OwnerIdx, uint64_t>, std::set<uint32_t>> open_;
  // Frames in use.
  std::map<OwnerIdx, uint32_t> frame_count_;
  // Emptied frames by their last owner.
  std::map<OwnerIdx, std::set<uint32_t>> empty_;
};

}  // namespace kvtier
