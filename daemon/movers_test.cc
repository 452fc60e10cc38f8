// SPDX-License-Identifier: Apache-2.0
#include "daemon/movers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>

#include "daemon/fake_cold_tier.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

constexpr uint32_t kBytes = 10'000;

class MoversTest : public testing::Test {
 protected:
  void SetUp() override {
    hbm_ =
        std::move(MemoryTier::Create(
                      {.id = TierId::kHbm, .capacity_bytes = 1 << 20, .segment_bytes = 64 << 10}))
            .value();
    host_ =
        std::move(MemoryTier::Create(
                      {.id = TierId::kHost, .capacity_bytes = 1 << 20, .segment_bytes = 64 << 10}))
            .value();
    movers_ = std::make_unique<Movers>(
        TierSet{.hbm = hbm_.get(), .host = host_.get(), .nvme = &cold_}, 2,
        [this](core::JobId job, absl::Status status) {
          absl::MutexLock lock(&mutex_);
          EXPECT_TRUE(done_.emplace(job, std::move(status)).second) << "job " << job << " twice";
        });
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
    absl::MutexLock lock(&mutex_);
    const auto finished = [this, job] { return done_.contains(job); };
    mutex_.Await(absl::Condition(&finished));
    return done_.at(job);
  }

  std::unique_ptr<MemoryTier> hbm_;
  std::unique_ptr<MemoryTier> host_;
  FakeColdTier cold_;
  absl::Mutex mutex_;
  std::map<core::JobId, absl::Status> done_;
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

TEST_F(MoversTest, ReportsWhatFailed) {
  TestBlock block = MakeBlock(1, kBytes);
  const ReplicaId in_hbm = Room(*hbm_);
  EXPECT_EQ(Move(1, block.meta, TierId::kHbm, in_hbm, TierId::kHost, Room(*host_)).code(),
            absl::StatusCode::kDataLoss);
  cold_.FailWith(absl::UnavailableError("EIO"));
  EXPECT_EQ(Move(2, block.meta, TierId::kHbm, in_hbm, TierId::kNvme, Room(cold_)).code(),
            absl::StatusCode::kUnavailable);
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
