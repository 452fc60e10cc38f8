// SPDX-License-Identifier: Apache-2.0
//
// Memory that is made ready in the background, on machines that we may not have.
#include <gtest/gtest.h>
#include <linux/memfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

constexpr uint64_t kSegmentBytes = 2 * kMiB;
constexpr uint64_t kSegmentCount = 4;

// The kernel, but for what a test wants otherwise. Scripted before it is used.
class ScriptedCalls final : public MemoryCalls {
 public:
  int CreateMemfd(const char* name, unsigned flags) override {
    if ((flags & MFD_HUGETLB) == 0) return MemoryCalls::CreateMemfd(name, flags);
    // A stand-in: the reserve of huge pages of this machine is not ours.
    return huge_reserve ? MemoryCalls::CreateMemfd(name, MFD_CLOEXEC | MFD_ALLOW_SEALING) : -EINVAL;
  }
  int Map(int fd, uint64_t bytes, void** base) override {
    if (map_failures.fetch_sub(1) > 0) return -ENOMEM;
    return MemoryCalls::Map(fd, bytes, base);
  }
  int Advise(std::span<std::byte> memory, int advice) override {
    if (advice != MADV_POPULATE_WRITE) return MemoryCalls::Advise(memory, advice);
    if (touch_result != 0) return touch_result;
    absl::MutexLock lock(&mutex_);
    const auto open = [this]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return touches_allowed_ > 0; };
    mutex_.Await(absl::Condition(&open));
    --touches_allowed_;
    touched_.insert(memory.data());
    return MemoryCalls::Advise(memory, advice);
  }
  int Lock(std::span<std::byte> memory) override {
    absl::MutexLock lock(&mutex_);
    if (locked_bytes_ + memory.size() > lockable_bytes) return -ENOMEM;
    locked_bytes_ += memory.size();
    return 0;
  }
  int PreferNode(std::span<std::byte>, uint32_t node_idx) override {
    absl::MutexLock lock(&mutex_);
    nodes_.push_back(node_idx);
    return 0;
  }
  uint64_t LockableBytes() override { return limit_bytes; }

  void AllowTouches(int count) {
    absl::MutexLock lock(&mutex_);
    touches_allowed_ = count;
  }
  bool Touched(std::byte* memory) const {
    absl::MutexLock lock(&mutex_);
    return touched_.contains(memory);
  }
  std::vector<uint32_t> nodes() const {
    absl::MutexLock lock(&mutex_);
    return nodes_;
  }

  bool huge_reserve = false;
  std::atomic<int> map_failures = 0;
  int touch_result = 0;
  uint64_t lockable_bytes = UINT64_MAX;
  uint64_t limit_bytes = UINT64_MAX;

 private:
  mutable absl::Mutex mutex_;
  int touches_allowed_ ABSL_GUARDED_BY(mutex_) = INT32_MAX;
  uint64_t locked_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::byte*> touched_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> nodes_ ABSL_GUARDED_BY(mutex_);
};

class MemoryPrepareTest : public testing::Test {
 protected:
  MemoryPrepareTest() {
    options_.capacity_bytes = kSegmentCount * kSegmentBytes;
    options_.segment_bytes = kSegmentBytes;
    options_.prepare_thread_count = 2;
    options_.lock_memory = MemoryTier::LockMemory::kAuto;
    options_.calls = &calls_;
    options_.on_prepared = [this](const MemoryTier::Prepared& prepared) {
      absl::MutexLock lock(&mutex_);
      EXPECT_FALSE(std::exchange(is_prepared_, true)) << "called once";
      prepared_ = prepared;
    };
  }
  // Lets the threads end, whatever they wait for.
  ~MemoryPrepareTest() override { calls_.AllowTouches(INT32_MAX); }

  void Open() {
    auto tier = MemoryTier::Create(options_);
    ASSERT_TRUE(tier.ok()) << tier.status();
    tier_ = std::move(tier).value();
    ASSERT_TRUE(tier_->Recover([](const BlockMeta&, ReplicaId) {}).ok());
  }
  const MemoryTier::Prepared& WaitForPrepared() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_prepared_));
    return prepared_;
  }
  // Writes a block of a whole segment and reads it back.
  ReplicaId Put(uint64_t seed, OwnerIdx owner = 0) {
    const TestBlock block = MakeBlock(seed, kSegmentBytes);
    const auto replica = tier_->Reserve(kSegmentBytes, owner);
    EXPECT_TRUE(replica.ok()) << replica.status();
    if (!replica.ok()) return kNoReplica;
    EXPECT_TRUE(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()).ok());
    EXPECT_TRUE(ReadAndCompare(*tier_, *replica, block).ok());
    return *replica;
  }

  ScriptedCalls calls_;
  MemoryTier::Options options_;
  MemoryTier::Prepared prepared_;
  absl::Mutex mutex_;
  bool is_prepared_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<MemoryTier> tier_;
};

TEST_F(MemoryPrepareTest, TouchesAndLocksEverythingInTheBackground) {
  options_.node_idx = 3;
  Open();
  const MemoryTier::Prepared& prepared = WaitForPrepared();
  EXPECT_EQ(prepared.ready_bytes, options_.capacity_bytes);
  EXPECT_EQ(prepared.locked_bytes, options_.capacity_bytes);
  EXPECT_EQ(prepared.shortfall, "");
  EXPECT_EQ(tier_->Usage().ready_bytes, options_.capacity_bytes);
  EXPECT_EQ(tier_->Usage().physical_bytes, options_.capacity_bytes);
  EXPECT_EQ(calls_.nodes(), std::vector<uint32_t>(kSegmentCount, 3));
  for (uint64_t seed = 0; seed < kSegmentCount; ++seed) Put(seed);
  EXPECT_EQ(tier_->Reserve(4096, 0).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tier_->Usage().physical_bytes, options_.capacity_bytes);
}

TEST_F(MemoryPrepareTest, ServesBeforeAnythingIsReadyAndNeverTakesMoreThanItsCapacity) {
  calls_.AllowTouches(0);
  Open();
  std::vector<ReplicaId> held;
  for (uint64_t seed = 0; seed < kSegmentCount; ++seed) {
    held.push_back(Put(seed));
    EXPECT_LE(tier_->Usage().physical_bytes, options_.capacity_bytes);
  }
  EXPECT_EQ(tier_->Usage().ready_bytes, 0u);
  // One goes to another owner before it was ready.
  tier_->Free(held[1]);
  Put(9, /*owner=*/1);
  calls_.AllowTouches(INT32_MAX);
  EXPECT_EQ(WaitForPrepared().ready_bytes, options_.capacity_bytes);
  EXPECT_TRUE(ReadAndCompare(*tier_, held[0], MakeBlock(0, kSegmentBytes)).ok());
  EXPECT_TRUE(ReadAndCompare(*tier_, held[3], MakeBlock(3, kSegmentBytes)).ok());
}

// Counts what it is told of, and says when that is so many.
class CountingObserver final : public SegmentObserver {
 public:
  void OnMapped(std::span<std::byte>) override { Add(1); }
  void OnUnmapping(std::span<std::byte>) override { Add(-1); }
  void WaitFor(int count) {
    absl::MutexLock lock(&mutex_);
    const auto reached = [this, count]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return count_ == count; };
    mutex_.Await(absl::Condition(&reached));
  }

 private:
  void Add(int difference) {
    absl::MutexLock lock(&mutex_);
    count_ += difference;
  }
  absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_F(MemoryPrepareTest, GivesOutWhatIsReadyFirst) {
  CountingObserver observer;
  options_.observers = {&observer};
  calls_.AllowTouches(2);
  Open();
  observer.WaitFor(2);
  EXPECT_TRUE(calls_.Touched(tier_->Mapped(Put(1)).data()));
  EXPECT_TRUE(calls_.Touched(tier_->Mapped(Put(2)).data()));
  EXPECT_FALSE(calls_.Touched(tier_->Mapped(Put(3)).data()));
  calls_.AllowTouches(INT32_MAX);
  WaitForPrepared();
  observer.WaitFor(kSegmentCount);
  tier_.reset();
  observer.WaitFor(0);
}

TEST_F(MemoryPrepareTest, MapsSegmentsWhereHugePagesFit) {
  Open();
  WaitForPrepared();
  for (uint64_t i = 0; i < kSegmentCount; ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tier_->Mapped(Put(i)).data()) % kHugePageBytes, 0u);
  }
}

TEST_F(MemoryPrepareTest, EndsInTheMiddleOfThePreparation) {
  calls_.AllowTouches(1);
  Open();
  std::jthread opener([this] { calls_.AllowTouches(INT32_MAX); });
  tier_.reset();
}

TEST_F(MemoryPrepareTest, RefusesToLockMoreThanItMay) {
  calls_.limit_bytes = kMiB;
  options_.lock_memory = MemoryTier::LockMemory::kOn;
  const absl::Status refused = MemoryTier::Create(options_).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  for (const std::string needed : {"8388608", "1048576", "RLIMIT_MEMLOCK", "lock_memory = auto"}) {
    EXPECT_NE(refused.ToString().find(needed), std::string::npos) << refused << ": " << needed;
  }
  options_.lock_memory = MemoryTier::LockMemory::kAuto;
  Open();
  EXPECT_EQ(WaitForPrepared().ready_bytes, options_.capacity_bytes);
  EXPECT_EQ(prepared_.locked_bytes, 0u);
  EXPECT_NE(prepared_.shortfall.find("1048576"), std::string::npos) << prepared_.shortfall;
}

TEST_F(MemoryPrepareTest, ServesUnlockedWhatTheKernelDoesNotLock) {
  calls_.lockable_bytes = kSegmentBytes;
  Open();
  EXPECT_EQ(WaitForPrepared().ready_bytes, options_.capacity_bytes);
  EXPECT_EQ(prepared_.locked_bytes, kSegmentBytes);
  EXPECT_NE(prepared_.shortfall.find("mlock"), std::string::npos) << prepared_.shortfall;
}

TEST_F(MemoryPrepareTest, TakesReservedHugePagesWhereThereAreEnough) {
  options_.reserved_huge_pages = true;
  calls_.huge_reserve = true;
  options_.prepare_thread_count = 1;
  calls_.map_failures = 1;
  Open();
  EXPECT_EQ(WaitForPrepared().reserved_huge_bytes, (kSegmentCount - 1) * kSegmentBytes);
  EXPECT_EQ(prepared_.ready_bytes, options_.capacity_bytes);
  Put(1);
}

TEST_F(MemoryPrepareTest, DoesWithoutReservedHugePages) {
  options_.reserved_huge_pages = true;
  Open();
  EXPECT_EQ(WaitForPrepared().reserved_huge_bytes, 0u);
  EXPECT_EQ(prepared_.ready_bytes, options_.capacity_bytes);
  EXPECT_EQ(prepared_.shortfall, "");
}

TEST_F(MemoryPrepareTest, TouchesByHandOnAnOldKernelAndChangesNothing) {
  calls_.touch_result = -EINVAL;
  auto segment = MemorySegment::Create({.name = "test", .bytes = kSegmentBytes, .calls = &calls_});
  ASSERT_TRUE(segment.ok()) << segment.status();
  std::ranges::fill((*segment)->memory(), std::byte{0x5A});
  EXPECT_TRUE((*segment)->PrepareNext(kMiB, /*lock=*/false).ok());
  EXPECT_EQ((*segment)->ready_bytes(), kMiB);
  EXPECT_TRUE((*segment)->PrepareNext(16 * kMiB, /*lock=*/false).ok());
  EXPECT_TRUE((*segment)->ready());
  EXPECT_TRUE(std::ranges::all_of((*segment)->memory(),
                                  [](std::byte byte) { return byte == std::byte{0x5A}; }));
}

TEST_F(MemoryPrepareTest, ServesWhatItCanWhenTheKernelHasNoMemory) {
  calls_.touch_result = -ENOMEM;
  Open();
  EXPECT_EQ(WaitForPrepared().ready_bytes, 0u);
  EXPECT_NE(prepared_.shortfall.find("touch"), std::string::npos) << prepared_.shortfall;
  Put(1);
}

TEST_F(MemoryPrepareTest, IsDegradedWhileTheKernelHasNoMemoryForABlock) {
  calls_.map_failures = 1 << 20;
  Open();
  WaitForPrepared();
  EXPECT_FALSE(tier_->Health().degraded) << "nobody has asked yet";
  EXPECT_EQ(tier_->Reserve(4096, 0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(tier_->Health().degraded);
  EXPECT_NE(tier_->Health().reason.find("Cannot allocate memory"), std::string::npos)
      << tier_->Health().reason;
  calls_.map_failures = 0;
  Put(1);
  EXPECT_FALSE(tier_->Health().degraded);
  EXPECT_EQ(tier_->Health().reason, "");
}

TEST(MemoryPromiseTest, CountsWhatIsPromisedToOthers) {
  const absl::Status refused =
      MemoryTier::Create(
          {.capacity_bytes = 4 * kMiB, .segment_bytes = kMiB, .promised_bytes = UINT64_MAX - kMiB})
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_NE(refused.ToString().find("4194304"), std::string::npos) << refused;
}

}  // namespace
}  // namespace kvtier
