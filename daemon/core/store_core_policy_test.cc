// SPDX-License-Identifier: Apache-2.0
//
// What the core tells the eviction policy, seen by what leaves.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "daemon/core/store_core_fixture.h"

namespace kvtier::core {
namespace {

class StoreCorePolicyTest : public StoreCoreTest {
 protected:
  // A paused context of two blocks on host, which holds four; nvme takes nothing.
  void PutPaused(std::string_view name, std::span<const Key> keys, const Expectation& expectation) {
    ASSERT_TRUE(core_->CreateContext(session_, ns_, name, now_).ok());
    Put(keys);
    ASSERT_TRUE(core_->AppendContext(session_, ns_, name, 0, keys, now_, &effects_).ok());
    Settle();
    Pause(name, kNever, expectation);
    CompleteAll();
  }

  // Which of the two contexts lost blocks when two more came.
  std::pair<size_t, size_t> LeftAfterPressure(const Expectation& first, const Expectation& second) {
    Start(2, 4, 0, policy::EvictionKind::kHazard);
    const auto a = Chain(1, 2);
    const auto b = Chain(2, 2);
    PutPaused("a", a, first);
    now_ += 1000;
    PutPaused("b", b, second);
    now_ += 1000;
    PutPaused("c", Chain(3, 2), {});
    return {Lookup(a).size(), Lookup(b).size()};
  }
};

TEST_F(StoreCorePolicyTest, WithoutAWordTheOlderContextLeaves) {
  EXPECT_EQ(LeftAfterPressure({}, {}), (std::pair<size_t, size_t>{0, 2}));
}

TEST_F(StoreCorePolicyTest, TheContextThatComesBackLaterLeaves) {
  EXPECT_EQ(LeftAfterPressure({.returns_in_ms = 4000}, {.returns_in_ms = 3'600'000}),
            (std::pair<size_t, size_t>{2, 0}));
}

TEST_F(StoreCorePolicyTest, ClosedContextsLeaveBeforeOlderOnes) {
  Start(2, 4, 0, policy::EvictionKind::kHazard);
  const auto a = Chain(1, 2);
  const auto b = Chain(2, 2);
  // Paused contexts come back, closed ones do not: it takes some to know.
  for (uint32_t i = 0; i < 200; ++i) {
    const std::string name = "earlier" + std::to_string(i);
    const auto keys = Chain(100 + i, 2);
    PutPaused(name, keys, {});
    now_ += 2000;
    Release(Acquire(keys)->lease);
    ASSERT_TRUE(core_->CloseContext(session_, ns_, name, false, now_, &effects_).ok());
    Settle();
    now_ += 500;
  }
  PutPaused("a", a, {});
  now_ += 1000;
  PutPaused("b", b, {});
  ASSERT_TRUE(core_->CloseContext(session_, ns_, "b", false, now_, &effects_).ok());
  Settle();
  now_ += 1000;
  PutPaused("c", Chain(3, 2), {});
  EXPECT_EQ(Lookup(a).size(), 2U);
  EXPECT_EQ(Lookup(b).size(), 0U);
}

TEST_F(StoreCorePolicyTest, WhatAnotherContextHoldsIsNotFinishedWithOne) {
  Start(2, 4, 0, policy::EvictionKind::kHazard);
  const auto a = Chain(1, 2);
  PutPaused("a", a, {.returns_in_ms = 2000});
  ASSERT_TRUE(core_->ForkContext(session_, ns_, "a", "fork", 2, now_, &effects_).ok());
  ASSERT_TRUE(core_->CloseContext(session_, ns_, "fork", false, now_, &effects_).ok());
  Settle();
  now_ += 1000;
  PutPaused("b", Chain(2, 2), {});
  now_ += 1000;
  PutPaused("c", Chain(3, 2), {});
  EXPECT_EQ(Lookup(a).size(), 2U);
}

TEST_F(StoreCorePolicyTest, WhyMissTellsWhyABlockIsGone) {
  Start(2, 2, 2);
  const auto a = Chain(1, 2);
  Put(a);
  for (uint32_t seed = 2; seed <= 4; ++seed) Put(Chain(seed, 2));
  ASSERT_TRUE(Lookup(a).empty());
  const auto why = [&](const Key& key) { return core_->WhyMiss(Spec().hash, key); };
  EXPECT_EQ(why(Chain(9, 1)[0]).state, MissAnswer::State::kNeverStored);
  const MissAnswer evicted = why(a[1]);
  EXPECT_EQ(evicted.state, MissAnswer::State::kLeft);
  EXPECT_EQ(evicted.departure.reason, policy::MissReason::kEvicted);
  EXPECT_EQ(evicted.departure.tier, 2U);
  EXPECT_EQ(evicted.departure.use_count, 1U);
  // Once a block, however often it is asked for.
  Lookup(a);
  EXPECT_EQ(core_->Counters().regret.evicted_then_missed_block_count, 2U);

  const auto d = Chain(4, 2);
  EXPECT_EQ(why(d[1]).state, MissAnswer::State::kStored);
  EXPECT_EQ(why(d[1]).residency, kResidentHbm);
  EXPECT_TRUE(core_->WhyMiss(NamespaceHash{}, d[1]).other_namespace);
  ASSERT_TRUE(core_->ReportBad(session_, ns_, std::span(d).last(1), now_, &effects_).ok());
  Settle();
  EXPECT_EQ(why(d[1]).departure.reason, policy::MissReason::kCorrupt);
  Put(std::span(d).last(1), d[0]);
  EXPECT_EQ(why(d[1]).state, MissAnswer::State::kStored) << "it is back";
}

TEST_F(StoreCorePolicyTest, WhyMissKnowsDroppedAndRefusedBlocks) {
  admission_ = policy::Admission::kSeenAgain;
  Start(2, 2, 2);
  const auto a = Chain(1, 2);
  Put(a);
  Put(Chain(2, 2));
  Put(Chain(3, 2));
  EXPECT_EQ(core_->WhyMiss({}, a[0]).departure.reason, policy::MissReason::kNotAdmitted);
  const auto c = Chain(3, 2);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "c", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "c", 0, c, now_, &effects_).ok());
  ASSERT_TRUE(core_->CloseContext(session_, ns_, "c", true, now_, &effects_).ok());
  Settle();
  EXPECT_EQ(core_->WhyMiss({}, c[1]).departure.reason, policy::MissReason::kDropped);
}

class StoreCorePrefetchTest : public StoreCorePolicyTest {
 protected:
  // Two contexts on nvme only, whose links were measured at one block a millisecond.
  void StartWithColdContexts() {
    Start(4, 4, 16);
    for (uint32_t seed = 1; seed <= 6; ++seed) Put(Chain(seed, 2));
    for (const auto& keys : {Chain(1, 2), Chain(2, 2)}) {
      ASSERT_EQ(Lookup(keys), (std::vector<uint8_t>{kResidentNvme, kResidentNvme}));
    }
  }

  TicketState Prefetch(std::span<const Key> keys, const PrefetchHint& hint) {
    const auto state = core_->Prefetch(session_, ns_, keys, hint, now_, &effects_);
    Settle();
    return *state;
  }
};

TEST_F(StoreCorePrefetchTest, WhatIsNeededFirstIsReadFirst) {
  StartWithColdContexts();
  const auto late = Chain(1, 2);
  const auto soon = Chain(2, 2);
  // A demanded read in the way, so that both wait.
  core_->Acquire(session_, ns_, Chain(3, 2), kNever, now_, [](const auto&) {}, &effects_);
  Prefetch(late, {.needed_in_ms = 5000});
  Prefetch(soon, {.needed_in_ms = 50});
  std::vector<Key> order;
  while (!transfers_.empty()) {
    if (transfers_.front().source_tier == TierId::kNvme) {
      order.push_back(transfers_.front().meta.key);
    }
    Complete();
  }
  const auto at = [&](const Key& key) { return std::find(order.begin(), order.end(), key); };
  ASSERT_NE(at(soon[0]), order.end());
  EXPECT_LT(at(soon[0]), at(late[0]));
}

TEST_F(StoreCorePrefetchTest, AReadAheadThatSomebodyWaitsForIsExpeditedOnce) {
  StartWithColdContexts();
  const auto keys = Chain(1, 2);
  Prefetch(keys, {.needed_in_ms = 5000});
  while (!transfers_.empty() && transfers_.front().source_tier != TierId::kNvme) Complete();
  ASSERT_FALSE(transfers_.empty());
  const Transfer read = transfers_.front();
  EXPECT_TRUE(read.is_ahead);
  EXPECT_TRUE(expedited_.empty());
  EXPECT_FALSE(Acquire(std::array{read.meta.key}).has_value());
  EXPECT_FALSE(Acquire(std::array{read.meta.key}).has_value());
  EXPECT_EQ(expedited_, std::vector<ReplicaId>{read.source});
  CompleteAll();
  ASSERT_TRUE(acquired_.has_value());
  EXPECT_EQ(acquired_->blocks[0].status, BlockStatus::kOk);
}

TEST_F(StoreCorePrefetchTest, ADemandedReadIsNoneAhead) {
  StartWithColdContexts();
  EXPECT_FALSE(Acquire(Chain(1, 1)).has_value());
  while (!transfers_.empty() && transfers_.front().source_tier != TierId::kNvme) {
    EXPECT_FALSE(transfers_.front().is_ahead);
    Complete();
  }
  ASSERT_FALSE(transfers_.empty());
  EXPECT_FALSE(transfers_.front().is_ahead);
  EXPECT_FALSE(Acquire(Chain(1, 1)).has_value());
  EXPECT_TRUE(expedited_.empty());
}

TEST_F(StoreCorePrefetchTest, ATicketIsShownOnItsSessionsBoard) {
  StartWithColdContexts();
  const auto board = std::make_shared<TicketBoardPage>();
  core_->ShowTickets(session_, board);
  const auto keys = Chain(1, 2);
  const TicketState first = Prefetch(keys, {});
  const TicketState second = Prefetch(Chain(2, 2), {});
  ASSERT_NE(first.board_slot, second.board_slot);
  EXPECT_EQ(board->Find(first.board_slot, first.ticket), (TicketProgress{false, 0}));
  EXPECT_EQ(board->Find(first.board_slot, second.ticket), std::nullopt);
  EXPECT_EQ(board->Find(kTicketSlotCount, first.ticket), std::nullopt);
  CompleteAll();
  EXPECT_TRUE(core_->GetTicket(session_, first.ticket)->done);
  EXPECT_EQ(board->Find(first.board_slot, first.ticket), (TicketProgress{true, 2}));
  // The session goes on for longer than there are slots.
  for (uint32_t i = 2; i < kTicketSlotCount; ++i) Prefetch(keys, {});
  EXPECT_TRUE(board->Find(first.board_slot, first.ticket)->done);
  const TicketState last = Prefetch(keys, {});
  EXPECT_EQ(last.board_slot, first.board_slot);
  EXPECT_EQ(board->Find(first.board_slot, first.ticket), std::nullopt);
  EXPECT_TRUE(board->Find(last.board_slot, last.ticket).has_value());
}

TEST_F(StoreCorePrefetchTest, AnAnnouncedReturnIsReadAheadToHostInTime) {
  Start(4, 8, 16);
  const auto a = Chain(1, 2);
  PutPaused("a", a, {.returns_in_ms = 10'000});
  for (uint32_t seed = 2; seed <= 7; ++seed) Put(Chain(seed, 2));
  CompleteAll();
  ASSERT_EQ(Lookup(a), (std::vector<uint8_t>{kResidentNvme, kResidentNvme}));
  now_ += 1000;
  core_->Tick(now_, &effects_);
  Settle();
  CompleteAll();
  EXPECT_EQ(Lookup(a), (std::vector<uint8_t>{kResidentNvme, kResidentNvme})) << "much too early";
  now_ += 6600;  // the client may come back a quarter earlier than it says
  core_->Tick(now_, &effects_);
  Settle();
  CompleteAll();
  EXPECT_EQ(Lookup(a),
            (std::vector<uint8_t>{kResidentHost | kResidentNvme, kResidentHost | kResidentNvme}));
  EXPECT_EQ(core_->Counters().regret.prefetched_block_count, 2U);
}

// What is read ahead is held: others that come meanwhile do not push it out of memory.
class StoreCoreHoldTest : public StoreCorePrefetchTest {
 protected:
  void ReadAhead(std::span<const Key> keys, uint64_t needed_in_ms) {
    ticket_ = Prefetch(keys, {.needed_in_ms = needed_in_ms}).ticket;
    CompleteAll();
  }
  void FillMemory(uint32_t seed) {
    for (uint32_t i = 0; i < 6; ++i) Put(Chain(seed + i, 2));
  }
  size_t CountInMemory(std::span<const Key> keys) {
    return static_cast<size_t>(
        std::ranges::count_if(Lookup(keys), [](uint8_t bits) { return bits != kResidentNvme; }));
  }
  void PassTime(TimeMs ms) {
    now_ += ms;
    core_->Tick(now_, &effects_);
    Settle();
    CompleteAll();
  }

  TicketId ticket_ = 0;
};

TEST_F(StoreCoreHoldTest, BlocksReadAheadStayUntilTheyAreUsed) {
  StartWithColdContexts();
  const auto a = Chain(1, 2);
  ReadAhead(a, 5000);
  ASSERT_EQ(CountInMemory(a), 2U);
  FillMemory(100);
  EXPECT_EQ(CountInMemory(a), 2U);
  Release(Acquire(a)->lease);
  FillMemory(200);
  EXPECT_EQ(CountInMemory(a), 0U) << "it was used";
}

TEST_F(StoreCoreHoldTest, NobodyIsWaitedForForEver) {
  StartWithColdContexts();
  const auto a = Chain(1, 2);
  ReadAhead(a, 5000);
  PassTime(14'900);
  FillMemory(100);
  EXPECT_EQ(CountInMemory(a), 2U);
  PassTime(200);
  FillMemory(200);
  EXPECT_EQ(CountInMemory(a), 0U);
}

TEST_F(StoreCoreHoldTest, ACancelledTicketHoldsNothing) {
  StartWithColdContexts();
  const auto a = Chain(1, 2);
  ReadAhead(a, 5000);
  ASSERT_TRUE(core_->CancelTicket(session_, ticket_).ok());
  FillMemory(100);
  EXPECT_EQ(CountInMemory(a), 0U);
}

TEST_F(StoreCoreHoldTest, WhatIsHeldIsBoundedAndTheEarliestDeadlineHasIt) {
  Start(4, 8, 40);
  const auto late = Chain(1, 4);
  const auto soon = Chain(2, 4);
  Put(late);
  Put(soon);
  FillMemory(300);
  ReadAhead(late, 60'000);
  ReadAhead(soon, 1000);
  FillMemory(400);
  EXPECT_EQ(CountInMemory(soon), 4U);
  EXPECT_EQ(CountInMemory(late), 2U) << "half of memory, six blocks, is held";
  Release(Acquire(soon)->lease);
  PassTime(10);
  EXPECT_EQ(CountInMemory(late), 4U) << "there is room now";
}

TEST_F(StoreCoreHoldTest, NoMoreIsReadAheadThanCanBeHeld) {
  Start(4, 8, 40);
  const auto a = Chain(1, 8);
  Put(a);
  FillMemory(300);
  ASSERT_EQ(CountInMemory(a), 0U);
  ReadAhead(a, 5000);
  EXPECT_EQ(CountInMemory(a), 6U);
  EXPECT_TRUE(core_->GetTicket(session_, ticket_)->done);
}

// Whoever waits for a ticket may be the one whose use of another would make room for it.
TEST_F(StoreCoreHoldTest, ATicketThatWaitsForOthersIsDoneForNow) {
  Start(4, 8, 40);
  const auto soon = Chain(1, 6);
  const auto late = Chain(2, 4);
  Put(soon);
  Put(late);
  FillMemory(300);
  ReadAhead(soon, 1000);
  ReadAhead(late, 2000);
  EXPECT_EQ(CountInMemory(late), 0U);
  EXPECT_TRUE(core_->GetTicket(session_, ticket_)->done);
  Release(Acquire(soon)->lease);
  core_->Tick(++now_, &effects_);
  EXPECT_FALSE(core_->GetTicket(session_, ticket_)->done) << "it is read now";
}

TEST_F(StoreCoreHoldTest, WhatIsHeldStandsInNobodysWay) {
  Start(1, 3, 32);
  const auto a = Chain(1, 2);
  Put(a);
  FillMemory(300);
  ReadAhead(a, 60'000);
  // All of memory at once.
  const auto b = Chain(9, 4);
  EXPECT_EQ(Reserve(b), std::vector<BlockStatus>(4, BlockStatus::kOk));
  EXPECT_EQ(CountInMemory(a), 0U);
}

}  // namespace
}  // namespace kvtier::core
