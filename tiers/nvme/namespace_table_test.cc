// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/namespace_table.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>
#include <vector>

namespace kvtier::nvme {
namespace {

NamespaceHash HashNumber(uint8_t number) {
  NamespaceHash hash;
  hash.bytes[0] = number;
  return hash;
}

TEST(NamespaceTable, OneNumberForAsLongAsItIsHeld) {
  NamespaceTable table;
  const uint32_t first = table.Hold(HashNumber(1));
  const uint32_t second = table.Hold(HashNumber(2));
  EXPECT_NE(first, second);
  EXPECT_EQ(table.Hold(HashNumber(1)), first);
  table.Release(first);
  EXPECT_EQ(table.HashOf(first), HashNumber(1));
  table.Release(first);
  EXPECT_EQ(table.namespace_count(), 1U);
  EXPECT_EQ(table.Hold(HashNumber(3)), first) << "the number of a namespace that nobody holds";
  EXPECT_EQ(table.HashOf(first), HashNumber(3));
}

TEST(NamespaceTable, DoesWhatACountingMapDoes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  NamespaceTable table;
  std::vector<std::pair<uint32_t, uint8_t>> held;  // number, namespace
  std::unordered_map<uint8_t, size_t> counts;
  for (int step = 0; step < 20'000; ++step) {
    if (held.empty() || random() % 100 < 50) {
      const auto number = static_cast<uint8_t>(random() % 20);
      held.emplace_back(table.Hold(HashNumber(number)), number);
      ++counts[number];
    } else {
      std::swap(held[random() % held.size()], held.back());
      table.Release(held.back().first);
      if (--counts[held.back().second] == 0) counts.erase(held.back().second);
      held.pop_back();
    }
    ASSERT_EQ(table.namespace_count(), counts.size());
    if (held.empty()) continue;
    const auto& [idx, number] = held[random() % held.size()];
    ASSERT_EQ(table.HashOf(idx), HashNumber(number));
  }
}

}  // namespace
}  // namespace kvtier::nvme
