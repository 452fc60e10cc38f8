// SPDX-License-Identifier: Apache-2.0
#include "policy/miss_table.h"

#include <gtest/gtest.h>

namespace kvtier::policy {
namespace {

TEST(MissTableTest, RemembersTheLastReasonUntilTheBlockIsBack) {
  MissTable table(64);
  EXPECT_FALSE(table.Find(7).has_value());
  table.Put(7, {.at_ms = 10, .reason = MissReason::kEvicted, .tier = 2});
  table.Put(7, {.at_ms = 20, .reason = MissReason::kCorrupt, .tier = 1});
  ASSERT_TRUE(table.Find(7).has_value());
  EXPECT_EQ(table.Find(7)->at_ms, 20U);
  EXPECT_EQ(table.Find(7)->reason, MissReason::kCorrupt);
  table.Erase(7);
  EXPECT_FALSE(table.Find(7).has_value());
}

TEST(MissTableTest, IsBoundedAndForgetsTheEarliest) {
  MissTable table(8);
  for (uint64_t key = 0; key < 9; ++key) {
    table.Put(key, {.at_ms = 100 + key, .reason = MissReason::kEvicted});
  }
  EXPECT_FALSE(table.Find(0).has_value());
  for (uint64_t key = 1; key < 9; ++key) EXPECT_TRUE(table.Find(key).has_value()) << key;
  EXPECT_EQ(table.memory_bytes(), 8U * 32);
}

}  // namespace
}  // namespace kvtier::policy
