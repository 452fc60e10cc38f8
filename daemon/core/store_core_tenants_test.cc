// SPDX-License-Identifier: Apache-2.0
//
// Quotas and reserves: whose block leaves when a tier is full.
#include <gmock/gmock.h>

#include <algorithm>

#include "daemon/core/store_core_fixture.h"
#include "proto/base/reasons.h"

namespace kvtier::core {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kBlock = FakeSlots::kBlockBytes;

class StoreCoreTenantsTest : public StoreCoreTest {
 protected:
  struct Tenant {
    SessionId session = 0;
    NamespaceIdx ns = 0;
  };

  // Two tenants with these limits, beside the fixture's own.
  void StartWith(std::vector<TenantLimits> limits, uint64_t hbm_slots, uint64_t host_slots,
                 uint64_t nvme_slots, policy::EvictionKind eviction = policy::EvictionKind::kLru) {
    tenants_ = std::move(limits);
    tenants_.resize(2);
    Start(hbm_slots, host_slots, nvme_slots, eviction);
    a_ = Open(0);
    b_ = Open(1);
  }

  static NamespaceSpec SpecOf(OwnerIdx owner) {
    NamespaceSpec spec = Spec();
    spec.hash = HashNamespace(std::to_string(owner), LayoutFingerprint{}, "", "");
    return spec;
  }

  Tenant Open(OwnerIdx owner) {
    const SessionId session = *core_->OpenSession(owner, now_);
    return {.session = session, .ns = *core_->OpenNamespace(session, SpecOf(owner))};
  }

  // Calls of the fixture are this tenant's from now on.
  void As(const Tenant& tenant) {
    session_ = tenant.session;
    ns_ = tenant.ns;
  }

  void PutChains(const Tenant& tenant, uint32_t first_seed, uint32_t count) {
    As(tenant);
    for (uint32_t i = 0; i < count; ++i) Put(Chain(first_seed + i, 1));
  }

  // On which tiers the first block of each chain is.
  std::vector<uint8_t> Residencies(const Tenant& tenant, uint32_t first_seed, uint32_t count) {
    As(tenant);
    std::vector<uint8_t> residencies;
    for (uint32_t i = 0; i < count; ++i) {
      const std::vector<uint8_t> found = Lookup(Chain(first_seed + i, 1));
      residencies.push_back(found.empty() ? 0 : found[0]);
    }
    return residencies;
  }

  uint64_t UsedBlocks(OwnerIdx owner, size_t tier) {
    return core_->Tenants().tenants.at(owner).tiers[tier].used_bytes / kBlock;
  }

  static TenantLimits Quotas(uint64_t hbm, uint64_t host, uint64_t nvme) {
    return {.quota_bytes = {hbm * kBlock, host * kBlock, nvme * kBlock}};
  }
  static TenantLimits Reserves(uint64_t hbm, uint64_t host, uint64_t nvme) {
    TenantLimits limits;
    limits.reserve_bytes = {hbm * kBlock, host * kBlock, nvme * kBlock};
    return limits;
  }

  Tenant a_, b_;
};

TEST_F(StoreCoreTenantsTest, AtItsQuotaATenantEvictsItsOwnBlocksOnly) {
  StartWith({Quotas(2, 2, 3)}, 16, 16, 16);
  PutChains(b_, 100, 6);
  PutChains(a_, 0, 12);
  EXPECT_THAT(Residencies(b_, 100, 6), Each(kResidentHbm));
  EXPECT_THAT(Residencies(a_, 10, 2), Each(kResidentHbm));
  EXPECT_THAT(Residencies(a_, 8, 2), Each(kResidentHost));
  EXPECT_THAT(Residencies(a_, 5, 3), Each(kResidentNvme));
  EXPECT_THAT(Residencies(a_, 0, 5), Each(0));
  EXPECT_EQ(core_->Tenants().tenants[0].tiers[0].displaced_block_count, 0U) << "by itself";
}

TEST_F(StoreCoreTenantsTest, WithAllItsBlocksLeasedItIsToldTheNumbers) {
  StartWith({Quotas(1, 1, 4)}, 16, 16, 16);
  PutChains(a_, 0, 2);
  const auto first = Acquire(Chain(0, 1));
  const auto second = Acquire(Chain(1, 1));
  ASSERT_TRUE(first.has_value() && second.has_value());
  absl::Status status;
  core_->Reserve(
      session_, ns_, std::nullopt, Chain(2, 1), TierId::kHbm, now_ + 10, now_,
      [&](const absl::StatusOr<std::vector<PlacedBlock>>& blocks) { status = blocks.status(); },
      &effects_);
  Settle();
  EXPECT_TRUE(status.ok()) << "it waits";
  // Nobody else waits with it.
  PutChains(b_, 100, 3);
  now_ += 10;
  core_->Tick(now_, &effects_);
  Settle();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(ReasonOf(status), reason::kQuotaReached);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("4096 of 4096 bytes on hbm (4096 pinned) and 4096 of 4096 bytes on host"));
  As(a_);
  Release(first->lease);
  PutChains(a_, 2, 1);
}

TEST_F(StoreCoreTenantsTest, ReadsThatWaitForAQuotaHoldNobodyElseUp) {
  StartWith({Quotas(1, 1, 4)}, 16, 16, 16);
  PutChains(a_, 0, 3);
  ASSERT_TRUE(Acquire(Chain(1, 1)).has_value());
  ASSERT_TRUE(Acquire(Chain(2, 1)).has_value());
  EXPECT_FALSE(Acquire(Chain(0, 1)).has_value()) << "both its slots are leased";
  PutChains(b_, 100, 40);
  const std::vector<uint8_t> residencies = Residencies(b_, 100, 40);
  const auto cold = std::find(residencies.begin(), residencies.end(), kResidentNvme);
  ASSERT_NE(cold, residencies.end());
  (void)Acquire(Chain(100 + static_cast<uint32_t>(cold - residencies.begin()), 1));
  CompleteAll();
  EXPECT_TRUE(acquired_.has_value());
}

TEST_F(StoreCoreTenantsTest, WhatATenantHasReservedOthersDoNotTake) {
  for (const auto eviction : {policy::EvictionKind::kLru, policy::EvictionKind::kHazard}) {
    StartWith({Reserves(2, 1, 1)}, 4, 3, 4, eviction);
    PutChains(a_, 0, 12);
    for (uint32_t i = 0; i < 60; ++i) {
      PutChains(b_, 100 + i, 1);
      now_ += 7;
      ASSERT_GE(UsedBlocks(0, 0), 2U);
      ASSERT_GE(UsedBlocks(0, 1), 1U);
      ASSERT_GE(UsedBlocks(0, 2), 1U);
    }
    EXPECT_GT(UsedBlocks(1, 0), 0U);
    EXPECT_GT(core_->Tenants().tenants[0].tiers[0].displaced_block_count, 0U);
  }
  // All is reserved, and nothing of it for the other.
  StartWith({Reserves(4, 3, 4)}, 4, 3, 4);
  PutChains(a_, 0, 11);
  const std::vector<uint8_t> before = Residencies(a_, 0, 11);
  As(b_);
  EXPECT_TRUE(Reserve(Chain(100, 1), {}, now_ + 5).empty());
  now_ += 5;
  core_->Tick(now_, &effects_);
  Settle();
  EXPECT_THAT(reserved_, ElementsAre(BlockStatus::kExhausted));
  EXPECT_EQ(Residencies(a_, 0, 11), before);
}

TEST_F(StoreCoreTenantsTest, ItsOwnFillsMayTakeWhatATenantHasReserved) {
  StartWith({Reserves(4, 3, 4)}, 4, 3, 4);
  PutChains(a_, 0, 20);
  EXPECT_THAT(Residencies(a_, 16, 4), Each(kResidentHbm));
}

TEST_F(StoreCoreTenantsTest, TheTenantThatHasMostGivesUpItsBlocks) {
  StartWith({}, 8, 64, 64);
  PutChains(a_, 0, 8);
  PutChains(b_, 100, 2);
  EXPECT_EQ(UsedBlocks(0, 0), 6U);
  PutChains(b_, 102, 2);
  EXPECT_EQ(UsedBlocks(0, 0), 4U);
  // Of equals it is the taker.
  PutChains(b_, 104, 20);
  EXPECT_EQ(UsedBlocks(0, 0), 4U);
  EXPECT_EQ(UsedBlocks(1, 0), 4U);
  EXPECT_EQ(core_->Tenants().tenants[0].tiers[0].displaced_block_count, 4U);
  EXPECT_EQ(core_->Tenants().tenants[1].tiers[0].displaced_block_count, 0U);
}

TEST_F(StoreCoreTenantsTest, AReserveMovesTheFairShare) {
  StartWith({Reserves(4, 0, 0)}, 8, 64, 64);
  PutChains(a_, 0, 8);
  PutChains(b_, 100, 20);
  // Four of its own, and half of the other four.
  EXPECT_EQ(UsedBlocks(0, 0), 6U);
  EXPECT_EQ(UsedBlocks(1, 0), 2U);
}

TEST_F(StoreCoreTenantsTest, WithoutAnyHostItDemotesToNvme) {
  StartWith({Quotas(2, 0, 16)}, 16, 16, 16);
  PutChains(a_, 0, 6);
  EXPECT_EQ(UsedBlocks(0, 1), 0U);
  EXPECT_THAT(Residencies(a_, 0, 4), Each(kResidentNvme));
  EXPECT_THAT(Residencies(a_, 4, 2), Each(kResidentHbm));
}

TEST_F(StoreCoreTenantsTest, RecoveredBlocksAreTheTenantsThatOpensThem) {
  tenants_ = {Quotas(8, 8, 2), {}};
  Start(8, 8, 16);
  for (uint32_t i = 0; i < 5; ++i) {
    BlockMeta meta;
    meta.namespace_hash = SpecOf(0).hash;
    meta.key = Chain(i, 1)[0];
    meta.payload_bytes = FakeSlots::kBlockBytes;
    ASSERT_TRUE(core_->Adopt(meta, *nvme_->Reserve(FakeSlots::kBlockBytes, 0)));
  }
  EXPECT_EQ(core_->Tenants().unclaimed.tiers[2].block_count, 5U);
  core_->CheckInvariants();
  a_ = Open(0);
  core_->Tick(now_, &effects_);
  Settle();
  EXPECT_EQ(core_->Tenants().unclaimed.tiers[2].block_count, 0U);
  EXPECT_EQ(UsedBlocks(0, 2), 2U) << "what is above the quota has left";
  b_ = Open(1);
  PutChains(b_, 100, 3);
}

TEST_F(StoreCoreTenantsTest, ForksAreChargedOnce) {
  StartWith({Quotas(4, 4, 4)}, 8, 8, 8);
  As(a_);
  const std::vector<Key> keys = Chain(1, 3);
  Put(keys);
  ASSERT_TRUE(core_->CreateContext(session_, ns_, "parent", now_).ok());
  ASSERT_TRUE(core_->AppendContext(session_, ns_, "parent", 0, keys, now_, &effects_).ok());
  ASSERT_TRUE(core_->ForkContext(session_, ns_, "parent", "child", 3, now_, &effects_).ok());
  Settle();
  EXPECT_EQ(UsedBlocks(0, 0), 3U);
}

}  // namespace
}  // namespace kvtier::core
