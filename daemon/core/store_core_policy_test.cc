// SPDX-License-Identifier: Apache-2.0
//
// What the core tells the eviction policy, seen by what leaves.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace kvtier::core
