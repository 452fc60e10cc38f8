// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/slot_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

constexpr uint64_t kFrameBytes = 64 << 10;

TEST(SlotAllocatorTest, GivesTheLowestFreeSlotFirst) {
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = 2});
  std::vector<ReplicaId> held;
  for (uint64_t i = 0; i < 8; ++i) {
    const auto reservation = allocator.Reserve(16 << 10, 1);
    ASSERT_TRUE(reservation.ok());
    EXPECT_EQ(reservation->slot.place.segment_idx, i / 4);
    EXPECT_EQ(reservation->slot.place.offset_bytes, i % 4 * (16 << 10));
    held.push_back(reservation->replica);
  }
  EXPECT_EQ(allocator.Reserve(16 << 10, 1).status().code(), absl::StatusCode::kResourceExhausted);
  allocator.Free(held[6]);
  allocator.Free(held[2]);
  const auto reservation = allocator.Reserve(16 << 10, 1);
  ASSERT_TRUE(reservation.ok());
  EXPECT_EQ(reservation->slot.place.segment_idx, 0u);
  EXPECT_EQ(reservation->slot.place.offset_bytes, 2u * (16 << 10));
  EXPECT_NE(reservation->replica, held[2]);
}

TEST(SlotAllocatorTest, RoundsSlotsUpToPagesAndRefusesMoreThanAFrame) {
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = 1});
  EXPECT_EQ(allocator.Reserve(0, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(allocator.Reserve(kFrameBytes + 1, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto reservation = allocator.Reserve(4097, 1);
  ASSERT_TRUE(reservation.ok());
  EXPECT_EQ(reservation->slot.slot_bytes, 8192u);
  EXPECT_EQ(allocator.used_bytes(), 8192u);
}

TEST(SlotAllocatorTest, KeepsTheSegmentNumberForTheSameOwnerOnly) {
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = 1});
  const auto first = allocator.Reserve(4096, 1);
  ASSERT_TRUE(first.ok());
  allocator.Free(first->replica);
  const auto other_size = allocator.Reserve(8192, 1);
  ASSERT_TRUE(other_size.ok());
  EXPECT_EQ(other_size->slot.place.segment_idx, first->slot.place.segment_idx);
  EXPECT_FALSE(other_size->retired_segment_idx.has_value());
  EXPECT_FALSE(allocator.Reserve(8192, 2).ok()) << "a segment in use went to another owner";
  allocator.Free(other_size->replica);
  const auto other_owner = allocator.Reserve(8192, 2);
  ASSERT_TRUE(other_owner.ok());
  EXPECT_EQ(other_owner->retired_segment_idx, first->slot.place.segment_idx);
  EXPECT_NE(other_owner->slot.place.segment_idx, first->slot.place.segment_idx);
}

TEST(SlotAllocatorTest, CountsWholeFramesOfAnOwner) {
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = 3});
  EXPECT_EQ(allocator.owner_bytes(1), 0U);
  const ReplicaId first = allocator.Reserve(kFrameBytes, 1)->replica;
  const ReplicaId second = allocator.Reserve(1, 1)->replica;
  ASSERT_TRUE(allocator.Reserve(1, 1).ok());
  ASSERT_TRUE(allocator.Reserve(1, 2).ok());
  EXPECT_EQ(allocator.owner_bytes(1), 2 * kFrameBytes);
  EXPECT_EQ(allocator.owner_bytes(2), kFrameBytes);
  allocator.Free(first);
  allocator.Free(second);
  EXPECT_EQ(allocator.owner_bytes(1), kFrameBytes);
}

TEST(SlotAllocatorTest, RetiresASlotRatherThanRepeatAnId) {
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = 1, .generation_max = 3});
  std::set<ReplicaId> seen;
  while (true) {
    const auto reservation = allocator.Reserve(32 << 10, 1);
    if (!reservation.ok()) break;
    ASSERT_TRUE(seen.insert(reservation->replica).second);
    allocator.Free(reservation->replica);
    ASSERT_FALSE(allocator.IsReserved(reservation->replica));
  }
  EXPECT_EQ(seen.size(), 6u) << "two slots, three times each";
}

TEST(SlotAllocatorDeathTest, AbortsOnAStaleFree) {
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = 1});
  const auto first = allocator.Reserve(4096, 1);
  ASSERT_TRUE(first.ok());
  allocator.Free(first->replica);
  EXPECT_DEATH(allocator.Free(first->replica), "broken invariant");
  ASSERT_TRUE(allocator.Reserve(4096, 1).ok());
  EXPECT_DEATH(allocator.Free(first->replica), "broken invariant");
}

// Random operations against plain bookkeeping: no overlap, no shared segment between owners, exact
// counts, ids and segment numbers never repeated, and no refusal while a whole frame is free.
TEST(SlotAllocatorTest, AgreesWithAModel) {
  std::mt19937_64 random(TestSeed());
  constexpr uint32_t kFrameCount = 5;
  SlotAllocator allocator({.frame_bytes = kFrameBytes, .frame_count = kFrameCount});
  struct Held {
    SlotAllocator::Slot slot;
    OwnerIdx owner;
  };
  std::map<ReplicaId, Held> held;
  std::set<ReplicaId> seen;
  std::set<uint32_t> retired;
  uint64_t used_bytes = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 100 < 52) {
      const auto payload_bytes = static_cast<uint32_t>(1 + random() % (3 * 4096));
      const auto owner = static_cast<OwnerIdx>(random() % 3);
      const auto reservation = allocator.Reserve(payload_bytes, owner);
      std::set<uint32_t> used_segments;
      for (const auto& [id, at] : held) used_segments.insert(at.slot.place.segment_idx);
      if (!reservation.ok()) {
        ASSERT_EQ(used_segments.size(), kFrameCount) << "refused although a frame is empty";
        continue;
      }
      if (reservation->retired_segment_idx) {
        ASSERT_FALSE(used_segments.contains(*reservation->retired_segment_idx));
        ASSERT_TRUE(retired.insert(*reservation->retired_segment_idx).second);
      }
      const SlotAllocator::Slot slot = reservation->slot;
      ASSERT_TRUE(seen.insert(reservation->replica).second);
      ASSERT_FALSE(retired.contains(slot.place.segment_idx));
      ASSERT_LE(slot.place.offset_bytes + slot.slot_bytes, kFrameBytes);
      for (const auto& [id, at] : held) {
        if (at.slot.place.segment_idx != slot.place.segment_idx) continue;
        ASSERT_EQ(at.owner, owner);
        ASSERT_TRUE(at.slot.place.offset_bytes + at.slot.slot_bytes <= slot.place.offset_bytes ||
                    slot.place.offset_bytes + slot.slot_bytes <= at.slot.place.offset_bytes);
      }
      held.emplace(reservation->replica, Held{slot, owner});
      used_bytes += slot.slot_bytes;
    } else if (!held.empty()) {
      auto it = std::next(held.begin(), static_cast<ptrdiff_t>(random() % held.size()));
      used_bytes -= it->second.slot.slot_bytes;
      allocator.Free(it->first);
      ASSERT_FALSE(allocator.IsReserved(it->first));
      held.erase(it);
    }
    ASSERT_EQ(allocator.used_bytes(), used_bytes);
  }
}

}  // namespace
}  // namespace kvtier
