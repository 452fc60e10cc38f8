// SPDX-License-Identifier: Apache-2.0
//
// The contract of kvtier::Tier as a test. One line makes a tier pass it:
//   INSTANTIATE_TEST_SUITE_P(Host, TierConformanceTest, testing::Values(TierCase{...}), CaseName);
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "tiers/tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {

struct TierCase {
  std::string name;
  // A fresh tier of 8 to 64 MiB that takes payloads of 1 MiB and has room for four owners. `folder`
  // is empty and its own.
  std::function<std::unique_ptr<Tier>(const std::string& folder)> create;
  // The tier stores who a block is and refuses to give it out as another.
  bool checks_identity = false;
  // The CPU reaches the slots.
  bool is_mapped = true;
};

inline std::string CaseName(const testing::TestParamInfo<TierCase>& info) {
  return info.param.name;
}

class TierConformanceTest : public testing::TestWithParam<TierCase> {
 protected:
  void SetUp() override {
    tier_ = GetParam().create(folder_.path());
    ASSERT_NE(tier_, nullptr);
    ASSERT_TRUE(tier_->Recover([](const BlockMeta&, ReplicaId) { FAIL() << "not fresh"; }).ok());
  }

  // Reserves and writes; kNoReplica after a failure.
  ReplicaId Put(const TestBlock& block, OwnerIdx owner = 1) {
    auto replica = tier_->Reserve(block.meta.payload_bytes, owner);
    EXPECT_TRUE(replica.ok()) << replica.status();
    if (!replica.ok()) return kNoReplica;
    const absl::Status status = WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes());
    EXPECT_TRUE(status.ok()) << status;
    return *replica;
  }

  TempFolder folder_;
  std::unique_ptr<Tier> tier_;
};

TEST_P(TierConformanceTest, RoundTripsEverySize) {
  for (const uint32_t payload_bytes : {1u, 4095u, 4096u, 4097u, 1u << 20}) {
    const TestBlock block = MakeBlock(payload_bytes, payload_bytes);
    const ReplicaId replica = Put(block);
    ASSERT_NE(replica, kNoReplica);
    EXPECT_EQ(ReadAndCompare(*tier_, replica, block), absl::OkStatus()) << payload_bytes;
    tier_->Free(replica);
  }
}

TEST_P(TierConformanceTest, ReadsAheadWhatReadReads) {
  const TestBlock block = MakeBlock(6, 50000);
  const ReplicaId replica = Put(block);
  ASSERT_NE(replica, kNoReplica);
  PageBuffer target(block.meta.payload_bytes);
  absl::Status status;
  absl::BlockingCounter done(1);
  tier_->ReadAhead(replica, block.meta, target.bytes(), [&](absl::Status read) {
    status = std::move(read);
    done.DecrementCount();
  });
  tier_->Expedite(replica);
  done.Wait();
  EXPECT_EQ(status, absl::OkStatus());
  EXPECT_TRUE(std::ranges::equal(target.bytes().first(block.meta.payload_bytes),
                                 block.payload.bytes().first(block.meta.payload_bytes)));
  tier_->Expedite(replica);
  tier_->Free(replica);
  tier_->Expedite(replica);
}

TEST_P(TierConformanceTest, TakesUnalignedBuffers) {
  const TestBlock block = MakeBlock(5, 10000);
  std::vector<std::byte> shifted(block.payload.bytes().size() + 1);
  std::copy(block.payload.bytes().begin(), block.payload.bytes().end(), shifted.begin() + 1);
  auto replica = tier_->Reserve(block.meta.payload_bytes, 1);
  ASSERT_TRUE(replica.ok());
  ASSERT_EQ(WriteAndWait(*tier_, *replica, block.meta, std::span(shifted).subspan(1)),
            absl::OkStatus());
  std::vector<std::byte> target(shifted.size() + 1, std::byte{0x7F});
  ASSERT_EQ(ReadAndWait(*tier_, *replica, block.meta, std::span(target).subspan(1, 10000)),
            absl::OkStatus());
  EXPECT_TRUE(std::equal(shifted.begin() + 1, shifted.end(), target.begin() + 1));
  EXPECT_EQ(target.front(), std::byte{0x7F});
  EXPECT_EQ(target.back(), std::byte{0x7F}) << "wrote past the end of an unaligned target";
}

TEST_P(TierConformanceTest, ReservesUntilFullAndCountsExactly) {
  constexpr uint32_t kPayloadBytes = 100000;
  const uint64_t footprint_bytes = tier_->FootprintBytes(kPayloadBytes);
  EXPECT_GE(footprint_bytes, kPayloadBytes);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
  std::set<ReplicaId> seen;
  std::vector<ReplicaId> held;
  while (true) {
    auto replica = tier_->Reserve(kPayloadBytes, 1);
    if (!replica.ok()) {
      EXPECT_EQ(replica.status().code(), absl::StatusCode::kResourceExhausted);
      break;
    }
    ASSERT_NE(*replica, kNoReplica);
    ASSERT_TRUE(seen.insert(*replica).second) << "a replica id was given out twice";
    held.push_back(*replica);
    const TierUsage usage = tier_->Usage();
    ASSERT_EQ(usage.used_bytes, held.size() * footprint_bytes);
    ASSERT_LE(usage.used_bytes, usage.capacity_bytes);
  }
  ASSERT_GE(held.size(), 10u);
  for (int round = 0; round < 3; ++round) {
    const ReplicaId freed = held[held.size() / 2];
    tier_->Free(freed);
    auto replica = tier_->Reserve(kPayloadBytes, 1);
    ASSERT_TRUE(replica.ok()) << "freed room is not reusable: " << replica.status();
    ASSERT_TRUE(seen.insert(*replica).second) << "a replica id was given out twice";
    held[held.size() / 2] = *replica;
    ASSERT_FALSE(tier_->Reserve(kPayloadBytes, 1).ok());
  }
  for (const ReplicaId replica : held) tier_->Free(replica);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
}

TEST_P(TierConformanceTest, FillsToTheBrimAndReadsEverythingBack) {
  constexpr uint32_t kPayloadBytes = 300000;
  std::vector<std::pair<ReplicaId, TestBlock>> held;
  for (uint64_t seed = 0;; ++seed) {
    auto replica = tier_->Reserve(kPayloadBytes, 1);
    if (!replica.ok()) break;
    TestBlock block = MakeBlock(seed, kPayloadBytes);
    ASSERT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
    held.emplace_back(*replica, std::move(block));
  }
  ASSERT_GE(held.size(), 10u);
  for (const auto& [replica, block] : held) {
    ASSERT_EQ(ReadAndCompare(*tier_, replica, block), absl::OkStatus());
  }
}

TEST_P(TierConformanceTest, RefusesImpossibleSizes) {
  EXPECT_EQ(tier_->Reserve(0, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tier_->Reserve(1u << 31, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
}

TEST_P(TierConformanceTest, RefusesBytesThatDoNotMatchTheirChecksum) {
  TestBlock block = MakeBlock(7, 5000);
  auto replica = tier_->Reserve(block.meta.payload_bytes, 1);
  ASSERT_TRUE(replica.ok());
  BlockMeta wrong = block.meta;
  wrong.crc32c ^= 1;
  EXPECT_EQ(WriteAndWait(*tier_, *replica, wrong, block.payload.bytes()).code(),
            absl::StatusCode::kDataLoss);
  // The room is still the caller's: the right bytes go in.
  ASSERT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
  PageBuffer target(block.meta.payload_bytes);
  EXPECT_EQ(ReadAndWait(*tier_, *replica, wrong, target.bytes()).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadAndCompare(*tier_, *replica, block), absl::OkStatus());
}

TEST_P(TierConformanceTest, RefusesToReadABlockAsAnother) {
  if (!GetParam().checks_identity) GTEST_SKIP() << "SKIPPED: this tier does not store identity";
  const TestBlock block = MakeBlock(8, 5000);
  const ReplicaId replica = Put(block);
  ASSERT_NE(replica, kNoReplica);
  const auto expect_loss = [&](const char* what, auto change) {
    BlockMeta other = block.meta;
    change(other);
    PageBuffer target(6000);
    EXPECT_EQ(ReadAndWait(*tier_, replica, other, target.bytes()).code(),
              absl::StatusCode::kDataLoss)
        << what;
  };
  expect_loss("key", [](BlockMeta& meta) { meta.key.bytes[0] ^= 1; });
  expect_loss("namespace", [](BlockMeta& meta) { meta.namespace_hash.bytes[31] ^= 1; });
  expect_loss("parent", [](BlockMeta& meta) { meta.parent.bytes[7] ^= 1; });
  expect_loss("layout", [](BlockMeta& meta) { meta.layout.bytes[9] ^= 1; });
  expect_loss("depth", [](BlockMeta& meta) { meta.depth += 1; });
  expect_loss("length", [](BlockMeta& meta) { meta.payload_bytes -= 1; });
  EXPECT_EQ(ReadAndCompare(*tier_, replica, block), absl::OkStatus());
}

TEST_P(TierConformanceTest, MapsSlotsAsWholePagesOrNotAtAll) {
  const TestBlock block = MakeBlock(9, 5000);
  const ReplicaId replica = Put(block);
  ASSERT_NE(replica, kNoReplica);
  const std::span<std::byte> mapped = tier_->Mapped(replica);
  if (!GetParam().is_mapped) {
    EXPECT_TRUE(mapped.empty());
    return;
  }
  ASSERT_EQ(mapped.size(), 8192u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapped.data()) % 4096, 0u);
  EXPECT_TRUE(
      std::equal(block.payload.bytes().begin(), block.payload.bytes().end(), mapped.begin()));
  // An in-place fill is read back like a written one, and a torn one is found.
  const TestBlock other = MakeBlock(10, 5000);
  std::copy(other.payload.bytes().begin(), other.payload.bytes().end(), mapped.begin());
  EXPECT_EQ(ReadAndCompare(*tier_, replica, other), absl::OkStatus());
  mapped[4999] ^= std::byte{1};
  EXPECT_EQ(ReadAndCompare(*tier_, replica, other).code(), absl::StatusCode::kDataLoss);
}

TEST_P(TierConformanceTest, ServesFourThreadsAndCallsDoneOnce) {
  constexpr int kThreadCount = 4;
  constexpr int kRoundCount = 25;
  absl::Mutex mutex;
  std::set<ReplicaId> seen;
  const auto work = [&](int thread_idx) {
    for (int round = 0; round < kRoundCount; ++round) {
      const uint64_t seed = static_cast<uint64_t>(thread_idx * 1000 + round);
      const TestBlock block = MakeBlock(seed, 1 + static_cast<uint32_t>(seed * 7919 % 50000));
      const ReplicaId replica = Put(block, static_cast<OwnerIdx>(thread_idx));
      ASSERT_NE(replica, kNoReplica);
      {
        absl::MutexLock lock(&mutex);
        ASSERT_TRUE(seen.insert(replica).second);
      }
      // Several reads of one replica at a time.
      absl::BlockingCounter pending(3);
      std::atomic<int> failed_count = 0;
      std::vector<PageBuffer> targets;
      for (int i = 0; i < 3; ++i) targets.emplace_back(block.meta.payload_bytes);
      for (PageBuffer& target : targets) {
        tier_->Read(replica, block.meta, target.bytes(), [&](absl::Status status) {
          if (!status.ok()) ++failed_count;
          pending.DecrementCount();
        });
      }
      pending.Wait();
      ASSERT_EQ(failed_count, 0);
      for (const PageBuffer& target : targets) {
        ASSERT_TRUE(std::equal(target.bytes().begin(), target.bytes().end(),
                               block.payload.bytes().begin()));
      }
      tier_->Free(replica);
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreadCount; ++i) threads.emplace_back(work, i);
  }
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
}

}  // namespace kvtier
