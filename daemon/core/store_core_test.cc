// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/store_core.h"

#include <gtest/gtest.h>

#include <set>

#include "daemon/core/store_core_fixture.h"
#include "proto/base/reasons.h"

namespace kvtier::core {
namespace {

TEST_F(StoreCoreTest, ABlockIsInvisibleUntilItsCommit) {
  Start(4, 4, 4);
  const auto keys = Chain(1, 2);
  EXPECT_EQ(Reserve(keys), (std::vector{BlockStatus::kOk, BlockStatus::kOk}));
  EXPECT_TRUE(Lookup(keys).empty());
  EXPECT_EQ(Acquire(keys)->lease, 0U);
  EXPECT_EQ(Reserve(keys), (std::vector{BlockStatus::kPending, BlockStatus::kPending}));
  Commit(std::span(keys).first(1));
  EXPECT_EQ(Lookup(keys), std::vector<uint8_t>{kResidentHbm});
  EXPECT_EQ(Reserve(keys), (std::vector{BlockStatus::kExists, BlockStatus::kPending}));
}

TEST_F(StoreCoreTest, AnAbortedFillLeavesNothingAndTheKeyCanBePutAgain) {
  Start(4, 4, 4);
  const auto keys = Chain(1, 2);
  Reserve(keys);
  ASSERT_TRUE(core_->Abort(session_, ns_, keys, now_, &effects_).ok());
  Settle();
  EXPECT_TRUE(hbm_->contents.empty());
  EXPECT_EQ(Commit(keys), (std::vector{BlockStatus::kPrecondition, BlockStatus::kPrecondition}));
  Put(keys);
  EXPECT_EQ(Lookup(keys).size(), 2U);
}

TEST_F(StoreCoreTest, AChildOfAnUnknownParentIsRefused) {
  Start(4, 4, 4);
  const auto keys = Chain(1, 3);
  EXPECT_EQ(Reserve(std::span(keys).last(2), keys[0]),
            (std::vector{BlockStatus::kPrecondition, BlockStatus::kPrecondition}));
  EXPECT_TRUE(hbm_->contents.empty());
}

TEST_F(StoreCoreTest, FullHbmDemotesTheColdestLeafToHostAndThenToNvme) {
  Start(2, 2, 8);
  const auto a = Chain(1, 2);
  const auto b = Chain(2, 2);
  const auto c = Chain(3, 2);
  Put(a);
  Put(b);
  EXPECT_EQ(Lookup(a), (std::vector<uint8_t>{kResidentHost, kResidentHost}));
  Put(c);
  EXPECT_EQ(Lookup(a), (std::vector<uint8_t>{kResidentNvme, kResidentNvme}));
  EXPECT_EQ(Lookup(b), (std::vector<uint8_t>{kResidentHost, kResidentHost}));
  EXPECT_EQ(Lookup(c), (std::vector<uint8_t>{kResidentHbm, kResidentHbm}));
}

TEST_F(StoreCoreTest, ColdestChainLeavesWholeBeforeAWarmerOneLosesItsEnd) {
  Start(4, 4, 8);
  Put(Chain(1, 2));
  Put(Chain(2, 2));
  Put(Chain(3, 2));
  EXPECT_EQ(Lookup(Chain(1, 2)), (std::vector<uint8_t>{kResidentHost, kResidentHost}));
  EXPECT_EQ(Lookup(Chain(2, 2)), (std::vector<uint8_t>{kResidentHbm, kResidentHbm}));
}

// The ends of all chains on hbm, the rest of them on host: neither tier alone has a way out.
TEST_F(StoreCoreTest, HbmGoesPastAHostFullOfPrefixes) {
  Start(2, 2, 8);
  const auto a = Chain(1, 4);
  const auto head = std::span(a).first(2);
  Put(head);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "c", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "c", 0, head, now_, &effects_).ok());
  Settle();
  Pause("c");
  CompleteAll();
  Put(std::span(a).subspan(2), a[1]);
  ASSERT_EQ(Lookup(a),
            (std::vector<uint8_t>{kResidentHost, kResidentHost, kResidentHbm, kResidentHbm}));
  Put(Chain(2, 2));
  EXPECT_EQ(Lookup(a),
            (std::vector<uint8_t>{kResidentHost, kResidentHost, kResidentNvme, kResidentNvme}));
  EXPECT_EQ(Lookup(Chain(2, 2)), (std::vector<uint8_t>{kResidentHbm, kResidentHbm}));
}

TEST_F(StoreCoreTest, PauseGoesPastAHostFullOfPrefixes) {
  Start(2, 2, 8);
  const auto a = Chain(1, 4);
  const auto head = std::span(a).first(2);
  Put(head);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "c", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "c", 0, head, now_, &effects_).ok());
  Settle();
  Pause("c");
  CompleteAll();
  Put(std::span(a).subspan(2), a[1]);
  ASSERT_TRUE(
      core_->AppendContext(session_, ns_, "c", 2, std::span(a).subspan(2), now_, &effects_).ok());
  Settle();
  Pause("c");
  CompleteAll();
  ASSERT_TRUE(paused_.has_value());
  EXPECT_EQ(paused_->freed_bytes, 2 * FakeSlots::kBlockBytes);
  EXPECT_EQ(Lookup(a),
            (std::vector<uint8_t>{kResidentHost, kResidentHost, kResidentNvme, kResidentNvme}));
}

TEST_F(StoreCoreTest, AcquireOfMemoryBlocksMovesNothing) {
  Start(2, 4, 8);
  const auto a = Chain(1, 2);
  const auto b = Chain(2, 2);
  Put(a);
  Put(b);
  for (const auto& keys : {a, b}) {
    const auto result = Acquire(keys);
    ASSERT_TRUE(result.has_value());
    EXPECT_TRUE(transfers_.empty());
    Release(result->lease);
  }
  EXPECT_EQ(core_->Counters().acquired_in_place_block_count, 4U);
}

TEST_F(StoreCoreTest, AcquireOfNvmeBlocksWaitsForTheReadAndKeepsTheCopy) {
  Start(2, 2, 8);
  const auto a = Chain(1, 2);
  Put(a);
  Put(Chain(2, 2));
  Put(Chain(3, 2));
  ASSERT_EQ(Lookup(a)[0], kResidentNvme);
  ASSERT_FALSE(Acquire(a).has_value());
  CompleteAll();
  ASSERT_TRUE(acquired_.has_value());
  EXPECT_EQ(acquired_->blocks[0].status, BlockStatus::kOk);
  EXPECT_EQ(acquired_->blocks[1].status, BlockStatus::kOk);
  EXPECT_NE(Lookup(a)[0] & kResidentNvme, 0);
  EXPECT_NE(Lookup(a)[0] & (kResidentHbm | kResidentHost), 0);
}

TEST_F(StoreCoreTest, ADamagedNvmeBlockIsAMissAndForgotten) {
  Start(1, 1, 8);
  const auto a = Chain(1, 1);
  Put(a);
  Put(Chain(2, 1));
  Put(Chain(3, 1));
  ASSERT_EQ(Lookup(a), std::vector<uint8_t>{kResidentNvme});
  ASSERT_FALSE(Acquire(a).has_value());
  while (!transfers_.empty() && transfers_.front().source_tier != TierId::kNvme) Complete();
  Complete(DataLoss("flipped"));
  ASSERT_TRUE(acquired_.has_value());
  EXPECT_EQ(acquired_->blocks[0].status, BlockStatus::kCorrupt);
  EXPECT_EQ(acquired_->lease, 0U);
  EXPECT_TRUE(Lookup(a).empty());
  EXPECT_EQ(core_->Counters().tiers[2].corrupt_block_count, 1U);
}

TEST_F(StoreCoreTest, ATransientReadErrorDeletesNothing) {
  Start(1, 1, 8);
  const auto a = Chain(1, 1);
  Put(a);
  Put(Chain(2, 1));
  Put(Chain(3, 1));
  ASSERT_FALSE(Acquire(a).has_value());
  while (!transfers_.empty() && transfers_.front().source_tier != TierId::kNvme) Complete();
  Complete(Unavailable("EIO"));
  ASSERT_TRUE(acquired_.has_value());
  EXPECT_EQ(acquired_->blocks[0].status, BlockStatus::kUnavailable);
  EXPECT_EQ(Lookup(a), std::vector<uint8_t>{kResidentNvme});
}

TEST_F(StoreCoreTest, ALeasedBlockIsNeitherMovedNorFreed) {
  Start(2, 2, 8);
  const auto a = Chain(1, 2);
  Put(a);
  const auto lease = Acquire(a)->lease;
  EXPECT_EQ(Reserve(Chain(2, 3), {}, now_ + 1), std::vector<BlockStatus>{});
  now_ += 2;
  core_->Tick(now_, &effects_);
  Settle();
  EXPECT_EQ(Lookup(a), (std::vector<uint8_t>{kResidentHbm, kResidentHbm}));
  Release(lease);
}

TEST_F(StoreCoreTest, ALeaseTakenDuringADemotionKeepsTheBlockWhereItIs) {
  Start(2, 4, 8);
  const auto a = Chain(1, 1);
  Put(a);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "c", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "c", 0, a, now_, &effects_).ok());
  Settle();
  ASSERT_FALSE(Pause("c").has_value());
  ASSERT_EQ(transfers_.size(), 1U);
  const auto lease = Acquire(a);
  ASSERT_TRUE(lease.has_value());
  Complete();
  ASSERT_TRUE(paused_.has_value());
  EXPECT_EQ(paused_->freed_bytes, 0U);
  EXPECT_EQ(paused_->resident_bytes, FakeSlots::kBlockBytes);
  EXPECT_EQ(Lookup(a), std::vector<uint8_t>{kResidentHbm});
  EXPECT_TRUE(host_->contents.empty());
}

TEST_F(StoreCoreTest, PauseFreesHotMemoryAndResumeBringsItBack) {
  Start(4, 4, 8);
  const auto a = Chain(1, 3);
  Put(a);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "c", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "c", 0, a, now_, &effects_).ok());
  Settle();
  ASSERT_FALSE(Pause("c").has_value()) << "answered before the memory was free";
  CompleteAll();
  ASSERT_TRUE(paused_.has_value());
  EXPECT_EQ(paused_->freed_bytes, 3 * FakeSlots::kBlockBytes);
  EXPECT_EQ(paused_->resident_bytes, 0U);
  EXPECT_TRUE(hbm_->contents.empty());
  const auto ticket = core_->ResumeContext(session_, ns_, "c", {}, now_, &effects_);
  Settle();
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(ticket->covered_block_count, 3U);
  EXPECT_EQ(ticket->ready_block_count, 0U);
  EXPECT_FALSE(ticket->done);
  CompleteAll();
  const auto after = core_->GetTicket(session_, ticket->ticket);
  EXPECT_TRUE(after->done);
  EXPECT_EQ(after->ready_block_count, 3U);
  EXPECT_TRUE(host_->contents.empty());
}

TEST_F(StoreCoreTest, PauseLeavesWhatAnActiveForkNeeds) {
  Start(4, 4, 8);
  const auto a = Chain(1, 3);
  Put(a);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "parent", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "parent", 0, a, now_, &effects_).ok());
  ASSERT_TRUE(core_->ForkContext(session_, ns_, "parent", "child", 2, now_, &effects_).ok());
  Settle();
  Pause("parent");
  CompleteAll();
  ASSERT_TRUE(paused_.has_value());
  EXPECT_EQ(paused_->freed_bytes, 1 * FakeSlots::kBlockBytes);
  EXPECT_EQ(Lookup(a), (std::vector<uint8_t>{kResidentHbm, kResidentHbm, kResidentHost}));
}

TEST_F(StoreCoreTest, CloseWithDropFreesOnlyWhatNobodyElseHolds) {
  Start(4, 4, 8);
  const auto a = Chain(1, 3);
  Put(a);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "parent", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "parent", 0, a, now_, &effects_).ok());
  ASSERT_TRUE(core_->ForkContext(session_, ns_, "parent", "child", 2, now_, &effects_).ok());
  const auto dropped = core_->CloseContext(session_, ns_, "parent", true, now_, &effects_);
  Settle();
  EXPECT_EQ(*dropped, FakeSlots::kBlockBytes);
  EXPECT_EQ(Lookup(a).size(), 2U);
}

TEST_F(StoreCoreTest, TheEndOfASessionFreesEverythingItHeld) {
  Start(4, 4, 4);
  const auto a = Chain(1, 2);
  Put(a);
  const auto b = Chain(2, 2);
  Acquire(a);
  Reserve(b);
  EXPECT_EQ(hbm_->contents.size(), 4U);
  core_->EndSession(session_, now_, &effects_);
  Settle();
  EXPECT_EQ(hbm_->contents.size(), 2U);
  EXPECT_EQ(core_->Counters().tiers[0].pinned_bytes, 0U);
  EXPECT_EQ(core_->Counters().lease_count, 0U);
  EXPECT_EQ(ReasonOf(core_->Lookup(session_, ns_, a).status()), reason::kSessionUnknown);
}

TEST_F(StoreCoreTest, SlotsAMappedProcessCanReachAreQuarantinedUntilItLetsGo) {
  Start(4, 4, 4);
  core_->AttachMapping(session_);
  const auto a = Chain(1, 2);
  Reserve(a);
  core_->EndSession(session_, now_, &effects_);
  Settle();
  EXPECT_EQ(hbm_->contents.size(), 2U) << "reused while the process may still write";
  EXPECT_EQ(core_->Counters().tiers[0].quarantined_bytes, 2 * FakeSlots::kBlockBytes);
  core_->DetachMapping(session_, now_, &effects_);
  Settle();
  EXPECT_TRUE(hbm_->contents.empty());
  EXPECT_EQ(core_->Counters().tiers[0].quarantined_bytes, 0U);
}

TEST_F(StoreCoreTest, ReserveThatFindsNoRoomAnswersExhaustedAtItsDeadline) {
  Start(1, 1, 0);
  Put(Chain(1, 1));
  Acquire(Chain(1, 1));
  EXPECT_EQ(Reserve(Chain(2, 2), {}, now_ + 10), std::vector<BlockStatus>{});
  now_ += 11;
  core_->Tick(now_, &effects_);
  Settle();
  // Host had room for one.
  EXPECT_EQ(reserved_, (std::vector{BlockStatus::kOk, BlockStatus::kExhausted}));
}

TEST_F(StoreCoreTest, AWaiterThatNothingCanHelpHoldsNobodyUp) {
  Start(1, 1, 0);
  const auto a = Chain(1, 2);
  Put(a);
  ASSERT_TRUE(Acquire(a).has_value());  // all of memory is leased
  EXPECT_TRUE(Reserve(Chain(2, 1)).empty()) << "there is no room";
  std::vector<BlockStatus> second;
  core_->Reserve(
      session_, ns_, {}, a, TierId::kHbm, kNever, now_,
      [&second](auto blocks) { second.push_back((*blocks)[0].status); }, &effects_);
  Settle();
  EXPECT_EQ(second, std::vector{BlockStatus::kExists}) << "it needs no room";
}

TEST_F(StoreCoreTest, WithNvmeDegradedHostEvictsAndMemoryServes) {
  Start(1, 1, 8);
  nvme_->degraded = true;
  Put(Chain(1, 1));
  Put(Chain(2, 1));
  Put(Chain(3, 1));
  EXPECT_TRUE(Lookup(Chain(1, 1)).empty());
  EXPECT_EQ(Lookup(Chain(2, 1)), std::vector<uint8_t>{kResidentHost});
  EXPECT_EQ(Lookup(Chain(3, 1)), std::vector<uint8_t>{kResidentHbm});
  EXPECT_EQ(core_->Counters().tiers[1].evicted_block_count, 1U);
}

TEST_F(StoreCoreTest, AnotherTenantsSameKeyIsAnotherBlock) {
  Start(4, 4, 4);
  const auto keys = Chain(1, 1);
  Put(keys);
  const SessionId other = *core_->OpenSession(8, now_);
  NamespaceSpec spec = Spec();
  spec.hash = HashNamespace("other", LayoutFingerprint{}, "", "");
  const NamespaceIdx ns = *core_->OpenNamespace(other, spec);
  EXPECT_TRUE(core_->Lookup(other, ns, keys)->residency.empty());
  EXPECT_EQ(ReasonOf(core_->Lookup(other, ns_, keys).status()), reason::kNamespaceUnknown);
}

TEST_F(StoreCoreTest, NamespacesAreBounded) {
  FakeSlots hbm(4);
  FakeSlots host(4);
  CoreOptions options;
  options.namespaces_max = 2;
  StoreCore core(options, &hbm, &host, nullptr,
                 policy::NewEvictionPolicy(policy::EvictionKind::kLru));
  const SessionId session = *core.OpenSession(7, now_);
  const auto open = [&](const char* salt) {
    NamespaceSpec spec = Spec();
    spec.hash = HashNamespace("t", LayoutFingerprint{}, "", salt);
    return core.OpenNamespace(session, spec);
  };
  ASSERT_TRUE(open("a").ok());
  ASSERT_TRUE(open("b").ok());
  EXPECT_EQ(open("c").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(open("a").ok()) << "one that is known";
  BlockMeta meta;
  meta.namespace_hash = HashNamespace("t", LayoutFingerprint{}, "", "c");
  meta.key = Chain(1, 1)[0];
  meta.payload_bytes = FakeSlots::kBlockBytes;
  EXPECT_FALSE(core.Adopt(meta, 1));
}

TEST_F(StoreCoreTest, AdoptedBlocksHitWhateverTheirOrder) {
  Start(4, 4, 8);
  const auto keys = Chain(1, 3);
  for (const size_t i : {2U, 0U, 1U}) {
    BlockMeta meta;
    meta.namespace_hash = Spec().hash;
    meta.key = keys[i];
    meta.parent = i == 0 ? Key{} : keys[i - 1];
    meta.depth = static_cast<uint32_t>(i);
    meta.payload_bytes = FakeSlots::kBlockBytes;
    const auto replica = nvme_->Reserve(FakeSlots::kBlockBytes, 0);
    EXPECT_TRUE(core_->Adopt(meta, *replica));
    EXPECT_FALSE(core_->Adopt(meta, *replica)) << "twice";
    core_->CheckInvariants();
  }
  EXPECT_EQ(Lookup(keys).size(), 3U);
}

TEST_F(StoreCoreTest, AdoptsABlockOfHostAndNvmeOnceEach) {
  Start(4, 4, 8);
  const auto keys = Chain(1, 1);
  BlockMeta meta;
  meta.namespace_hash = Spec().hash;
  meta.key = keys[0];
  meta.payload_bytes = FakeSlots::kBlockBytes;
  meta.crc32c = 5;
  const ReplicaId in_host = *host_->Reserve(FakeSlots::kBlockBytes, 0);
  const ReplicaId in_nvme = *nvme_->Reserve(FakeSlots::kBlockBytes, 0);
  EXPECT_TRUE(core_->AdoptHost(meta, in_host));
  EXPECT_FALSE(core_->AdoptHost(meta, in_host)) << "twice";
  BlockMeta other_bytes = meta;
  other_bytes.crc32c = 6;
  EXPECT_FALSE(core_->Adopt(other_bytes, in_nvme));
  EXPECT_TRUE(core_->Adopt(meta, in_nvme));
  core_->CheckInvariants();
  EXPECT_EQ(Lookup(keys), (std::vector<uint8_t>{kResidentHost | kResidentNvme}));
}

TEST_F(StoreCoreTest, AdoptsLateOnlyWhatItDoesNotHold) {
  Start(4, 4, 8);
  const auto keys = Chain(1, 3);
  Put(std::span(keys).first(1));
  ASSERT_EQ(Reserve(std::span(keys).subspan(1, 1), keys[0]), std::vector{BlockStatus::kOk});
  BlockMeta meta;
  meta.namespace_hash = Spec().hash;
  meta.payload_bytes = FakeSlots::kBlockBytes;
  for (uint32_t depth = 0; depth < 3; ++depth) {
    meta.key = keys[depth];
    meta.parent = depth == 0 ? Key{} : keys[depth - 1];
    meta.depth = depth;
    const ReplicaId replica = *nvme_->Reserve(FakeSlots::kBlockBytes, 0);
    EXPECT_EQ(core_->AdoptLate(meta, replica), depth == 2) << depth;
    core_->CheckInvariants();
  }
}

TEST_F(StoreCoreTest, TellsTiersWhatTheyHoldForGood) {
  Start(2, 2, 8);
  const auto keys = Chain(1, 4);
  for (const Key& key : keys) Put(std::span(&key, 1));
  CompleteAll();
  const auto held = [](const FakeSlots& slots) {
    std::set<Key> keys_held;
    for (const auto& [replica, meta] : slots.committed) {
      EXPECT_EQ(meta.payload_bytes, FakeSlots::kBlockBytes);
      EXPECT_TRUE(keys_held.insert(meta.key).second);
    }
    return keys_held;
  };
  for (const Key& key : keys) {
    const std::vector<uint8_t> residency = Lookup(std::span(&key, 1));
    const uint8_t bits = residency.empty() ? 0 : residency[0];
    EXPECT_EQ(held(*hbm_).contains(key), (bits & kResidentHbm) != 0);
    EXPECT_EQ(held(*host_).contains(key), (bits & kResidentHost) != 0);
    EXPECT_EQ(held(*nvme_).contains(key), (bits & kResidentNvme) != 0);
  }
}

TEST_F(StoreCoreTest, FlushWritesEveryMemoryBlockToNvme) {
  Start(4, 4, 8);
  const auto keys = Chain(1, 3);
  Put(keys);
  std::optional<uint64_t> written;
  core_->Flush(kNever, now_, [&](absl::StatusOr<uint64_t> count) { written = *count; }, &effects_);
  Settle();
  EXPECT_FALSE(written.has_value());
  CompleteAll();
  EXPECT_EQ(written, 3U);
  EXPECT_EQ(Lookup(keys), (std::vector<uint8_t>(3, kResidentHbm | kResidentNvme)));
}

TEST_F(StoreCoreTest, DrainAnswersEveryWaiter) {
  Start(1, 1, 8);
  const auto a = Chain(1, 1);
  Put(a);
  Put(Chain(2, 1));
  Put(Chain(3, 1));
  ASSERT_FALSE(Acquire(a).has_value());
  core_->Drain(now_, &effects_);
  Settle();
  ASSERT_TRUE(acquired_.has_value());
  EXPECT_EQ(acquired_->blocks[0].status, BlockStatus::kUnavailable);
  CompleteAll();
  EXPECT_FALSE(core_->OpenSession(1, now_).ok());
}

}  // namespace
}  // namespace kvtier::core
