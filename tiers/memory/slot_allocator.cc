// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/slot_allocator.h"

#include <algorithm>
#include <bit>

#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {

SlotAllocator::SlotAllocator(const Options& options)
    : options_(options), frame_pages_(options.frame_bytes / kSlotAlignBytes) {
  KVT_CHECK(options.frame_bytes > 0 && options.frame_bytes % kSlotAlignBytes == 0);
  KVT_CHECK(options.frame_count * frame_pages_ <= (1ULL << kSlotBits));
  KVT_CHECK(options.generation_max >= 1 && options.generation_max <= kGenerationMax);
  frames_.resize(options.frame_count);
}

uint64_t SlotAllocator::SlotBytes(uint32_t payload_bytes) {
  return (static_cast<uint64_t>(payload_bytes) + kSlotAlignBytes - 1) / kSlotAlignBytes *
         kSlotAlignBytes;
}

uint64_t SlotAllocator::owner_bytes(OwnerIdx owner) const {
  const auto count = frame_count_.find(owner);
  return count == frame_count_.end() ? 0 : count->second * options_.frame_bytes;
}

bool SlotAllocator::Frame::HasRoom() const {
  return std::any_of(free_bits.begin(), free_bits.end(), [](uint64_t word) { return word != 0; });
}

absl::StatusOr<SlotAllocator::Reservation> SlotAllocator::Reserve(uint32_t payload_bytes,
                                                                  OwnerIdx owner) {
  const uint64_t slot_bytes = SlotBytes(payload_bytes);
  if (slot_bytes == 0 || slot_bytes > options_.frame_bytes) {
    return Invalid("a block of %d bytes: must have 1 to %d bytes (one segment)", payload_bytes,
                   options_.frame_bytes);
  }
  Reservation reservation;
  auto& open = open_[{owner, slot_bytes}];
  uint32_t frame_idx;
  if (!open.empty()) {
    frame_idx = *open.begin();
  } else {
    std::optional<uint32_t> taken = TakeFrame(owner, slot_bytes, reservation.retired_segment_idx);
    if (!taken) {
      return Exhausted("no free slot of %d bytes: %d of %d bytes are reserved", slot_bytes,
                       used_bytes_, capacity_bytes());
    }
    frame_idx = *taken;
    open.insert(frame_idx);
  }
  Frame& frame = frames_[frame_idx];
  const uint32_t slot_idx = TakeLowestSlot(frame);
  if (!frame.HasRoom()) open.erase(frame_idx);
  ++frame.used_count;
  used_bytes_ += slot_bytes;
  const uint64_t generation = ++frame.generations[slot_idx];
  const uint64_t page_idx =
      frame_idx * frame_pages_ + slot_idx * (frame.slot_bytes / kSlotAlignBytes);
  reservation.replica = generation << kSlotBits | page_idx;
  reservation.slot = SlotAt(frame, slot_idx);
  return reservation;
}

std::optional<uint32_t> SlotAllocator::TakeFrame(OwnerIdx owner, uint64_t slot_bytes,
                                                 std::optional<uint32_t>& retired_segment_idx) {
  uint32_t frame_idx;
  if (auto own = empty_.find(owner); own != empty_.end() && !own->second.empty()) {
    frame_idx = *own->second.begin();
    own->second.erase(own->second.begin());
  } else if (next_frame_idx_ < options_.frame_count) {
    frame_idx = next_frame_idx_++;
    frames_[frame_idx].segment_idx = next_segment_idx_++;
  } else {
    std::set<uint32_t>* lowest = nullptr;
    for (auto& [other, frames] : empty_) {
      if (!frames.empty() && (lowest == nullptr || *frames.begin() < *lowest->begin())) {
        lowest = &frames;
      }
    }
    if (lowest == nullptr) return std::nullopt;
    frame_idx = *lowest->begin();
    lowest->erase(lowest->begin());
    retired_segment_idx = frames_[frame_idx].segment_idx;
    frames_[frame_idx].segment_idx = next_segment_idx_++;
  }
  Frame& frame = frames_[frame_idx];
  frame.owner = owner;
  ++frame_count_[owner];
  if (frame.slot_bytes != slot_bytes) Carve(frame, slot_bytes);
  return frame_idx;
}

void SlotAllocator::Carve(Frame& frame, uint64_t slot_bytes) {
  for (const uint64_t generation : frame.generations) {
    frame.generation_base = std::max(frame.generation_base, generation);
  }
  const size_t slot_count = options_.frame_bytes / slot_bytes;
  frame.slot_bytes = slot_bytes;
  frame.generations.assign(slot_count, frame.generation_base);
  frame.free_bits.assign((slot_count + 63) / 64, ~0ULL);
  if (slot_count % 64 != 0) frame.free_bits.back() = (1ULL << (slot_count % 64)) - 1;
}

uint32_t SlotAllocator::TakeLowestSlot(Frame& frame) {
  for (size_t i = 0; i < frame.free_bits.size(); ++i) {
    uint64_t& word = frame.free_bits[i];
    if (word == 0) continue;
    const int bit = std::countr_zero(word);
    word &= word - 1;
    return static_cast<uint32_t>(i * 64) + static_cast<uint32_t>(bit);
  }
  KVT_CHECK(false);
}

void SlotAllocator::Free(ReplicaId replica) {
  KVT_CHECK(IsReserved(replica));
  const Decoded at = *Decode(replica);
  Frame& frame = frames_[at.frame_idx];
  --frame.used_count;
  used_bytes_ -= frame.slot_bytes;
  auto& open = open_[{frame.owner, frame.slot_bytes}];
  // A worn-out slot stays taken for good, and keeps its frame out of the pool.
  const bool worn_out = at.generation >= options_.generation_max;
  if (worn_out) {
    frame.generations[at.slot_idx] = kWornOut;
    ++frame.worn_out_count;
  } else {
    frame.free_bits[at.slot_idx / 64] |= 1ULL << (at.slot_idx % 64);
    open.insert(at.frame_idx);
  }
  if (frame.used_count > 0 || frame.worn_out_count > 0) return;
  open.erase(at.frame_idx);
  --frame_count_[frame.owner];
  empty_[frame.owner].insert(at.frame_idx);
}

std::optional<SlotAllocator::Decoded> SlotAllocator::Decode(ReplicaId replica) const {
  const uint64_t page_idx = replica & ((1ULL << kSlotBits) - 1);
  const uint64_t frame_idx = page_idx / frame_pages_;
  if (frame_idx >= next_frame_idx_) return std::nullopt;
  const Frame& frame = frames_[frame_idx];
  const uint64_t offset_bytes = page_idx % frame_pages_ * kSlotAlignBytes;
  if (offset_bytes % frame.slot_bytes != 0) return std::nullopt;
  const uint64_t slot_idx = offset_bytes / frame.slot_bytes;
  if (slot_idx >= frame.generations.size()) return std::nullopt;
  return Decoded{.frame_idx = static_cast<uint32_t>(frame_idx),
                 .slot_idx = static_cast<uint32_t>(slot_idx),
                 .generation = replica >> kSlotBits};
}

bool SlotAllocator::IsReserved(ReplicaId replica) const {
  const std::optional<Decoded> at = Decode(replica);
  if (!at) return false;
  const Frame& frame = frames_[at->frame_idx];
  const bool is_free = (frame.free_bits[at->slot_idx / 64] >> (at->slot_idx % 64) & 1) != 0;
  return !is_free && frame.generations[at->slot_idx] == at->generation;
}

SlotAllocator::Slot SlotAllocator::Find(ReplicaId replica) const {
  KVT_CHECK(IsReserved(replica));
  const Decoded at = *Decode(replica);
  return SlotAt(frames_[at.frame_idx], at.slot_idx);
}

SlotAllocator::Slot SlotAllocator::SlotAt(const Frame& frame, uint32_t slot_idx) const {
  return {.place = {.segment_idx = frame.segment_idx, .offset_bytes = slot_idx * frame.slot_bytes},
          .slot_bytes = frame.slot_bytes};
}

}  // namespace kvtier
