// SPDX-License-Identifier: Apache-2.0
//
// A memory tier that is gone, or takes nothing.
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <vector>

#include "daemon/core/store_core_fixture.h"

namespace kvtier::core {
namespace {

TEST_F(StoreCoreTest, LosingHbmIsAMissThereAndNothingElsewhere) {
  Start(4, 4, 8);
  const auto on_host = Chain(1, 1);
  Put(on_host);
  (void)core_->CreateContext(session_, ns_, "agent", now_);
  (void)core_->AppendContext(session_, ns_, "agent", 0, on_host, now_, &effects_);
  core_->PauseContext(session_, ns_, "agent", {}, kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  ASSERT_EQ(Lookup(on_host), std::vector<uint8_t>{kResidentHost});
  const auto on_both = Chain(2, 1);
  Put(on_both);
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  const auto on_hbm = Chain(3, 1);
  Put(on_hbm);
  const auto filling = Chain(4, 1);
  ASSERT_EQ(Reserve(filling), std::vector{BlockStatus::kOk});

  hbm_->degraded = true;
  core_->LoseTier(TierId::kHbm, now_, &effects_);
  Settle();
  EXPECT_TRUE((Lookup(on_host)[0] & kResidentHost) != 0);
  EXPECT_EQ(Lookup(on_both), std::vector<uint8_t>{kResidentNvme});
  EXPECT_TRUE(Lookup(on_hbm).empty());
  EXPECT_EQ(Commit(filling), std::vector{BlockStatus::kPrecondition});
  EXPECT_TRUE(hbm_->contents.empty());
  // What is asked for from now on goes to host.
  EXPECT_EQ(Reserve(on_hbm), std::vector{BlockStatus::kOk});
  EXPECT_EQ(Commit(on_hbm), std::vector{BlockStatus::kOk});
  EXPECT_EQ(Lookup(on_hbm), std::vector<uint8_t>{kResidentHost});
  ASSERT_FALSE(Acquire(on_both).has_value());
  CompleteAll();
  ASSERT_TRUE(acquired_.has_value());
  EXPECT_EQ(acquired_->blocks[0].tier, TierId::kHost);
}

TEST_F(StoreCoreTest, WhatIsInUseOnALostTierGoesWhenItsUseEnds) {
  Start(4, 4, 8);
  const auto leased = Chain(1, 1);
  Put(leased);
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  const auto moving = Chain(2, 1);
  Put(moving);
  ASSERT_TRUE(Acquire(leased).has_value());
  const LeaseId lease = acquired_->lease;
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  ASSERT_EQ(transfers_.size(), 1U);

  hbm_->degraded = true;
  core_->LoseTier(TierId::kHbm, now_, &effects_);
  Settle();
  EXPECT_TRUE(Lookup(leased).empty());
  EXPECT_TRUE(Lookup(moving).empty());
  EXPECT_EQ(hbm_->contents.size(), 2U);
  Complete(absl::UnavailableError("the device is lost"));
  EXPECT_EQ(hbm_->contents.size(), 1U);
  EXPECT_TRUE(Lookup(moving).empty());
  EXPECT_TRUE(core_->Release(session_, std::array{lease}, now_, &effects_).ok());
  Settle();
  EXPECT_TRUE(hbm_->contents.empty());
  EXPECT_EQ(Lookup(leased), std::vector<uint8_t>{kResidentNvme});
}

TEST_F(StoreCoreTest, WhatArrivesOnALostTierIsNotThere) {
  Start(4, 4, 8);
  const auto keys = Chain(1, 1);
  Put(keys);
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  (void)core_->CreateContext(session_, ns_, "agent", now_);
  (void)core_->AppendContext(session_, ns_, "agent", 0, keys, now_, &effects_);
  core_->PauseContext(session_, ns_, "agent", {}, kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  ASSERT_EQ(Lookup(keys), std::vector<uint8_t>{kResidentHost | kResidentNvme});
  (void)core_->ResumeContext(session_, ns_, "agent", {}, now_, &effects_);
  Settle();
  ASSERT_EQ(transfers_.size(), 1U);
  hbm_->degraded = true;
  core_->LoseTier(TierId::kHbm, now_, &effects_);
  Settle();
  Complete();
  EXPECT_EQ(Lookup(keys), std::vector<uint8_t>{kResidentHost | kResidentNvme});
  EXPECT_TRUE(hbm_->contents.empty());
}

TEST_F(StoreCoreTest, ATierThatTakesNothingNowIsNotEmptied) {
  Start(1, 4, 8);
  const auto stored = Chain(1, 1);
  Put(stored);
  hbm_->degraded = true;
  const auto next = Chain(2, 1);
  EXPECT_EQ(Reserve(next), std::vector{BlockStatus::kOk});
  EXPECT_EQ(Commit(next), std::vector{BlockStatus::kOk});
  EXPECT_EQ(Lookup(next), std::vector<uint8_t>{kResidentHost});
  EXPECT_EQ(Lookup(stored), std::vector<uint8_t>{kResidentHbm});
}

// Evicting what nvme has would not let it take more today.
TEST_F(StoreCoreTest, ASpentWriteBudgetIsNoReasonToEmptyNvme) {
  Start(4, 4, 8);
  const auto stored = Chain(1, 2);
  Put(stored);
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  ASSERT_EQ(nvme_->contents.size(), 2U);
  nvme_->is_budget_spent = true;
  const auto next = Chain(2, 1);
  Put(next);
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  EXPECT_EQ(nvme_->contents.size(), 2U);
}

TEST_F(StoreCoreTest, ABlockThatTheScrubFoundDamagedIsAMissOnNvme) {
  Start(4, 4, 8);
  const auto keys = Chain(1, 2);
  Put(keys);
  core_->Flush(kNever, now_, [](const auto&) {}, &effects_);
  Settle();
  CompleteAll();
  ASSERT_EQ(Lookup(keys),
            (std::vector<uint8_t>{kResidentHbm | kResidentNvme, kResidentHbm | kResidentNvme}));
  core_->LoseNvmeBlock(Spec().hash, keys[1], now_, &effects_);
  core_->LoseNvmeBlock(Spec().hash, keys[1], now_, &effects_);
  core_->LoseNvmeBlock(NamespaceHash{}, keys[0], now_, &effects_);
  Settle();
  EXPECT_EQ(Lookup(keys), (std::vector<uint8_t>{kResidentHbm | kResidentNvme, kResidentHbm}));
  EXPECT_EQ(nvme_->contents.size(), 1U);
}

}  // namespace
}  // namespace kvtier::core
