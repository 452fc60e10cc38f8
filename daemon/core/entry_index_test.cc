// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/entry_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <unordered_map>
#include <vector>

namespace kvtier::core {
namespace {

Key KeyOf(uint64_t number) {
  Key key;
  // What a client would do to have one long chain: all keys begin alike.
  std::memcpy(key.bytes.data() + 24, &number, sizeof(number));
  return key;
}

TEST(EntryIndex, FindsAKeyInItsNamespaceOnly) {
  EntryIndex index;
  EXPECT_EQ(index.Find(0, KeyOf(1)), kNoEntry);
  const EntryIdx idx = index.Add(0, KeyOf(1));
  EXPECT_EQ(index.Find(0, KeyOf(1)), idx);
  EXPECT_EQ(index.Find(1, KeyOf(1)), kNoEntry);
  EXPECT_EQ(index.At(idx).state, EntryState::kGhost);
  EXPECT_NE(index.Add(1, KeyOf(1)), idx);
  index.Remove(idx);
  EXPECT_EQ(index.Find(0, KeyOf(1)), kNoEntry);
  EXPECT_NE(index.Find(1, KeyOf(1)), kNoEntry);
  EXPECT_EQ(index.At(idx).state, EntryState::kUnused);
}

TEST(EntryIndex, DoesWhatAMapDoes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  EntryIndex index;
  std::unordered_map<uint64_t, EntryIdx> model;
  constexpr NamespaceIdx kNamespaces = 2;
  for (int step = 0; step < 30'000; ++step) {
    // More adds than removals, then fewer: through several sizes of the table.
    const bool adds = random() % 100 < (step < 20'000 ? 60 : 30);
    const uint64_t number = random() % 6'000;
    const auto ns = static_cast<NamespaceIdx>(number % kNamespaces);
    const auto known = model.find(number);
    const EntryIdx found = index.Find(ns, KeyOf(number));
    ASSERT_EQ(found, known == model.end() ? kNoEntry : known->second) << step;
    if (adds && found == kNoEntry) {
      model.emplace(number, index.Add(ns, KeyOf(number)));
    } else if (!adds && found != kNoEntry) {
      index.Remove(found);
      model.erase(known);
    }
    ASSERT_EQ(index.entry_count(), model.size());
  }
  for (const auto& [number, idx] : model) {
    const auto ns = static_cast<NamespaceIdx>(number % kNamespaces);
    ASSERT_EQ(index.Find(ns, KeyOf(number)), idx);
    ASSERT_EQ(index.At(idx).key, KeyOf(number));
    ASSERT_EQ(index.At(idx).ns, ns);
  }
}

TEST(EntryIndex, AChainIsWhatItsKeysAreOneByOne) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  EntryIndex index;
  for (const uint64_t entry_count : {0U, 1U, 7U, 1000U}) {
    while (index.entry_count() < entry_count) index.Add(0, KeyOf(index.entry_count()));
    for (int round = 0; round < 100; ++round) {
      std::vector<Key> keys(random() % 50);
      for (Key& key : keys) key = KeyOf(random() % (entry_count + 3));
      const size_t stop_after = random() % 50 + 1;
      std::vector<EntryIdx> found;
      index.FindEach(0, keys, [&](EntryIdx idx) {
        found.push_back(idx);
        return found.size() < stop_after;
      });
      ASSERT_EQ(found.size(), std::min(keys.size(), stop_after));
      for (size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], index.Find(0, keys[i]));
    }
  }
}

TEST(EntryIndex, AnEntryCostsAHundredAndThirtyTwoBytesAtEverySize) {
  EntryIndex index;
  // A chunk of entries, one of buckets, and pointers to chunks.
  constexpr uint64_t kChunksBytes = 2 * kHugeChunkBytes + 4096;
  for (uint64_t i = 0; i < 50'000; ++i) {
    index.Add(0, KeyOf(i));
    ASSERT_LE(index.memory_bytes(), (i + 1) * 132 + kChunksBytes);
  }
  const uint64_t bytes = index.memory_bytes();
  for (EntryIdx idx = 0; idx < 50'000; ++idx) index.Remove(idx);
  for (uint64_t i = 0; i < 50'000; ++i) index.Add(0, KeyOf(i + 1'000'000));
  EXPECT_EQ(index.memory_bytes(), bytes) << "removed entries are used again";
}

}  // namespace
}  // namespace kvtier::core
