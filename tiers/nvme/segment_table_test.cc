// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/segment_table.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "tiers/tier_test_util.h"

namespace kvtier::nvme {
namespace {

constexpr uint64_t kSegmentBytes = 16 * kPageBytes;
constexpr uint64_t kRecordBytes = 3 * kPageBytes;  // five in a segment

class SegmentTableTest : public testing::Test {
 protected:
  // As the I/O thread does; nothing when there is no room now.
  static std::optional<Location> Append(SegmentTable& table, Stream stream, uint64_t record_bytes) {
    if (const auto at = table.Place(stream, record_bytes)) return at;
    if (!table.BeginActivation(stream, record_bytes, 1)) return std::nullopt;
    table.EndActivation(stream, true, true);
    return table.Place(stream, record_bytes);
  }
};

TEST_F(SegmentTableTest, AppendsAndNeverRepeatsAGeneration) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 6});
  std::set<uint64_t> seen;
  for (int i = 0; i < 15; ++i) {
    const auto at = Append(table, Stream::kWrite, kRecordBytes);
    ASSERT_TRUE(at.has_value());
    EXPECT_EQ(OffsetOf(at->generation), at->offset_bytes);
    EXPECT_TRUE(seen.insert(at->generation).second);
    table.Commit(*at);
  }
  EXPECT_EQ(table.live_bytes(), 15 * kRecordBytes);
  EXPECT_EQ(table.file_count(), 3u);
}

TEST_F(SegmentTableTest, LeavesTheLastFreeSegmentToMoves) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 5});
  while (const auto at = Append(table, Stream::kWrite, kRecordBytes)) table.Commit(*at);
  EXPECT_EQ(table.free_count(), 1u);
  EXPECT_TRUE(Append(table, Stream::kMove, kRecordBytes).has_value());
}

TEST_F(SegmentTableTest, MakesNoMoreFilesThanThereIsRoomFor) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 20});
  const uint64_t whole_bytes = table.capacity_bytes();
  std::vector<Location> placed;
  const auto fill = [&] {
    while (const auto at = Append(table, Stream::kWrite, kRecordBytes)) {
      table.Commit(*at);
      placed.push_back(*at);
    }
  };
  table.LimitFiles(7, /*may_lower=*/true);
  EXPECT_EQ(table.file_limit(), 7U);
  EXPECT_LT(table.capacity_bytes(), whole_bytes);
  fill();
  EXPECT_EQ(table.file_count(), 6U) << "the last one is for moves";
  // Others took the rest; the one for moves is still tried.
  table.LimitFiles(0, /*may_lower=*/true);
  EXPECT_EQ(table.file_limit(), 7U);
  EXPECT_TRUE(Append(table, Stream::kMove, kRecordBytes).has_value());
  EXPECT_EQ(table.file_count(), 7U);
  for (int i = 0; i < 5; ++i) table.Drop(placed[static_cast<size_t>(i)], kRecordBytes);
  table.LimitFiles(0, /*may_lower=*/true);
  EXPECT_EQ(table.file_limit(), 7U) << "one is free now";
  table.LimitFiles(0, /*may_lower=*/false);
  table.LimitFiles(3, /*may_lower=*/false);
  EXPECT_EQ(table.file_limit(), 10U);
  table.LimitFiles(0, /*may_lower=*/false);
  EXPECT_EQ(table.file_limit(), 10U) << "it was not wanted";
  table.LimitFiles(1000, /*may_lower=*/false);
  EXPECT_EQ(table.file_limit(), 20U);
  EXPECT_EQ(table.capacity_bytes(), whole_bytes);
  fill();
  EXPECT_EQ(table.file_count(), 19U);
}

TEST_F(SegmentTableTest, AFileSystemForLessThanFiveFilesIsFoundOutByMakingThem) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 20});
  table.LimitFiles(0, /*may_lower=*/true);
  EXPECT_EQ(table.file_limit(), SegmentTable::kSegmentCountMin);
  EXPECT_TRUE(Append(table, Stream::kWrite, kRecordBytes).has_value());
}

TEST_F(SegmentTableTest, AFileThatIsGoneIsAbsentOnceNothingUsesIt) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 6});
  std::vector<Location> placed;
  for (int i = 0; i < 7; ++i) {
    placed.push_back(*Append(table, Stream::kWrite, kRecordBytes));
    if (i != 6) table.Commit(placed.back());
  }
  const uint32_t sealed = placed[0].segment_idx;
  const uint32_t head = placed[5].segment_idx;
  ASSERT_NE(sealed, head);
  EXPECT_TRUE(table.LoseFile(sealed));
  EXPECT_FALSE(table.LoseFile(sealed)) << "that was known";
  EXPECT_TRUE(table.LoseFile(head));
  for (int i = 0; i < 5; ++i) table.Drop(placed[static_cast<size_t>(i)], kRecordBytes);
  EXPECT_FALSE(table.HasFile(sealed));
  EXPECT_TRUE(table.HasFile(head)) << "a record is on its way there";
  EXPECT_EQ(table.TakeVanished(), std::vector<uint32_t>{sealed});
  table.Drop(placed[5], kRecordBytes);
  table.Abandon(placed[6], kRecordBytes);
  EXPECT_EQ(table.TakeVanished(), std::vector<uint32_t>{head});
  EXPECT_EQ(table.file_count(), 0U);
  EXPECT_EQ(table.live_bytes(), 0U);
  // Both are made anew.
  const auto activation = table.BeginActivation(Stream::kWrite, kRecordBytes, 1);
  ASSERT_TRUE(activation.has_value());
  EXPECT_TRUE(activation->needs_prepare);
}

TEST_F(SegmentTableTest, AFreeFileThatIsGoneIsNotTaken) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 6});
  const auto at = Append(table, Stream::kWrite, kRecordBytes);
  table.Abandon(*at, kRecordBytes);
  table.SealIfHead(at->segment_idx);
  ASSERT_EQ(table.file_count(), 1U);
  EXPECT_TRUE(table.LoseFile(at->segment_idx));
  EXPECT_EQ(table.file_count(), 0U);
  EXPECT_EQ(table.free_count(), 6U);
}

// Five full segments of six; one record of the second is freed, so that it can be emptied.
class AlmostFullTableTest : public SegmentTableTest {
 protected:
  AlmostFullTableTest() {
    while (const auto at = Append(table_, Stream::kWrite, kRecordBytes)) {
      table_.Commit(*at);
      placed_.push_back(*at);
    }
    EXPECT_EQ(table_.free_count(), 1u);
    table_.Drop(placed_[5], kRecordBytes);
  }
  void Move(size_t idx) {
    const auto at = Append(table_, Stream::kMove, kRecordBytes);
    ASSERT_TRUE(at.has_value()) << "a move found no room";
    table_.Commit(*at);
    table_.Drop(placed_[idx], kRecordBytes);
    placed_[idx] = *at;
  }
  void Drop(size_t idx) { table_.Drop(placed_[idx], kRecordBytes); }

  SegmentTable table_{{.segment_bytes = kSegmentBytes, .segment_count = 6}};
  std::vector<Location> placed_;
};

TEST_F(AlmostFullTableTest, WritesTakeTheLastFreeSegmentWhenMovesCanDoWithoutIt) {
  ASSERT_EQ(table_.PickVictim(true), placed_[6].segment_idx);
  for (const size_t idx : {6, 7, 8, 9}) Move(idx);
  ASSERT_EQ(table_.free_count(), 1u);
  EXPECT_FALSE(Append(table_, Stream::kWrite, kRecordBytes).has_value())
      << "nothing can be emptied into the rest of the head of the moves";
  for (const size_t idx : {10, 11, 12}) Drop(idx);
  EXPECT_FALSE(Append(table_, Stream::kWrite, kRecordBytes).has_value())
      << "two records, room for one";
  Drop(13);
  const auto at = Append(table_, Stream::kWrite, kRecordBytes);
  ASSERT_TRUE(at.has_value());
  table_.Commit(*at);
  EXPECT_EQ(table_.free_count(), 0u);
  ASSERT_EQ(table_.PickVictim(true), placed_[14].segment_idx);
  Move(14);
  EXPECT_EQ(table_.free_count(), 1u);
}

TEST_F(AlmostFullTableTest, EmptiesSegmentsOnlyWhenTheHeadIsNearlyFull) {
  EXPECT_TRUE(table_.wants_reclaim()) << "the head is full";
  ASSERT_TRUE(table_.PickVictim(true).has_value());
  for (const size_t idx : {6, 7, 8, 9}) Move(idx);
  for (const size_t idx : {10, 11, 12, 13}) Drop(idx);
  EXPECT_FALSE(table_.wants_reclaim()) << "writes can go on";
  Drop(14);
  ASSERT_EQ(table_.free_count(), 2u);
  for (int i = 0; i < 5; ++i) {
    const auto at = Append(table_, Stream::kWrite, kRecordBytes);
    ASSERT_TRUE(at.has_value());
    table_.Commit(*at);
    EXPECT_EQ(table_.wants_reclaim(), i >= 3) << i;
  }
}

TEST_F(SegmentTableTest, RecyclesOnlyWhenNothingHoldsASegment) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 5});
  const auto at = Append(table, Stream::kWrite, kRecordBytes);
  ASSERT_TRUE(at.has_value());
  table.SealIfHead(at->segment_idx);
  EXPECT_EQ(table.free_count(), 4u) << "uncommitted";
  table.Commit(*at);
  EXPECT_EQ(table.free_count(), 4u) << "live";
  table.Pin(at->segment_idx);
  table.Drop(*at, kRecordBytes);
  EXPECT_EQ(table.free_count(), 4u) << "a delete is not durable yet";
  table.Unpin(at->segment_idx);
  EXPECT_EQ(table.free_count(), 5u);
}

TEST_F(SegmentTableTest, PicksTheEmptiestSegmentThatGains) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 8});
  std::vector<Location> placed;
  for (int i = 0; i < 20; ++i) {
    placed.push_back(*Append(table, Stream::kWrite, kRecordBytes));
    table.Commit(placed.back());
  }
  EXPECT_FALSE(table.CanPickVictim(true)) << "all full";
  table.Drop(placed[0], kRecordBytes);
  for (int i : {5, 6, 7}) table.Drop(placed[static_cast<size_t>(i)], kRecordBytes);
  const auto victim = table.PickVictim(false);
  ASSERT_TRUE(victim.has_value());
  EXPECT_EQ(*victim, placed[5].segment_idx);
  EXPECT_FALSE(table.PickVictim(true).has_value()) << "one at a time";
  table.ReleaseVictim(/*is_bad=*/true);
  EXPECT_EQ(table.PickVictim(true), placed[0].segment_idx) << "the bad one is left alone";
}

TEST_F(SegmentTableTest, GivesAFailedActivationBack) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 5});
  auto activation = table.BeginActivation(Stream::kWrite, kRecordBytes, 1);
  ASSERT_TRUE(activation.has_value());
  EXPECT_TRUE(activation->needs_prepare);
  table.EndActivation(Stream::kWrite, false, /*exists=*/false);
  EXPECT_EQ(table.file_count(), 0u);
  EXPECT_EQ(table.free_count(), 5u);
  const uint64_t first_sequence = activation->header.sequence;
  activation = table.BeginActivation(Stream::kWrite, kRecordBytes, 1);
  ASSERT_TRUE(activation.has_value());
  EXPECT_GT(activation->header.sequence, first_sequence);
}

TEST_F(SegmentTableTest, ContinuesASealedSegmentWhenACrashTookTheLastFreeOne) {
  SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = 5});
  std::vector<Location> at_load;
  for (uint32_t segment_idx = 0; segment_idx < 5; ++segment_idx) {
    const SegmentHeader header{.segment_idx = segment_idx,
                               .segment_bytes = kSegmentBytes,
                               .sequence = segment_idx + 1,
                               .nonce = 7};
    table.LoadSegment(segment_idx, header, true);
    // The victim (0) has two left, the target of its moves (4) three so far, the others are full.
    const uint64_t record_count = segment_idx == 0 ? 2 : segment_idx == 4 ? 3 : 5;
    for (uint64_t i = 0; i < record_count; ++i) {
      const uint64_t offset_bytes = kPageBytes + i * kRecordBytes;
      at_load.push_back({.segment_idx = segment_idx,
                         .offset_bytes = offset_bytes,
                         .generation = GenerationOf(segment_idx + 1, offset_bytes),
                         .nonce = 0});
      table.LoadRecord(at_load.back(), kRecordBytes);
    }
  }
  table.FinishLoad();
  ASSERT_EQ(table.free_count(), 0u);
  ASSERT_EQ(table.PickVictim(true), 0u);
  for (int i = 0; i < 2; ++i) {
    if (i == 0) {
      const auto activation = table.BeginActivation(Stream::kMove, kRecordBytes, 9);
      ASSERT_TRUE(activation.has_value());
      EXPECT_TRUE(activation->is_reopened);
      EXPECT_EQ(activation->header.segment_idx, 4u);
      EXPECT_EQ(activation->header.nonce, 7u);
      table.EndActivation(Stream::kMove, true, true);
    }
    const auto at = table.Place(Stream::kMove, kRecordBytes);
    ASSERT_TRUE(at.has_value());
    EXPECT_EQ(SequenceOf(at->generation), 5u);
    table.Commit(*at);
    table.Drop(at_load[static_cast<size_t>(i)], kRecordBytes);
  }
  EXPECT_EQ(table.free_count(), 1u);
}

// Random writes and frees at the full allowed load, moves whenever asked for: room is always found,
// no live bytes are ever handed out again, and the counts agree.
TEST_F(SegmentTableTest, AlwaysFindsRoomBelowItsCapacity) {
  std::mt19937_64 random(TestSeed());
  for (const uint32_t segment_count : {5u, 8u, 23u}) {
    SegmentTable table({.segment_bytes = kSegmentBytes, .segment_count = segment_count});
    // Equal records: the capacity in records is exact.
    const size_t record_count_max =
        table.capacity_bytes() / (table.room_bytes() / 5 / kPageBytes * kPageBytes);
    std::map<uint64_t, Location> live;  // by place
    const auto place_of = [](const Location& at) {
      return at.segment_idx * kSegmentBytes + at.offset_bytes;
    };
    const auto append = [&](Stream stream) {
      const auto at = Append(table, stream, kRecordBytes);
      if (!at) return false;
      const auto next = live.lower_bound(place_of(*at));
      EXPECT_TRUE(next == live.end() || place_of(*at) + kRecordBytes <= next->first);
      EXPECT_TRUE(next == live.begin() || std::prev(next)->first + kRecordBytes <= place_of(*at));
      live.emplace(place_of(*at), *at);
      table.Commit(*at);
      return true;
    };
    for (int step = 0; step < 5000; ++step) {
      if (live.size() >= record_count_max || (!live.empty() && random() % 3 == 0)) {
        auto it = std::next(live.begin(), static_cast<ptrdiff_t>(random() % live.size()));
        table.Drop(it->second, kRecordBytes);
        live.erase(it);
      }
      int move_rounds = 0;
      while (!append(Stream::kWrite)) {
        ASSERT_LT(++move_rounds, 100) << "emptying segments makes no progress";
        const auto victim = table.PickVictim(true);
        ASSERT_TRUE(victim.has_value()) << "no room, and nothing to empty";
        std::vector<Location> moving;
        for (const auto& [place, at] : live) {
          if (at.segment_idx == *victim) moving.push_back(at);
        }
        for (const Location& at : moving) {
          ASSERT_TRUE(append(Stream::kMove)) << "a move found no room";
          live.erase(place_of(at));
          table.Drop(at, kRecordBytes);
        }
        ASSERT_FALSE(table.victim().has_value());
      }
      ASSERT_EQ(table.live_bytes(), live.size() * kRecordBytes);
      ASSERT_LE(table.file_count(), segment_count);
    }
  }
}

}  // namespace
}  // namespace kvtier::nvme
