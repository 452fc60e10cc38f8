// SPDX-License-Identifier: Apache-2.0
//
// Errors of a running disk: nothing half-visible, nothing acknowledged lost, health that heals.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <set>
#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "tiers/nvme/failing_storage.h"
#include "tiers/nvme/nvme_test_util.h"

namespace kvtier {
namespace {

class NvmeFaultTest : public NvmeTierTest {
 protected:
  NvmeFaultTest() {
    options_.fault_hook = [this](NvmeFaultPoint point) {
      if (point != point_) return 0;
      return error_.load();
    };
  }
  // Before the hook goes.
  ~NvmeFaultTest() override { tier_.reset(); }
  void Inject(NvmeFaultPoint point, int error) {
    point_ = point;
    error_ = error;
  }
  void Mend() { error_ = 0; }

  std::atomic<NvmeFaultPoint> point_ = NvmeFaultPoint::kRead;
  std::atomic<int> error_ = 0;
};

class NvmeWriteFaultTest : public NvmeFaultTest,
                           public testing::WithParamInterface<std::pair<NvmeFaultPoint, int>> {};

TEST_P(NvmeWriteFaultTest, AFailedWriteIsNeverVisibleAndTheTierHeals) {
  Open();
  PutMany(5, 50000);
  const auto [point, error] = GetParam();
  const TestBlock failed = MakeBlock(999, 50000);
  const auto replica = tier_->Reserve(50000, 1);
  ASSERT_TRUE(replica.ok());
  Inject(point, error);
  EXPECT_EQ(WriteAndWait(*tier_, *replica, failed.meta, failed.payload.bytes()).code(),
            absl::StatusCode::kUnavailable);
  AwaitDegraded(true);
  EXPECT_FALSE(tier_->Health().reason.empty());
  EXPECT_EQ(tier_->Reserve(100, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadAndCompare(*tier_, *replica, failed).code(), absl::StatusCode::kDataLoss);
  ExpectAllReadable();
  Mend();
  AwaitDegraded(false);
  tier_->Free(*replica);
  PutMany(5, 50000);
  ExpectAllReadable();
  Open();
  EXPECT_EQ(unexpected_count_, 0) << "the failed block came back";
  ExpectAllReadable();
  // The block whose write failed can be written.
  const auto again = tier_->Reserve(50000, 1);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(WriteAndWait(*tier_, *again, failed.meta, failed.payload.bytes()), absl::OkStatus());
  EXPECT_EQ(ReadAndCompare(*tier_, *again, failed), absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Points, NvmeWriteFaultTest,
                         testing::Values(std::pair(NvmeFaultPoint::kWrite, EIO),
                                         std::pair(NvmeFaultPoint::kWrite, EROFS),
                                         std::pair(NvmeFaultPoint::kSync, EIO),
                                         std::pair(NvmeFaultPoint::kIndexBefore, ENOSPC),
                                         std::pair(NvmeFaultPoint::kIndexAfter, EIO)));

TEST_F(NvmeFaultTest, AReadErrorDeletesNothing) {
  Open();
  PutMany(3, 50000);
  Inject(NvmeFaultPoint::kRead, EIO);
  EXPECT_EQ(ReadAndCompare(*tier_, held_.at(1).replica, held_.at(1).block).code(),
            absl::StatusCode::kUnavailable);
  Mend();
  AwaitDegraded(false);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeFaultTest, AllocationFailureOfANewSegmentHeals) {
  Open();
  Inject(NvmeFaultPoint::kAllocate, ENOSPC);
  EXPECT_EQ(Put(1000).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(SegmentPaths().empty()) << "a segment without room holds space";
  Mend();
  AwaitDegraded(false);
  PutMany(3, 1000);
  ExpectAllReadable();
}

TEST_F(NvmeFaultTest, WhatAKilledProcessLeftOfItsTryToGrowIsRemoved) {
  Open();
  Close();
  WriteFile(options_.dir + "/grow", std::string(kTestSegmentBytes, 'x'));
  Open();
  EXPECT_FALSE(std::filesystem::exists(options_.dir + "/grow"));
}

TEST_F(NvmeFaultTest, RefusesMoreThanItsQueuesHold) {
  options_.queue_limit = 2;
  absl::Notification may_go;
  options_.fault_hook = [&](NvmeFaultPoint point) {
    if (point == NvmeFaultPoint::kSync) may_go.WaitForNotification();
    return 0;
  };
  Open();
  const TestBlock block = MakeBlock(1, 100);
  absl::BlockingCounter pending(2);
  for (int i = 0; i < 2; ++i) {
    const auto replica = tier_->Reserve(100, 1);
    ASSERT_TRUE(replica.ok());
    tier_->Write(*replica, block.meta, block.payload.bytes(), [&](absl::Status status) {
      EXPECT_TRUE(status.ok()) << status;
      pending.DecrementCount();
    });
  }
  const auto replica = tier_->Reserve(100, 1);
  ASSERT_TRUE(replica.ok());
  EXPECT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()).code(),
            absl::StatusCode::kResourceExhausted);
  may_go.Notify();
  pending.Wait();
  EXPECT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
}

TEST_F(NvmeFaultTest, ClosesWhileDegraded) {
  Open();
  PutMany(4, 50000);
  Inject(NvmeFaultPoint::kIndexBefore, EIO);
  EXPECT_EQ(Put(50000).code(), absl::StatusCode::kUnavailable);
  tier_->Free(held_.at(1).replica);
  held_.erase(1);
  Close();
  Mend();
  // The free was not durable: the block may come back, with its bytes.
  Open(/*is_exact=*/false);
  EXPECT_LE(unexpected_count_, 1);
  EXPECT_EQ(held_.size(), 3u);
  ExpectAllReadable();
}

// Random errors at every step under churn, with restarts: what was acknowledged is there, what was
// freed and forgotten is not served as anything else, and the tier always heals.
TEST_F(NvmeFaultTest, SurvivesRandomFaults) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  std::atomic<uint64_t> step = seed;
  std::atomic<bool> is_faulty = false;
  options_.fault_hook = [&](NvmeFaultPoint) {
    const uint64_t word = (step.fetch_add(1) + 1) * 0x9E3779B97F4A7C15;
    return is_faulty && (word >> 33) % 25 == 0 ? ((word >> 40) % 2 == 0 ? EIO : ENOSPC) : 0;
  };
  Open();
  for (int round = 0; round < 6; ++round) {
    is_faulty = true;
    for (int i = 0; i < 120; ++i) {
      const absl::Status status = Put(static_cast<uint32_t>(1 + random() % 250000));
      if (status.ok()) continue;
      ASSERT_TRUE(status.code() == absl::StatusCode::kUnavailable ||
                  status.code() == absl::StatusCode::kResourceExhausted)
          << status;
      if (status.code() == absl::StatusCode::kUnavailable) {
        is_faulty = false;
        AwaitDegraded(false);
        is_faulty = true;
      } else if (!held_.empty()) {
        FreeHeld(std::next(held_.begin(), static_cast<ptrdiff_t>(random() % held_.size()))->first);
      }
    }
    is_faulty = false;
    AwaitDegraded(false);
    ExpectAllReadable();
    if (round % 2 == 1) {
      Open();
      ExpectAllReadable();
    }
    ASSERT_LE(DiskBytes(), options_.capacity_bytes + kTestSegmentBytes);
  }
}

// The index finds the disk full at each of its writes in turn.
class NvmeFullIndexTest : public NvmeTierTest {
 protected:
  NvmeFullIndexTest() { options_.storage = &storage_; }
  ~NvmeFullIndexTest() override { Close(); }

  nvme::FailingStorage storage_;
};

TEST_F(NvmeFullIndexTest, AStartOnAFullDiskFailsOrServesAndTheNextOneFindsAll) {
  Open();
  PutMany(20, 5000);
  bool has_failed = true;
  for (uint64_t write_count = 0; has_failed; ++write_count) {
    SCOPED_TRACE(write_count);
    Close();
    storage_.FillUpAfter(write_count);
    auto opened = NvmeTier::Create(options_);
    if (opened.ok()) {
      const absl::Status recovered = (*opened)->Recover([](const BlockMeta&, ReplicaId) {});
      ASSERT_TRUE(recovered.ok() || absl::IsUnavailable(recovered)) << recovered;
      opened->reset();
    } else {
      ASSERT_EQ(opened.status().code(), absl::StatusCode::kUnavailable) << opened.status();
    }
    has_failed = storage_.has_failed();
    storage_.MakeRoom();
    Open();
    ASSERT_EQ(unexpected_count_, 0);
    ASSERT_FALSE(tier_->Stats().is_rebuilt);
    ASSERT_TRUE(Put(3000).ok());
  }
  ExpectAllReadable();
}

TEST_F(NvmeFullIndexTest, ARunningTierDegradesAndHeals) {
  Open();
  for (uint64_t write_count = 0; write_count < 40; ++write_count) {
    SCOPED_TRACE(write_count);
    storage_.FillUpAfter(write_count);
    absl::Status status;
    while ((status = Put(2000)).ok()) {
      if (held_.size() > 20) FreeHeld(held_.begin()->first);
    }
    ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    AwaitDegraded(true);
    if (write_count % 2 == 0) {
      // A stop, and a start after which there is room.
      Close();
      storage_.MakeRoom();
      // What was freed while it was degraded may come back.
      Open(/*is_exact=*/false);
    }
    storage_.MakeRoom();
    AwaitDegraded(false);
  }
  ExpectAllReadable();
}

// A real full disk: a tmpfs smaller than the capacity.
class NvmeFullDiskTest : public NvmeTierTest {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(options_.dir);
    if (mount("tmpfs", options_.dir.c_str(), "tmpfs", 0, "size=6m") != 0) {
      GTEST_SKIP() << "SKIPPED: cannot mount a tmpfs here: " << std::strerror(errno);
    }
    is_mounted_ = true;
  }
  void TearDown() override {
    Close();
    if (!is_mounted_) return;
    EXPECT_EQ(umount(options_.dir.c_str()), 0) << std::strerror(errno);
  }
  bool is_mounted_ = false;
};

TEST_F(NvmeFullDiskTest, UsesWhatAFileSystemHasThatIsSmallerThanItsCapacity) {
  ASSERT_EQ(mount("tmpfs", options_.dir.c_str(), "tmpfs", MS_REMOUNT, "size=9m"), 0);
  Open();
  PutMany(1, 1000);
  int replaced_count = 0;
  for (int i = 0; i < 400; ++i) {
    const absl::Status status = Put(100000);
    if (status.ok()) continue;
    ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    ASSERT_GT(held_.size(), 20U);
    FreeHeld(held_.begin()->first);
    ++replaced_count;
  }
  EXPECT_GT(replaced_count, 100);
  EXPECT_FALSE(tier_->Health().degraded) << tier_->Health().reason;
  EXPECT_LT(tier_->Usage().capacity_bytes, 9U << 20);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
  // It grows with the file system.
  ASSERT_EQ(mount("tmpfs", options_.dir.c_str(), "tmpfs", MS_REMOUNT, "size=40m"), 0);
  const size_t before_count = held_.size();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (held_.size() < before_count + 30 && std::chrono::steady_clock::now() < deadline) {
    if (!Put(100000).ok()) std::this_thread::yield();
  }
  EXPECT_GE(held_.size(), before_count + 30);
  ExpectAllReadable();
}

TEST_F(NvmeFullDiskTest, DegradesKeepsServingAndHealsWhenSpaceReturns) {
  // Less than five segments.
  ASSERT_EQ(mount("tmpfs", options_.dir.c_str(), "tmpfs", MS_REMOUNT, "size=2m"), 0);
  Open();
  absl::Status status;
  while ((status = Put(100000)).ok()) {
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_GE(held_.size(), 5u);
  AwaitDegraded(true);
  EXPECT_NE(tier_->Health().reason.find("No space left"), std::string::npos)
      << tier_->Health().reason;
  EXPECT_EQ(tier_->Reserve(100, 1).status().code(), absl::StatusCode::kUnavailable);
  ExpectAllReadable();
  ASSERT_EQ(mount("tmpfs", options_.dir.c_str(), "tmpfs", MS_REMOUNT, "size=40m"), 0);
  AwaitDegraded(false);
  PutMany(30, 100000);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeFullDiskTest, HealsAfterTheIndexFoundNoSpace) {
  Open();
  PutMany(3, 1000);
  // Somebody else fills the file system.
  const std::string filler_path = options_.dir + "/filler";
  const int filler = open(filler_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(filler, 0);
  const std::string page(4096, 'x');
  while (write(filler, page.data(), page.size()) > 0) {
  }
  absl::Status status;
  while ((status = Put(1)).ok()) {
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  AwaitDegraded(true);
  ExpectAllReadable();
  close(filler);
  ASSERT_EQ(unlink(filler_path.c_str()), 0);
  AwaitDegraded(false);
  PutMany(10, 20000);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

// A real ext4 file system of its own: somebody else fills it, the kernel makes it read-only.
class NvmeLoopDiskTest : public NvmeTierTest {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(options_.dir);
    mount_ = options_.dir;
    const std::string image = folder_.path() + "/disk";
    const std::string command = "truncate -s 64M " + image + " && mkfs.ext4 -q -m 0 " + image +
                                " && mount -o loop " + image + " " + mount_ + " >&2";
    if (std::system(command.c_str()) != 0) {
      GTEST_SKIP() << "SKIPPED: cannot make and mount an ext4 image here";
    }
    is_mounted_ = true;
    options_.dir = mount_ + "/nvme";
    options_.capacity_bytes = 40 * kTestSegmentBytes;
  }
  void TearDown() override {
    Close();
    if (!is_mounted_) return;
    EXPECT_EQ(umount2(mount_.c_str(), MNT_DETACH), 0) << std::strerror(errno);
  }

  std::string mount_;
  bool is_mounted_ = false;
};

TEST_F(NvmeLoopDiskTest, ServesWhileSomebodyElseFillsTheDiskAndWritesAgainWithinAMinute) {
  Open();
  PutMany(20, 100000);
  const std::string filler_path = mount_ + "/filler";
  const int filler = open(filler_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(filler, 0);
  const std::string chunk(1 << 20, 'x');
  while (write(filler, chunk.data(), chunk.size()) > 0) {
  }
  absl::Status status;
  while ((status = Put(100000)).ok()) {
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  AwaitDegraded(true);
  ExpectAllReadable();
  close(filler);
  ASSERT_EQ(unlink(filler_path.c_str()), 0);
  // Fails after half a minute.
  AwaitDegraded(false);
  PutMany(20, 100000);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeLoopDiskTest, ServesFromADiskThatTheKernelMadeReadOnly) {
  Open();
  PutMany(20, 100000);
  // What ext4 does by itself after an error of the device.
  if (std::system(("mount -o remount,abort " + mount_ + " 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << "SKIPPED: this ext4 cannot be made to give up";
  }
  absl::Status status;
  while ((status = Put(100000)).ok()) {
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  AwaitDegraded(true);
  ExpectAllReadable();
  Close();
  // Mended as an operator does it.
  ASSERT_EQ(umount2(mount_.c_str(), 0), 0) << std::strerror(errno);
  is_mounted_ = false;
  const std::string image = folder_.path() + "/disk";
  const int checked = std::system(("e2fsck -fy " + image + " >&2").c_str());
  ASSERT_LE(WEXITSTATUS(checked), 1);
  ASSERT_EQ(std::system(("mount -o loop " + image + " " + mount_).c_str()), 0);
  is_mounted_ = true;
  Open();
  ExpectAllReadable();
  PutMany(5, 100000);
}

}  // namespace
}  // namespace kvtier
