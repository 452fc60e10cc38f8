// SPDX-License-Identifier: Apache-2.0
#include "proto/base/chunked_vector.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace kvtier {
namespace {

struct alignas(64) Wide {
  explicit Wide(uint64_t word) : number(word) {}
  uint64_t number;
};

TEST(ChunkedVector, HoldsWhatAVectorHolds) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  ChunkedVector<uint64_t> chunked;
  std::vector<uint64_t> model;
  EXPECT_TRUE(chunked.empty());
  for (size_t i = 0; i < 3 * ChunkedVector<uint64_t>::kChunkCount + 1; ++i) {
    model.push_back(random());
    chunked.emplace_back(model.back());
    if (random() % 4 == 0) {
      const size_t changed = random() % model.size();
      model[changed] = random();
      chunked[changed] = model[changed];
    }
  }
  ASSERT_EQ(chunked.size(), model.size());
  for (size_t i = 0; i < model.size(); ++i) ASSERT_EQ(chunked[i], model[i]) << i;
}

TEST(ChunkedVector, GrowingMovesNothing) {
  ChunkedVector<uint32_t> chunked;
  const uint32_t* const first = &chunked.emplace_back(7U);
  while (chunked.size() <= 2 * ChunkedVector<uint32_t>::kChunkCount) chunked.emplace_back();
  EXPECT_EQ(first, &chunked[0]);
  EXPECT_EQ(*first, 7U);
  EXPECT_EQ(chunked[1], 0U);
}

TEST(ChunkedVector, KeepsTheAlignmentOfItsElements) {
  ChunkedVector<Wide> chunked;
  for (uint64_t i = 0; i < 100; ++i) chunked.emplace_back(i);
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(&chunked[i]) % alignof(Wide), 0U);
    EXPECT_EQ(chunked[i].number, i);
  }
}

TEST(ChunkedVector, WastesNoMoreThanOneChunk) {
  ChunkedVector<uint64_t> chunked;
  EXPECT_EQ(chunked.memory_bytes(), 0U);
  const uint64_t before_bytes = HugeChunkBytes();
  for (size_t i = 0; i < 5 * ChunkedVector<uint64_t>::kChunkCount; ++i) {
    chunked.emplace_back(i);
    // And a pointer or two for each chunk.
    ASSERT_LE(chunked.memory_bytes(), chunked.size() * sizeof(uint64_t) + kHugeChunkBytes + 128);
  }
  EXPECT_EQ(HugeChunkBytes() - before_bytes, 5 * kHugeChunkBytes);
}

TEST(ChunkedVector, GivesItsMemoryBack) {
  const uint64_t before_bytes = HugeChunkBytes();
  {
    ChunkedVector<uint64_t> chunked;
    chunked.emplace_back(1U);
    EXPECT_EQ(HugeChunkBytes(), before_bytes + kHugeChunkBytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(&chunked[0]) % kHugeChunkBytes, 0U);
  }
  EXPECT_EQ(HugeChunkBytes(), before_bytes);
}

}  // namespace
}  // namespace kvtier
