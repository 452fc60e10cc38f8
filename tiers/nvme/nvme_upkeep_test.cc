// SPDX-License-Identifier: Apache-2.0
//
// The scrub finds damage that nobody has read, and the daily write budget holds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <span>
#include <string>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/spent_file.h"
#include "tiers/nvme/write_budget.h"

namespace kvtier {
namespace {

class NvmeScrubTest : public NvmeTierTest {
 protected:
  NvmeScrubTest() {
    options_.scrub_bytes_per_second = 1ULL << 40;
    options_.on_lost = [this](const NamespaceHash&, const Key& key) {
      absl::MutexLock lock(&mutex_);
      EXPECT_TRUE(lost_.insert(key).second) << "told twice";
    };
  }
  void AwaitLost(size_t count) {
    const auto are_there = [&] { return lost_.size() >= count; };
    absl::MutexLock lock(&mutex_);
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&are_there), absl::Seconds(30)));
  }

  absl::Mutex mutex_;
  std::set<Key> lost_;
};

TEST_F(NvmeScrubTest, FindsDamageThatNobodyHasReadAndLosesThatBlockOnly) {
  Open();
  PutMany(30, 60000);
  std::string path;
  const BlockMeta damaged = held_.at(7).block.meta;
  FlipByte(path, FindRecord(damaged, path) + nvme::kPageBytes + 33333);
  AwaitLost(1);
  EXPECT_EQ(*lost_.begin(), damaged.key);
  EXPECT_EQ(ReadAndCompare(*tier_, held_.at(7).replica, held_.at(7).block).code(),
            absl::StatusCode::kDataLoss);
  FreeHeld(7);
  ExpectAllReadable();
  const NvmeStats stats = tier_->Stats();
  EXPECT_EQ(stats.scrub_lost_count, 1u);
  EXPECT_GE(stats.scrubbed_count, 1u);
  EXPECT_FALSE(tier_->Health().degraded);
  PutMany(5, 60000);
  Open();
  EXPECT_EQ(unexpected_count_, 0) << "the damaged block came back";
  ExpectAllReadable();
}

TEST_F(NvmeScrubTest, DisturbsNothingUnderChurn) {
  options_.capacity_bytes = 12 * kTestSegmentBytes;
  Open();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (int round = 0; round < 400 || tier_->Stats().scrubbed_count < 100; ++round) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "the scrub reads nothing";
    if (Put(60000).ok()) continue;
    for (int i = 0; i < 3; ++i) FreeHeld(held_.begin()->first);
  }
  EXPECT_EQ(tier_->Stats().scrub_lost_count, 0u);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

class NvmeDeletedFileTest : public NvmeScrubTest {
 protected:
  NvmeDeletedFileTest() { options_.scrub_bytes_per_second = 0; }
};

TEST_F(NvmeDeletedFileTest, BlocksOfADeletedSegmentAreDroppedWhileTheTierRuns) {
  Open();
  PutMany(40, 60000);
  // A sealed segment, and the one that is written to.
  std::string sealed;
  FindRecord(held_.at(1).block.meta, sealed);
  std::string head;
  FindRecord(held_.at(40).block.meta, head);
  ASSERT_NE(sealed, head);
  std::set<uint64_t> gone;
  for (const auto& [seed, held] : held_) {
    std::string path;
    FindRecord(held.block.meta, path);
    if (path == sealed || path == head) gone.insert(seed);
  }
  ASSERT_TRUE(std::filesystem::remove(sealed) && std::filesystem::remove(head));
  AwaitLost(gone.size());
  for (const uint64_t seed : gone) {
    EXPECT_TRUE(lost_.contains(held_.at(seed).block.meta.key));
    EXPECT_EQ(ReadAndCompare(*tier_, held_.at(seed).replica, held_.at(seed).block).code(),
              absl::StatusCode::kDataLoss);
    FreeHeld(seed);
  }
  EXPECT_EQ(lost_.size(), gone.size());
  EXPECT_FALSE(tier_->Health().degraded);
  ExpectAllReadable();
  // Their room is used again, and more than the names are there.
  PutMany(100, 60000);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeDeletedFileTest, ATierThatLostAllItsFilesGoesOn) {
  Open();
  PutMany(40, 60000);
  for (const std::string& path : SegmentPaths()) std::filesystem::remove(path);
  AwaitLost(40);
  while (!held_.empty()) FreeHeld(held_.begin()->first);
  PutMany(40, 60000);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

class NvmeBudgetTest : public NvmeTierTest {
 protected:
  NvmeBudgetTest() {
    options_.now = [this] { return now_; };
    options_.write_bytes_per_day_max = 4 << 20;
  }
  // Blocks until the budget is spent.
  int PutUntilSpent() {
    absl::Status status;
    int count = 0;
    while ((status = Put(50000)).ok()) ++count;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(IsWriteBudgetSpent(status)) << status;
    return count;
  }

  // The index is made anew, with all that the segments hold.
  void LoseIndex() {
    Close();
    std::filesystem::remove_all(options_.dir + "/index");
    Open();
  }
  nvme::WriteBudget::Spent KeptSpent() {
    const std::string bytes = ReadFile(options_.dir + "/written");
    const auto spent = nvme::ParseSpentFile(std::as_bytes(std::span(bytes)));
    EXPECT_TRUE(spent.ok()) << spent.status();
    return spent.value_or(nvme::WriteBudget::Spent());
  }
  void SetModified(absl::Time time) {
    const timespec both[2] = {absl::ToTimespec(time), absl::ToTimespec(time)};
    for (const std::string& path : SegmentPaths()) {
      ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), both, 0), 0);
    }
  }

  // Some noon.
  absl::Time now_ = absl::FromUnixSeconds(20'000 * 86'400 + 43'200);
};

TEST_F(NvmeBudgetTest, StopsAdmissionUntilTheNextDayAndAcrossRestarts) {
  Open();
  // Two segments are written over with zeros, which counts; the rest goes to blocks.
  EXPECT_GT(PutUntilSpent(), 20);
  // What was in flight: a block, and the segment that was made for it.
  EXPECT_LE(tier_->Stats().written_bytes, options_.write_bytes_per_day_max + kTestSegmentBytes +
                                              nvme::kPageBytes + nvme::RecordBytes(50000));
  ExpectAllReadable();
  Open();
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000))) << "a restart gave a new budget";
  EXPECT_GE(tier_->Stats().written_today_bytes, options_.write_bytes_per_day_max);
  now_ += absl::Hours(11);
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000)));
  now_ += absl::Hours(2);
  EXPECT_GT(PutUntilSpent(), 20);
  // A clock that is put back renews nothing.
  now_ -= absl::Hours(48);
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000)));
  ExpectAllReadable();
}

TEST_F(NvmeBudgetTest, ALostIndexDoesNotGiveANewBudget) {
  Open();
  PutUntilSpent();
  LoseIndex();
  EXPECT_TRUE(tier_->Stats().is_rebuilt);
  EXPECT_GE(tier_->Stats().written_today_bytes, options_.write_bytes_per_day_max);
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000)));
  ExpectAllReadable();
  // A clock that is put back renews nothing, the next day does.
  now_ -= absl::Hours(48);
  LoseIndex();
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000)));
  now_ += absl::Hours(48 + 12);
  LoseIndex();
  EXPECT_GT(PutUntilSpent(), 20);
}

TEST_F(NvmeBudgetTest, KeepsWhatWasWrittenWhileItWorks) {
  Open();
  // The index thread keeps it behind each batch: what the first of two writes made due is there
  // when the second is done.
  for (int i = 0; i < 10; ++i) {
    PutMany(1, 50000);
    const uint64_t written_bytes = tier_->Stats().written_today_bytes;
    PutMany(1, 50000);
    EXPECT_GE(KeptSpent().bytes + options_.write_bytes_per_day_max / 128, written_bytes);
  }
  EXPECT_EQ(KeptSpent().day, 20'000u);
  Close();
  Open();
  EXPECT_EQ(KeptSpent().bytes, tier_->Stats().written_today_bytes) << "not kept at the end";
}

TEST_F(NvmeBudgetTest, ADamagedFileIsReplacedByWhatTheIndexKnows) {
  Open();
  PutUntilSpent();
  Close();
  const std::string path = options_.dir + "/written";
  const std::string good = ReadFile(path);
  for (const std::string& bytes : {std::string(), std::string(good.size(), 'x'), good + 'x'}) {
    WriteFile(path, bytes);
    Open();
    ASSERT_TRUE(IsWriteBudgetSpent(Put(50000)));
    Close();
    ASSERT_EQ(ReadFile(path), good);
  }
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  Open();
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000)));
  ExpectAllReadable();
}

TEST_F(NvmeBudgetTest, TheSegmentsOfTodayCountWhenNothingElseIsLeft) {
  Open();
  PutMany(20, 50000);
  Close();
  for (const absl::Time modified : {now_, now_ - absl::Hours(24)}) {
    std::filesystem::remove(options_.dir + "/written");
    SetModified(modified);
    LoseIndex();
    EXPECT_EQ(tier_->Stats().written_today_bytes,
              modified == now_ ? 20 * nvme::RecordBytes(50000) : 0);
    Close();
  }
}

TEST_F(NvmeBudgetTest, AFileThatCannotBeWrittenIsNoFailure) {
  Open();
  std::filesystem::create_directory(options_.dir + "/written.new");
  EXPECT_GT(PutUntilSpent(), 20);
  EXPECT_FALSE(tier_->Health().degraded);
  Close();
  std::filesystem::remove(options_.dir + "/written.new");
  Open();
  EXPECT_TRUE(IsWriteBudgetSpent(Put(50000)));
}

TEST_F(NvmeBudgetTest, AFullTierIsAnotherError) {
  options_.write_bytes_per_day_max = 0;
  Open();
  absl::Status status;
  while ((status = Put(50000)).ok()) {
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_FALSE(IsWriteBudgetSpent(status)) << status;
}

TEST_F(NvmeBudgetTest, CountsWhatAUsefulByteCosts) {
  options_.write_bytes_per_day_max = 0;
  Open();
  PutMany(10, 60000);
  const uint64_t written_bytes = tier_->Stats().written_bytes;
  // One segment and its header, ten records.
  EXPECT_EQ(written_bytes, kTestSegmentBytes + nvme::kPageBytes + 10 * nvme::RecordBytes(60000));
  EXPECT_EQ(tier_->Stats().useful_read_bytes, 0u);
  ExpectAllReadable();
  EXPECT_EQ(tier_->Stats().useful_read_bytes, 600'000u);
}

TEST(WriteBudgetTest, IsKeptWheneverAShareOfItIsSpent) {
  const absl::Time noon = absl::FromUnixSeconds(20'000 * 86'400 + 43'200);
  nvme::WriteBudget budget(12'800);
  EXPECT_FALSE(budget.is_keeping_due() || budget.has_unkept());
  budget.Spend(99, noon);
  EXPECT_TRUE(budget.has_unkept());
  EXPECT_FALSE(budget.is_keeping_due());
  budget.Spend(1, noon);
  EXPECT_TRUE(budget.is_keeping_due());
  budget.NoteKept();
  EXPECT_FALSE(budget.is_keeping_due() || budget.has_unkept());
  // Of a new day, nothing is kept.
  budget.Spend(100, noon + absl::Hours(24));
  EXPECT_TRUE(budget.is_keeping_due());

  nvme::WriteBudget without_limit(0);
  without_limit.Spend((1 << 30) - 1, noon);
  EXPECT_FALSE(without_limit.is_keeping_due());
  without_limit.Spend(1, noon);
  EXPECT_TRUE(without_limit.is_keeping_due());
}

TEST(WriteBudgetTest, NoByteOfItsFileCanChangeUnseen) {
  const nvme::WriteBudget::Spent spent{.day = 20'000, .bytes = 123'456'789'012};
  auto bytes = nvme::EncodeSpentFile(spent);
  const auto parsed = nvme::ParseSpentFile(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, spent);
  for (std::byte& byte : bytes) {
    byte ^= std::byte{0x10};
    EXPECT_TRUE(absl::IsDataLoss(nvme::ParseSpentFile(bytes).status()));
    byte ^= std::byte{0x10};
  }
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(nvme::ParseSpentFile(std::span(bytes).first(length)).ok());
  }
}

TEST(WriteBudgetTest, TheLaterOfTwoAccountsHasTheLaterDayOrMoreBytes) {
  using Spent = nvme::WriteBudget::Spent;
  const Spent more{.day = 7, .bytes = 9};
  const Spent less{.day = 7, .bytes = 8};
  const Spent next{.day = 8, .bytes = 1};
  EXPECT_EQ(nvme::WriteBudget::Later(more, less), more);
  EXPECT_EQ(nvme::WriteBudget::Later(less, more), more);
  EXPECT_EQ(nvme::WriteBudget::Later(more, next), next);
  EXPECT_EQ(nvme::WriteBudget::Later(next, more), next);
}

TEST(WriteBudgetTest, RenewsAtMidnightUtc) {
  const absl::Time midnight = absl::FromUnixSeconds(20'000 * 86'400);
  nvme::WriteBudget budget(100);
  budget.Spend(99, midnight);
  EXPECT_TRUE(budget.Check(midnight).ok());
  budget.Spend(1, midnight + absl::Hours(24) - absl::Nanoseconds(1));
  const absl::Status spent = budget.Check(midnight + absl::Hours(23));
  EXPECT_TRUE(IsWriteBudgetSpent(spent)) << spent;
  EXPECT_NE(spent.ToString().find("2024-10-05T00:00:00"), std::string::npos) << spent;
  EXPECT_TRUE(budget.Check(midnight + absl::Hours(24)).ok());
  EXPECT_EQ(budget.spent(), (nvme::WriteBudget::Spent{.day = 20'001, .bytes = 0}));
}

}  // namespace
}  // namespace kvtier
