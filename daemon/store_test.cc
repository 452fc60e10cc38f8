// SPDX-License-Identifier: Apache-2.0
#include "daemon/store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>

#include "absl/synchronization/notification.h"
#include "daemon/fake_cold_tier.h"
#include "daemon/monotonic.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

constexpr uint32_t kBlockBytes = 4096;
constexpr size_t kBlockCount = 300;
constexpr core::TimeMs kPatienceMs = 30'000;

class StoreTest : public testing::Test {
 protected:
  void Open() {
    hbm_ = std::move(MemoryTier::Create(
                         {.id = TierId::kHbm, .capacity_bytes = 4 << 20, .segment_bytes = 1 << 20}))
               .value();
    host_ =
        std::move(MemoryTier::Create(
                      {.id = TierId::kHost, .capacity_bytes = 4 << 20, .segment_bytes = 1 << 20}))
            .value();
    store_ = std::move(Store::Open({}, {.hbm = hbm_.get(), .host = host_.get(), .nvme = &cold_}))
                 .value();
    session_ = store_
                   ->Run([](core::StoreCore& core, core::TimeMs now_ms, core::Effects*) {
                     return core.OpenSession(0, now_ms);
                   })
                   .value();
    ns_ = store_
              ->Run([this](core::StoreCore& core, core::TimeMs, core::Effects*) {
                return core.OpenNamespace(session_,
                                          {.hash = {}, .layout = {}, .block_bytes = kBlockBytes});
              })
              .value();
  }

  // One chain of blocks, committed in hbm.
  void Commit(size_t count) {
    std::vector<Key> keys;
    std::vector<uint32_t> crc32cs;
    std::vector<TestBlock> blocks;
    for (size_t i = 0; i < count; ++i) {
      blocks.push_back(MakeBlock(i + 1, kBlockBytes));
      keys.push_back(blocks.back().meta.key);
      crc32cs.push_back(blocks.back().meta.crc32c);
    }
    store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.Reserve(
          session_, ns_, std::nullopt, keys, TierId::kHbm, now_ms, now_ms,
          [&](absl::StatusOr<std::vector<core::PlacedBlock>> placed) {
            for (size_t i = 0; i < count; ++i) {
              std::ranges::copy(blocks[i].payload.bytes().first(kBlockBytes),
                                hbm_->Mapped((*placed)[i].replica).begin());
            }
          },
          effects);
    });
    const auto committed =
        store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
          return core.Commit(session_, ns_, keys, crc32cs, now_ms, effects);
        });
    ASSERT_TRUE(committed.ok()) << committed.status();
    ASSERT_TRUE(std::ranges::all_of(*committed, [](auto s) { return s == BlockStatus::kOk; }));
  }

  absl::StatusOr<uint64_t> Flush(core::TimeMs patience_ms) {
    absl::Notification done;
    absl::StatusOr<uint64_t> written = uint64_t{0};
    store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.Flush(
          now_ms + patience_ms, now_ms,
          [&](absl::StatusOr<uint64_t> result) {
            written = std::move(result);
            done.Notify();
          },
          effects);
    });
    done.WaitForNotification();
    return written;
  }

  FakeColdTier cold_;
  std::unique_ptr<MemoryTier> hbm_;
  std::unique_ptr<MemoryTier> host_;
  std::unique_ptr<Store> store_;
  core::SessionId session_ = 0;
  core::NamespaceIdx ns_ = 0;
};

TEST_F(StoreTest, ManyTransfersThatEndInsideTheirStart) {
  Open();
  Commit(kBlockCount);
  const auto written = Flush(kPatienceMs);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(*written, kBlockCount);
}

TEST_F(StoreTest, TicksAnswerAtTheDeadline) {
  Open();
  Commit(4);
  cold_.Hold();
  EXPECT_EQ(Flush(20).status().code(), absl::StatusCode::kDeadlineExceeded);
  cold_.Release();
}

TEST_F(StoreTest, BeatsUntilTheCoreDoesNotEnd) {
  Open();
  const core::TimeMs opened_ms = store_->last_beat_ms();
  while (store_->last_beat_ms() == opened_ms) std::this_thread::yield();
  absl::Notification entered;
  absl::Notification leave;
  const std::jthread stuck([&] {
    store_->Run([&](core::StoreCore&, core::TimeMs, core::Effects*) {
      entered.Notify();
      leave.WaitForNotification();
    });
  });
  entered.WaitForNotification();
  // One beat may be under way.
  const core::TimeMs stuck_ms = MonotonicMs();
  while (MonotonicMs() < stuck_ms + 50) std::this_thread::yield();
  EXPECT_LE(store_->last_beat_ms(), stuck_ms + 5);
  leave.Notify();
  while (store_->last_beat_ms() <= stuck_ms + 5) std::this_thread::yield();
}

TEST_F(StoreTest, TakesOverWhatNvmeRecovers) {
  const TestBlock block = MakeBlock(1, kBlockBytes);
  const ReplicaId first = cold_.AddRecoverable(block.meta);
  const ReplicaId second = cold_.AddRecoverable(block.meta);
  Open();
  EXPECT_EQ(store_->recovered_block_count(), 1U);
  EXPECT_TRUE(cold_.Holds(first));
  EXPECT_FALSE(cold_.Holds(second));
}

}  // namespace
}  // namespace kvtier
