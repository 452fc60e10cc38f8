// SPDX-License-Identifier: Apache-2.0
//
// A session's ticket board: one page that the daemon writes and the session's process maps
// read-only, so that asking whether a prefetch has ended costs a load and no call. The descriptor
// comes over the handle socket (HandleRequestKind::kGetBoard); a ticket says in which slot it is
// shown. A slot is shown anew after 256 tickets of the session, so it also says whose it is.
//
//   offset  size  field
//        0     8  magic "KVTBOARD"
//        8     4  version, 1
//       12     4  slot_count, 256
//       16    48  reserved, 0
//       64  2048  slots, each one 64-bit word, little-endian, written as a whole:
//                   bits 63-32  the low half of the ticket's id
//                   bit  31     done: nothing moves now (kvtier.v1.Ticket.done)
//                   bits 30-0   blocks that have arrived since the ticket was given out
//     2112  1984  reserved, 0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

namespace kvtier {

inline constexpr char kTicketBoardMagic[8] = {'K', 'V', 'T', 'B', 'O', 'A', 'R', 'D'};
inline constexpr uint32_t kTicketBoardVersion = 1;
inline constexpr uint32_t kTicketSlotCount = 256;

// What a slot says of its ticket.
struct TicketProgress {
  bool done = false;
  uint32_t moved_block_count = 0;

  friend bool operator==(const TicketProgress&, const TicketProgress&) = default;
};

// The page. One writer, any number of readers in any process; each slot is a value of its own and
// orders nothing else.
struct alignas(4096) TicketBoardPage {
  char magic[8];
  uint32_t version = kTicketBoardVersion;
  uint32_t slot_count = kTicketSlotCount;
  uint8_t reserved[48] = {};
  std::array<std::atomic<uint64_t>, kTicketSlotCount> slots = {};

  TicketBoardPage() { std::memcpy(magic, kTicketBoardMagic, sizeof(magic)); }

  // Requires: slot_idx < kTicketSlotCount.
  void Show(uint32_t slot_idx, uint64_t ticket_id, const TicketProgress& progress) {
    const uint64_t word = (ticket_id << 32) | (progress.done ? 1ULL << 31 : 0) |
                          (progress.moved_block_count & 0x7FFFFFFFU);
    slots[slot_idx].store(word, std::memory_order_release);
  }

  // Nothing: the slot shows another ticket, or there is none such.
  std::optional<TicketProgress> Find(uint32_t slot_idx, uint64_t ticket_id) const {
    if (slot_idx >= kTicketSlotCount) return std::nullopt;
    const uint64_t word = slots[slot_idx].load(std::memory_order_acquire);
    if (word >> 32 != (ticket_id & 0xFFFFFFFFU)) return std::nullopt;
    return TicketProgress{.done = (word >> 31 & 1) != 0,
                          .moved_block_count = static_cast<uint32_t>(word & 0x7FFFFFFFU)};
  }

  bool IsValid() const {
    return std::memcmp(magic, kTicketBoardMagic, sizeof(magic)) == 0 &&
           version == kTicketBoardVersion && slot_count == kTicketSlotCount;
  }
};
static_assert(sizeof(TicketBoardPage) == 4096 && offsetof(TicketBoardPage, slots) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

}  // namespace kvtier
