// SPDX-License-Identifier: Apache-2.0
//
// Events: what a watcher is told of where its tenant's blocks can be read.
#include <gmock/gmock.h>

#include <string>

#include "daemon/core/event_ring.h"
#include "daemon/core/store_core_fixture.h"

namespace kvtier::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StoreCoreWatchTest : public StoreCoreTest {
 protected:
  // "+hbm", "-nvme": of all keys.
  static std::vector<std::string> Texts(const std::vector<BlockEvent>& events) {
    std::vector<std::string> texts;
    for (const BlockEvent& event : events) {
      texts.push_back((event.is_stored ? "+" : "-") + std::string(TierName(event.tier)));
    }
    return texts;
  }

  std::vector<BlockEvent> EventsAfter(uint64_t sequence) {
    const auto events = core_->ReadEvents(session_, sequence, 1000);
    EXPECT_TRUE(events.ok() && !events->lost);
    return events->events;
  }
};

TEST(EventRingTest, KeepsTheLatest) {
  EventRing ring(3);
  EXPECT_TRUE(ring.HasAllAfter(0));
  EXPECT_FALSE(ring.HasAllAfter(1)) << "has not been";
  for (NamespaceIdx ns = 1; ns <= 5; ++ns) ring.Push({.key = {}, .parent = {}, .ns = ns});
  EXPECT_EQ(ring.last(), 5U);
  EXPECT_FALSE(ring.HasAllAfter(1));
  EXPECT_TRUE(ring.HasAllAfter(2));
  EXPECT_EQ(ring.At(3).ns, 3U);
  EXPECT_EQ(ring.At(5).ns, 5U);
  EXPECT_TRUE(ring.HasAllAfter(5));
}

TEST_F(StoreCoreWatchTest, TellsOfEveryTierABlockIsOn) {
  Start(1, 1, 1);
  const uint64_t begin = *core_->BeginWatch(session_);
  const std::vector<Key> keys = Chain(1, 1);
  ASSERT_THAT(Reserve(keys), ElementsAre(BlockStatus::kOk));
  EXPECT_THAT(EventsAfter(begin), IsEmpty()) << "nobody sees a fill";
  Commit(keys);
  EXPECT_THAT(Texts(EventsAfter(begin)), ElementsAre("+hbm"));
  Put(Chain(2, 1));
  Put(Chain(3, 1));
  std::vector<BlockEvent> of_first;
  for (const BlockEvent& event : EventsAfter(begin)) {
    if (event.key == keys[0]) of_first.push_back(event);
  }
  EXPECT_THAT(Texts(of_first), ElementsAre("+hbm", "+host", "-hbm", "+nvme", "-host"));
}

TEST_F(StoreCoreWatchTest, EventsNameParentAndNamespace) {
  Start(4, 4, 4);
  const uint64_t begin = *core_->BeginWatch(session_);
  const std::vector<Key> keys = Chain(1, 2);
  Put(keys);
  const std::vector<BlockEvent> events = EventsAfter(begin);
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].parent, std::nullopt);
  EXPECT_EQ(events[1].parent, keys[0]);
  EXPECT_EQ(events[1].key, keys[1]);
  EXPECT_EQ(events[1].namespace_hash, Spec().hash);
}

TEST_F(StoreCoreWatchTest, ATenantIsToldOfItsOwnBlocksOnly) {
  Start(4, 4, 4);
  Put(Chain(1, 1));
  const SessionId other = *core_->OpenSession(8, now_);
  const uint64_t begin = *core_->BeginWatch(other);
  Put(Chain(2, 1));
  const auto events = core_->ReadEvents(other, begin, 1000);
  ASSERT_TRUE(events.ok());
  EXPECT_THAT(events->events, IsEmpty());
  EXPECT_EQ(events->sequence, begin) << "nor of how many others there are";
  const auto snapshot = core_->ReadSnapshot(other, 0, 1000);
  EXPECT_THAT(snapshot->events, IsEmpty());
  EXPECT_TRUE(snapshot->done);
  EXPECT_EQ(core_->ReadSnapshot(session_, 0, 1000)->events.size(), 2U);
}

TEST_F(StoreCoreWatchTest, WhoReadsTooSlowlyIsTold) {
  Start(4, 4, 4);
  const uint64_t begin = *core_->BeginWatch(session_);
  const uint32_t kept_count = CoreOptions().watch_events_max;
  const std::vector<Key> keys = Chain(1, 1);
  for (uint32_t i = 0; i <= kept_count / 2; ++i) {
    Put(keys);
    ASSERT_TRUE(core_->ReportBad(session_, ns_, keys, now_, &effects_).ok());
    effects_ = {};
  }
  const auto lost = core_->ReadEvents(session_, begin, 1000);
  EXPECT_TRUE(lost->lost);
  EXPECT_THAT(lost->events, IsEmpty());
  EXPECT_FALSE(core_->ReadEvents(session_, begin + 2, 10)->lost);
  EXPECT_EQ(core_->ReadEvents(session_, begin + 2, 10)->sequence, begin + 12);
  EXPECT_TRUE(core_->ReadEvents(session_, begin + 2 * kept_count, 10)->lost) << "has not been";
}

TEST_F(StoreCoreWatchTest, RecoveredBlocksAppearWhenTheirTenantOpensThem) {
  tenants_.resize(2);
  Start(4, 4, 4);
  NamespaceSpec spec = Spec();
  spec.hash = HashNamespace("recovered", LayoutFingerprint{}, "", "");
  BlockMeta meta;
  meta.namespace_hash = spec.hash;
  meta.key = Chain(9, 1)[0];
  meta.payload_bytes = FakeSlots::kBlockBytes;
  ASSERT_TRUE(core_->Adopt(meta, *nvme_->Reserve(FakeSlots::kBlockBytes, 0)));
  const uint64_t begin = *core_->BeginWatch(session_);
  EXPECT_THAT(core_->ReadSnapshot(session_, 0, 1000)->events, IsEmpty());
  ASSERT_TRUE(core_->OpenNamespace(session_, spec).ok());
  core_->Tick(now_, &effects_);
  EXPECT_THAT(Texts(EventsAfter(begin)), ElementsAre("+nvme"));
}

}  // namespace
}  // namespace kvtier::core
