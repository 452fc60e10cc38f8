// SPDX-License-Identifier: Apache-2.0
#include "daemon/movers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "daemon/fake_cold_tier.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

constexpr uint32_t kBytes = 10'000;

class MoversTest : public testing::Test {
 protected:
  void SetUp() override { Open({}); }

  void Open(const Movers::Options& options) {
    movers_.reset();
    hbm_ =
        std::move(MemoryTier::Create(
                      {.id = TierId::kHbm, .capacity_bytes = 1 << 20, .segment_bytes = 64 << 10}))
            .value();
    host_ =
        std::move(MemoryTier::Create(
                      {.id = TierId::kHost, .capacity_bytes = 1 << 20, .segment_bytes = 64 << 10}))
            .value();
    movers_ = std::make_unique<Movers>(
        TierSet{.hbm = hbm_.get(), .host = host_.get(), .nvme = &cold_}, options,
        [this](core::JobId job, absl::Status status) {
          absl::MutexLock lock(&mutex_);
          EXPECT_TRUE(done_.emplace(job, std::move(status)).second) << "job " << job << " twice";
          order_.push_back(job);
          const auto open = [this, job] { return job != held_job_; };
          mutex_.Await(absl::Condition(&open));
        });
  }

  // A block in hbm on its way to host, or in host on its way to hbm.
  void StartCopy(core::JobId job, TierId target_tier) {
    const TestBlock block = MakeBlock(job, kBytes);
    const bool promotes = target_tier == TierId::kHbm;
    MemoryTier& from = promotes ? *host_ : *hbm_;
    const ReplicaId source = Room(from);
    std::ranges::copy(block.payload.bytes().first(kBytes), from.Mapped(source).begin());
    movers_->Start({.job = job,
                    .meta = block.meta,
                    .source_tier = promotes ? TierId::kHost : TierId::kHbm,
                    .source = source,
                    .target_tier = target_tier,
                    .target = Room(promotes ? *hbm_ : *host_)});
  }

  absl::Status WaitFor(core::JobId job) {
    absl::MutexLock lock(&mutex_);
    const auto finished = [this, job] { return done_.contains(job); };
    mutex_.Await(absl::Condition(&finished));
    return done_.at(job);
  }

  bool IsDone(core::JobId job) {
    absl::MutexLock lock(&mutex_);
    return done_.contains(job);
  }

  ReplicaId Room(Tier& tier) { return tier.Reserve(kBytes, 0).value(); }

  absl::Status Move(core::JobId job, const BlockMeta& meta, TierId source_tier, ReplicaId source,
                    TierId target_tier, ReplicaId target) {
    movers_->Start({.job = job,
                    .meta = meta,
                    .source_tier = source_tier,
                    .source = source,
                    .target_tier = target_tier,
                    .target = target});
    return WaitFor(job);
  }

  std::unique_ptr<MemoryTier> hbm_;
  std::unique_ptr<MemoryTier> host_;
  FakeColdTier cold_;
  absl::Mutex mutex_;
  std::map<core::JobId, absl::Status> done_;
  std::vector<core::JobId> order_;
  // Its completion does not return as long as this names it.
  core::JobId held_job_ = 0;
  std::unique_ptr<Movers> movers_;
};

TEST_F(MoversTest, MovesBytesOverEveryLink) {
  const TestBlock block = MakeBlock(1, kBytes);
  const ReplicaId in_hbm = Room(*hbm_);
  std::ranges::copy(block.payload.bytes().first(kBytes), hbm_->Mapped(in_hbm).begin());
  const ReplicaId in_host = Room(*host_);
  const ReplicaId in_cold = Room(cold_);
  const ReplicaId back_in_host = Room(*host_);
  const ReplicaId back_in_hbm = Room(*hbm_);
  EXPECT_TRUE(Move(1, block.meta, TierId::kHbm, in_hbm, TierId::kHost, in_host).ok());
  EXPECT_TRUE(Move(2, block.meta, TierId::kHost, in_host, TierId::kNvme, in_cold).ok());
  EXPECT_TRUE(Move(3, block.meta, TierId::kNvme, in_cold, TierId::kHost, back_in_host).ok());
  EXPECT_TRUE(Move(4, block.meta, TierId::kHost, back_in_host, TierId::kHbm, back_in_hbm).ok());
  EXPECT_TRUE(std::ranges::equal(hbm_->Mapped(back_in_hbm).first(kBytes),
                                 block.payload.bytes().first(kBytes)));
}

TEST_F(MoversTest, TellsNvmeWhatNobodyWaitsForYet) {
  const TestBlock block = MakeBlock(1, kBytes);
  const ReplicaId source = Room(*host_);
  std::ranges::copy(block.payload.bytes().first(kBytes), host_->Mapped(source).begin());
  const ReplicaId in_cold = Room(cold_);
  EXPECT_TRUE(Move(1, block.meta, TierId::kHost, source, TierId::kNvme, in_cold).ok());
  EXPECT_TRUE(Move(2, block.meta, TierId::kNvme, in_cold, TierId::kHost, Room(*host_)).ok());
  EXPECT_TRUE(cold_.read_ahead().empty());
  cold_.Hold();
  movers_->Start({.job = 3,
                  .meta = block.meta,
                  .source_tier = TierId::kNvme,
                  .source = in_cold,
                  .target_tier = TierId::kHost,
                  .target = Room(*host_),
                  .is_ahead = true});
  EXPECT_EQ(cold_.read_ahead(), std::vector<ReplicaId>{in_cold});
  movers_->Expedite(in_cold);
  EXPECT_EQ(cold_.expedited(), std::vector<ReplicaId>{in_cold});
  cold_.Release();
  EXPECT_TRUE(WaitFor(3).ok());
}

TEST_F(MoversTest, ReportsWhatFailed) {
  TestBlock block = MakeBlock(1, kBytes);
  const ReplicaId in_hbm = Room(*hbm_);
  EXPECT_EQ(Move(1, block.meta, TierId::kHbm, in_hbm, TierId::kHost, Room(*host_)).code(),
            absl::StatusCode::kDataLoss);
  cold_.FailWith(absl::UnavailableError("EIO"));
  EXPECT_EQ(Move(2, block.meta, TierId::kHbm, in_hbm, TierId::kNvme, Room(cold_)).code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(MoversTest, WhatGoesToHbmGoesFirst) {
  Open({.worker_count = 1});
  held_job_ = 1;
  StartCopy(1, TierId::kHost);
  ASSERT_TRUE(WaitFor(1).ok());
  StartCopy(2, TierId::kHost);
  StartCopy(3, TierId::kHost);
  StartCopy(4, TierId::kHbm);
  StartCopy(5, TierId::kHbm);
  {
    absl::MutexLock lock(&mutex_);
    held_job_ = 0;
  }
  movers_.reset();
  EXPECT_EQ(order_, (std::vector<core::JobId>{1, 4, 5, 2, 3}));
}

TEST_F(MoversTest, DemotionKeepsToItsBandwidthAndPromotionDoesNot) {
  std::atomic<uint64_t> now_ms = 0;
  // One block in 10 ms, which is what the bucket holds.
  Open({.worker_count = 2, .demote_bytes_per_second = 100 * kBytes, .now_ms = [&now_ms] {
          return now_ms.load();
        }});
  for (core::JobId job = 1; job <= 4; ++job) StartCopy(job, TierId::kHost);
  EXPECT_TRUE(WaitFor(1).ok());
  StartCopy(11, TierId::kHbm);
  EXPECT_TRUE(WaitFor(11).ok());
  EXPECT_FALSE(IsDone(2));
  now_ms = 9;
  EXPECT_TRUE(WaitFor(2).ok());
  StartCopy(12, TierId::kHbm);
  EXPECT_TRUE(WaitFor(12).ok());
  EXPECT_FALSE(IsDone(3)) << "it began with a bucket that was not empty, and left a debt";
  now_ms = 19;
  EXPECT_TRUE(WaitFor(3).ok());
  // The end waits for no bucket.
  movers_.reset();
  EXPECT_TRUE(IsDone(4));
}

TEST_F(MoversTest, EndWaitsForWhatIsInFlight) {
  const TestBlock block = MakeBlock(1, kBytes);
  cold_.Hold();
  movers_->Start({.job = 1,
                  .meta = block.meta,
                  .source_tier = TierId::kHost,
                  .source = Room(*host_),
                  .target_tier = TierId::kNvme,
                  .target = Room(cold_)});
  std::jthread releaser([this] { cold_.Release(); });
  movers_.reset();
  EXPECT_TRUE(done_.contains(1));
}

}  // namespace
}  // namespace kvtier
