// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/replica_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace kvtier::nvme {
namespace {

constexpr uint32_t kSegmentCount = 5;

Digest DigestOf(uint64_t number) {
  Digest digest;
  std::memcpy(digest.bytes.data(), &number, sizeof(number));
  return digest;
}

Location Place(uint32_t segment_idx, uint64_t page) {
  return {.segment_idx = segment_idx,
          .offset_bytes = page * kPageBytes,
          .generation = GenerationOf(segment_idx + 7, page * kPageBytes)};
}

TEST(ReplicaTable, NoIdTwiceAndNothingUnderAnOldOne) {
  ReplicaTable table;
  const ReplicaId first = table.Add(100);
  EXPECT_NE(first, kNoReplica);
  EXPECT_EQ(table.Find(kNoReplica), nullptr);
  table.Remove(first);
  EXPECT_EQ(table.Find(first), nullptr);
  const ReplicaId second = table.Add(200);
  EXPECT_NE(second, first);
  EXPECT_EQ(table.Find(first), nullptr);
  EXPECT_EQ(table.At(second).payload_bytes, 200U);
}

TEST(ReplicaTable, APlaceIsGivenUpBeforeItsIdsRepeat) {
  ReplicaTable table(/*turn_max=*/3);
  std::unordered_set<ReplicaId> ids;
  for (int i = 0; i < 100; ++i) {
    const ReplicaId id = table.Add(1);
    EXPECT_TRUE(ids.insert(id).second) << id;
    table.Remove(id);
    EXPECT_EQ(table.Find(kNoReplica), nullptr);
  }
  for (const ReplicaId id : ids) EXPECT_EQ(table.Find(id), nullptr);
}

TEST(ReplicaTable, MembersInTheOrderInWhichTheyCame) {
  ReplicaTable table;
  std::vector<ReplicaId> ids;
  for (uint64_t page = 1; page <= 3; ++page) {
    ids.push_back(table.Add(1));
    table.Name(&table.At(ids.back()), DigestOf(1), DigestOf(page));
    table.Settle(ids.back(), Place(2, page));
  }
  EXPECT_EQ(table.MembersOf(2), ids);
  table.Settle(ids[0], Place(0, 9));
  EXPECT_EQ(table.At(ids[0]).at(), Place(0, 9));
  EXPECT_EQ(table.MembersOf(2), (std::vector<ReplicaId>{ids[1], ids[2]}));
  table.Lose(ids[1]);
  EXPECT_EQ(table.MembersOf(2), (std::vector<ReplicaId>{ids[2]}));
  EXPECT_EQ(table.SegmentsWithMembers(), (std::vector<uint32_t>{0, 2}));
  EXPECT_TRUE(table.MembersOf(17).empty());
}

// Against maps: random adds, moves, losses and removals.
class Model {
 public:
  explicit Model(uint64_t seed) : random_(seed) {}

  void Step() {
    const uint64_t dice = random_() % 100;
    if (known_.empty() || dice < 40) {
      Add();
    } else if (dice < 65) {
      Settle();
    } else if (dice < 70) {
      Lose();
    } else {
      Remove();
    }
  }

  void Check() const {
    ASSERT_EQ(table_.replica_count(), known_.size());
    std::vector<std::vector<ReplicaId>> members(kSegmentCount);
    for (const ReplicaId id : order_) {
      const Known& known = known_.at(id);
      const Replica* const replica = table_.Find(id);
      ASSERT_NE(replica, nullptr);
      ASSERT_EQ(replica->payload_bytes, known.payload_bytes);
      ASSERT_EQ(replica->state, known.state);
      if (known.state != ReplicaState::kReserved) {
        ASSERT_EQ(replica->key, known.key);
        ASSERT_EQ(table_.NamespaceOf(*replica), known.namespace_hash);
      }
      if (known.state != ReplicaState::kLive) continue;
      ASSERT_EQ(replica->at(), known.at);
      members[known.at.segment_idx].push_back(id);
    }
    std::vector<uint32_t> filled;
    for (uint32_t i = 0; i < kSegmentCount; ++i) {
      ASSERT_EQ(table_.MembersOf(i), members[i]) << i;
      if (!members[i].empty()) filled.push_back(i);
    }
    ASSERT_EQ(table_.SegmentsWithMembers(), filled);
    for (const ReplicaId id : removed_) ASSERT_EQ(table_.Find(id), nullptr);
  }

 private:
  struct Known {
    uint32_t payload_bytes = 0;
    ReplicaState state = ReplicaState::kReserved;
    NamespaceHash namespace_hash = {};
    Key key = {};
    Location at = {};
  };

  ReplicaId Any() { return order_[random_() % order_.size()]; }

  void Add() {
    const auto bytes = static_cast<uint32_t>(random_());
    const ReplicaId id = table_.Add(bytes);
    ASSERT_TRUE(known_.emplace(id, Known{.payload_bytes = bytes}).second);
    ASSERT_FALSE(std::count(removed_.begin(), removed_.end(), id));
    order_.push_back(id);
  }

  void Settle() {
    const ReplicaId id = Any();
    Known& known = known_.at(id);
    if (known.state == ReplicaState::kLost) return;
    if (known.state == ReplicaState::kReserved) {
      known.namespace_hash = DigestOf(random_() % 3);
      known.key = DigestOf(random_());
      // A write that failed before it was for another block, perhaps.
      table_.Name(&table_.At(id), DigestOf(random_() % 3), DigestOf(0));
      table_.Name(&table_.At(id), known.namespace_hash, known.key);
    }
    known.state = ReplicaState::kLive;
    known.at = Place(static_cast<uint32_t>(random_() % kSegmentCount), random_() % 1000 + 1);
    table_.Settle(id, known.at);
    std::erase(order_, id);
    order_.push_back(id);
  }

  void Lose() {
    const ReplicaId id = Any();
    if (known_.at(id).state != ReplicaState::kLive) return;
    known_.at(id).state = ReplicaState::kLost;
    table_.Lose(id);
  }

  void Remove() {
    const ReplicaId id = Any();
    table_.Remove(id);
    known_.erase(id);
    std::erase(order_, id);
    removed_.push_back(id);
  }

  std::mt19937_64 random_;
  ReplicaTable table_;
  std::unordered_map<ReplicaId, Known> known_;
  std::vector<ReplicaId> order_;  // by their last Settle
  std::vector<ReplicaId> removed_;
};

TEST(ReplicaTable, DoesWhatMapsDo) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Model model(seed);
  for (int step = 0; step < 2'000; ++step) {
    model.Step();
    model.Check();
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(ReplicaTable, AReplicaCostsACacheLine) {
  ReplicaTable table;
  constexpr uint64_t kCount = 100'000;
  for (uint64_t i = 0; i < kCount; ++i) {
    const ReplicaId id = table.Add(1);
    table.Name(&table.At(id), DigestOf(i % 3), DigestOf(i));
    table.Settle(id, Place(static_cast<uint32_t>(i / 1000), i % 1000 + 1));
  }
  EXPECT_LE(table.memory_bytes(), kCount * 64 + kHugeChunkBytes + 8192);
}

}  // namespace
}  // namespace kvtier::nvme
