// SPDX-License-Identifier: Apache-2.0
//
// Random schedules of calls, completions, failures, deadlines and session ends against a model of
// what every slot holds. After each step the core's own rules are checked; at the end nothing may
// leak.
#include "daemon/core/store_core_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>

namespace kvtier::core {
namespace {

// Half of the runs have room for next to nothing, so that making room meets the block it is for.
// A third of them are under LRU, three quarters have several tenants.
StoreCoreModel::Options OptionsOf(uint64_t seed) {
  const bool has_tenants = seed % 4 != 0;
  const auto eviction = seed % 3 == 0 ? policy::EvictionKind::kLru : policy::EvictionKind::kHazard;
  if (seed % 2 == 0) {
    return {.eviction = eviction,
            .hbm_slots = 4 + seed % 13,
            .host_slots = 3 + seed % 7,
            .nvme_slots = 24,
            .has_tenants = has_tenants};
  }
  return {.eviction = eviction,
          .hbm_slots = 2 + seed % 5,
          .host_slots = 1 + seed % 4,
          .nvme_slots = 3 + seed % 8,
          .has_tenants = has_tenants};
}

StoreCoreModel::PickNumber RandomNumbers(uint64_t seed) {
  return [random = std::mt19937_64(seed)](size_t bound) mutable {
    return std::uniform_int_distribution<size_t>(0, bound - 1)(random);
  };
}

TEST(StoreCoreModelTest, RandomSchedulesKeepEveryRule) {
  const char* fixed = std::getenv("KVTIER_TEST_SEED");
  const uint64_t first =
      fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device()();
  const uint64_t runs = fixed != nullptr ? 1 : 60;
  std::cout << "seeds " << first << ".." << first + runs - 1 << " (KVTIER_TEST_SEED repeats one)\n";
  uint64_t verified = 0;
  uint64_t watched_count = 0;
  for (uint64_t seed = first; seed < first + runs; ++seed) {
    SCOPED_TRACE(seed);
    StoreCoreModel model(OptionsOf(seed), RandomNumbers(seed));
    for (int step = 0; step < 600 && !::testing::Test::HasFatalFailure(); ++step) model.Step();
    model.Finish();
    verified += model.verified();
    watched_count += model.watched_count();
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
  EXPECT_GT(verified, 1000U);
  EXPECT_GT(watched_count, 500U);
}

TEST(StoreCoreModelTest, TheSameEventsMoveTheSameBlocks) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    StoreCoreModel model(OptionsOf(seed), RandomNumbers(seed));
    StoreCoreModel again(OptionsOf(seed), RandomNumbers(seed));
    for (int step = 0; step < 300; ++step) {
      model.Step();
      again.Step();
    }
    EXPECT_NE(model.moves_hash(), 0U);
    EXPECT_EQ(model.moves_hash(), again.moves_hash());
    model.Finish();
    again.Finish();
  }
}

}  // namespace
}  // namespace kvtier::core
