// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/striped_tier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tiers/conformance_test.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/storage.h"

namespace kvtier {
namespace {

namespace fs = std::filesystem;

NvmeOptions SmallOptions() {
  return {.capacity_bytes = 3 * 12 * kTestSegmentBytes,
          .segment_bytes = kTestSegmentBytes,
          .heal_interval_ms = 5};
}

std::vector<std::string> DirsIn(const std::string& folder) {
  return {folder + "/a", folder + "/b", folder + "/c"};
}

INSTANTIATE_TEST_SUITE_P(Striped, TierConformanceTest,
                         testing::Values(TierCase{
                             .name = "ThreeDirectories",
                             .create = [](const std::string& folder) -> std::unique_ptr<Tier> {
                               NvmeOptions options = SmallOptions();
                               // Payloads of 1 MiB want segments that hold them.
                               options.segment_bytes = 2 << 20;
                               options.capacity_bytes = 3 * (18 << 20);
                               auto tier = StripedTier::Create(DirsIn(folder), options);
                               if (!tier.ok()) {
                                 ADD_FAILURE() << tier.status();
                                 return nullptr;
                               }
                               return std::move(tier).value();
                             },
                             .checks_identity = true,
                             .is_mapped = false}),
                         CaseName);

class StripedTierTest : public testing::Test {
 protected:
  struct Held {
    TestBlock block;
    ReplicaId replica = kNoReplica;
  };

  void Open(const NvmeOptions& options = SmallOptions()) {
    tier_.reset();
    auto tier = StripedTier::Create(dirs_, options);
    ASSERT_TRUE(tier.ok()) << tier.status();
    tier_ = std::move(tier).value();
    for (auto& [key, held] : held_) held.replica = kNoReplica;
    const absl::Status recovered = tier_->Recover([&](const BlockMeta& meta, ReplicaId replica) {
      const auto at = held_.find(meta.key);
      ASSERT_NE(at, held_.end());
      ASSERT_EQ(at->second.replica, kNoReplica) << "found twice";
      at->second.replica = replica;
    });
    ASSERT_TRUE(recovered.ok()) << recovered;
  }
  absl::Status Put(uint64_t seed) {
    TestBlock block = MakeBlock(seed, 50000);
    const auto replica = tier_->Reserve(block.meta.payload_bytes, 1);
    if (!replica.ok()) return replica.status();
    absl::Status status = WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes());
    if (!status.ok()) {
      tier_->Free(*replica);
      return status;
    }
    const Key key = block.meta.key;
    held_.emplace(key, Held{.block = std::move(block), .replica = *replica});
    return status;
  }
  int ReadableCount() {
    int count = 0;
    for (const auto& [key, held] : held_) {
      if (held.replica == kNoReplica) continue;
      EXPECT_EQ(ReadAndCompare(*tier_, held.replica, held.block), absl::OkStatus());
      ++count;
    }
    return count;
  }

  TempFolder folder_;
  const std::vector<std::string> dirs_ = DirsIn(folder_.path());
  std::unique_ptr<StripedTier> tier_;
  std::map<Key, Held> held_;
};

TEST_F(StripedTierTest, FillsAllDrivesAndFindsEverythingAgain) {
  Open();
  for (uint64_t seed = 0; seed < 120; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  for (const StripedTier::Member& member : tier_->Members()) {
    EXPECT_EQ(member.failure, "");
    // A third of the blocks, give or take what chance does to 120 of them.
    EXPECT_GT(member.usage.used_bytes, tier_->Usage().used_bytes / 6) << member.dir;
  }
  EXPECT_EQ(ReadableCount(), 120);
  Open();
  EXPECT_EQ(ReadableCount(), 120);
}

TEST_F(StripedTierTest, PrefersTheDriveWithRoom) {
  Open();
  absl::Status status;
  uint64_t seed = 0;
  while ((status = Put(seed)).ok()) ++seed;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  // Every drive is full, so drawing has evened them out.
  for (const StripedTier::Member& member : tier_->Members()) {
    EXPECT_GT(member.usage.used_bytes + tier_->FootprintBytes(50000), member.usage.capacity_bytes);
  }
  // Room on one drive only is found.
  tier_->Free(held_.begin()->second.replica);
  held_.erase(held_.begin());
  EXPECT_EQ(Put(seed), absl::OkStatus());
}

TEST_F(StripedTierTest, ALostDriveTakesItsBlocksOnly) {
  Open();
  for (uint64_t seed = 0; seed < 60; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  tier_.reset();
  // The drive is gone: nothing can be made where it was mounted.
  fs::rename(dirs_[1], folder_.path() + "/away");
  WriteFile(dirs_[1], "");
  Open();
  const int readable_count = ReadableCount();
  EXPECT_GT(readable_count, 20);
  EXPECT_LT(readable_count, 60);
  EXPECT_FALSE(tier_->Health().degraded);
  EXPECT_NE(tier_->Health().reason.find(dirs_[1]), std::string::npos) << tier_->Health().reason;
  for (uint64_t seed = 100; seed < 120; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  tier_.reset();
  // It comes back with what it held.
  fs::remove(dirs_[1]);
  fs::rename(folder_.path() + "/away", dirs_[1]);
  Open();
  EXPECT_EQ(ReadableCount(), 80);
  EXPECT_EQ(tier_->Health().reason, "");
}

TEST_F(StripedTierTest, ADriveThatFailsWhileInUseIsLeftOutUntilItHeals) {
  std::atomic<bool> is_failing = false;
  NvmeOptions options = SmallOptions();
  std::atomic<int> failed_count = 0;
  options.fault_hook = [&](NvmeFaultPoint point) {
    // One write fails; the drive it was on stays down.
    if (!is_failing || point != NvmeFaultPoint::kWrite) return 0;
    ++failed_count;
    return EIO;
  };
  Open(options);
  for (uint64_t seed = 0; seed < 30; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  is_failing = true;
  EXPECT_EQ(Put(100).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(tier_->Health().degraded) << "two drives have not met the error yet";
  EXPECT_NE(tier_->Health().reason, "");
  while (!tier_->Health().degraded) EXPECT_FALSE(Put(101).ok());
  EXPECT_EQ(tier_->Reserve(100, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadableCount(), 30);
  is_failing = false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!tier_->Health().reason.empty()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << tier_->Health().reason;
    std::this_thread::yield();
  }
  ASSERT_EQ(Put(102), absl::OkStatus());
  EXPECT_EQ(ReadableCount(), 31);
}

// Nothing can be made on a drive that is full.
class FullStorage final : public nvme::Storage {
 public:
  absl::StatusOr<bool> MakeFolder(const std::string& path) override {
    if (is_full) return absl::ResourceExhaustedError("mkdir " + path + ": no space");
    return Storage::MakeFolder(path);
  }
  std::atomic<bool> is_full = true;
};

// What StartRejoining tells.
class Joined {
 public:
  void Add(const StripedTier::Blocks& blocks) {
    absl::MutexLock lock(&mutex_);
    blocks_.insert(blocks_.end(), blocks.begin(), blocks.end());
    ++count_;
  }
  StripedTier::Blocks Await(int count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return count_ >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(30)));
    return blocks_;
  }

 private:
  absl::Mutex mutex_;
  StripedTier::Blocks blocks_;
  int count_ = 0;
};

TEST_F(StripedTierTest, StartsOnFullDrivesAndTakesThemInOnceTheyWork) {
  Open();
  for (uint64_t seed = 0; seed < 30; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  tier_.reset();
  FullStorage storage;
  NvmeOptions options = SmallOptions();
  options.storage = &storage;
  options.heal_interval_ms = 1;
  Open(options);
  EXPECT_TRUE(tier_->Health().degraded);
  EXPECT_NE(tier_->Health().reason.find("no space"), std::string::npos) << tier_->Health().reason;
  EXPECT_EQ(tier_->Reserve(100, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_GE(tier_->FootprintBytes(100), 100);
  EXPECT_EQ(tier_->Usage().capacity_bytes, 0);
  EXPECT_EQ(tier_->Stats().segment_bytes, 0);
  EXPECT_EQ(ReadableCount(), 0);
  auto host = MemoryTier::Create({.capacity_bytes = 4 << 20,
                                  .segment_bytes = 1 << 20,
                                  .observers = {&tier_->memory_observer()},
                                  .prepare_thread_count = 2});
  ASSERT_TRUE(host.ok()) << host.status();
  ASSERT_EQ((*host)->Recover([](const BlockMeta&, ReplicaId) {}), absl::OkStatus());
  Joined joined;
  tier_->StartRejoining([&](const StripedTier::Blocks& blocks) { joined.Add(blocks); });
  storage.is_full = false;
  for (const auto& [meta, replica] : joined.Await(3)) held_.at(meta.key).replica = replica;
  EXPECT_FALSE(tier_->Health().degraded);
  EXPECT_EQ(tier_->Health().reason, "");
  EXPECT_EQ(ReadableCount(), 30);
  ASSERT_EQ(Put(100), absl::OkStatus());
  // The drives were told of the memory that was there before them, and let it go.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (tier_->Stats().io_engine == "io_uring" && tier_->Stats().registered_bytes == 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  for (const auto& [key, held] : held_) {
    const uint32_t bytes = held.block.meta.payload_bytes;
    const auto slot = (*host)->Reserve(bytes, 0);
    ASSERT_TRUE(slot.ok()) << slot.status();
    const std::span<std::byte> target = (*host)->Mapped(*slot);
    EXPECT_EQ(ReadAndWait(*tier_, held.replica, held.block.meta, target), absl::OkStatus());
    EXPECT_EQ(std::memcmp(target.data(), held.block.payload.bytes().data(), bytes), 0);
    (*host)->Free(*slot);
  }
  host->reset();
  EXPECT_EQ(tier_->Stats().registered_bytes, 0);
  tier_.reset();
}

TEST_F(StripedTierTest, ADriveThatIsMountedAgainJoinsWithItsBlocks) {
  Open();
  for (uint64_t seed = 0; seed < 60; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  tier_.reset();
  fs::rename(dirs_[1], folder_.path() + "/away");
  WriteFile(dirs_[1], "");
  NvmeOptions options = SmallOptions();
  options.heal_interval_ms = 1;
  Open(options);
  const int readable_count = ReadableCount();
  ASSERT_LT(readable_count, 60);
  Joined joined;
  tier_->StartRejoining([&](const StripedTier::Blocks& blocks) { joined.Add(blocks); });
  fs::remove(dirs_[1]);
  fs::rename(folder_.path() + "/away", dirs_[1]);
  const StripedTier::Blocks blocks = joined.Await(1);
  EXPECT_EQ(static_cast<int>(blocks.size()), 60 - readable_count);
  for (const auto& [meta, replica] : blocks) held_.at(meta.key).replica = replica;
  EXPECT_EQ(ReadableCount(), 60);
  EXPECT_EQ(tier_->Health().reason, "");
}

// Files of this drive cannot be removed.
class StubbornStorage final : public nvme::Storage {
 public:
  explicit StubbornStorage(std::string dir) : dir_(std::move(dir)) {}
  absl::Status Remove(const std::string& path) override {
    if (path.starts_with(dir_ + "/segments/")) return absl::UnavailableError("stubborn");
    return Storage::Remove(path);
  }

 private:
  const std::string dir_;
};

TEST_F(StripedTierTest, TellsAllDrivesOfMemoryAlsoOneThatCannotBeRecovered) {
  Open();
  for (uint64_t seed = 0; Put(seed).ok();) ++seed;
  tier_.reset();
  // With less capacity, segments have to go.
  StubbornStorage storage(dirs_[1]);
  NvmeOptions options = SmallOptions();
  options.capacity_bytes = 3 * 8 * kTestSegmentBytes;
  options.storage = &storage;
  auto nvme = StripedTier::Create(dirs_, options);
  ASSERT_TRUE(nvme.ok()) << nvme.status();
  auto host = MemoryTier::Create({.capacity_bytes = 4 << 20,
                                  .segment_bytes = 1 << 20,
                                  .observers = {&(*nvme)->memory_observer()},
                                  .prepare_thread_count = 2});
  ASSERT_TRUE(host.ok()) << host.status();
  // Memory is made and told of while directories are given up.
  ASSERT_EQ((*host)->Recover([](const BlockMeta&, ReplicaId) {}), absl::OkStatus());
  std::map<Key, ReplicaId> found;
  ASSERT_EQ((*nvme)->Recover([&](const BlockMeta& meta, ReplicaId replica) {
    found.emplace(meta.key, replica);
  }),
            absl::OkStatus());
  EXPECT_NE((*nvme)->Health().reason.find(dirs_[1]), std::string::npos);
  EXPECT_FALSE(found.empty());
  for (const auto& [key, replica] : found) {
    const TestBlock& block = held_.at(key).block;
    const auto slot = (*host)->Reserve(block.meta.payload_bytes, 0);
    ASSERT_TRUE(slot.ok()) << slot.status();
    const std::span<std::byte> bytes = (*host)->Mapped(*slot);
    EXPECT_EQ(ReadAndWait(**nvme, replica, block.meta, bytes), absl::OkStatus());
    EXPECT_EQ(std::memcmp(bytes.data(), block.payload.bytes().data(), block.meta.payload_bytes), 0);
    (*host)->Free(*slot);
  }
  host->reset();
}

TEST_F(StripedTierTest, KeepsABlockThatTwoDrivesHoldOnce) {
  Open();
  for (uint64_t seed = 0; seed < 20; ++seed) ASSERT_EQ(Put(seed), absl::OkStatus());
  tier_.reset();
  fs::remove_all(dirs_[2]);
  fs::copy(dirs_[0], dirs_[2], fs::copy_options::recursive);
  Open();
  EXPECT_GT(ReadableCount(), 3);
  const uint64_t used_bytes = tier_->Usage().used_bytes;
  EXPECT_EQ(used_bytes, static_cast<uint64_t>(ReadableCount()) * tier_->FootprintBytes(50000));
}

TEST_F(StripedTierTest, RefusesWhatNoOtherDriveMakesGood) {
  Open();
  EXPECT_EQ(StripedTier::Create(dirs_, SmallOptions()).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "in use";
  EXPECT_EQ(StripedTier::Create({}, SmallOptions()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StripedTier::Create({dirs_[0], dirs_[0]}, SmallOptions()).status().code(),
            absl::StatusCode::kInvalidArgument);
  // One directory under two names, and one in another.
  const fs::path link = folder_.path() + "/link";
  fs::create_symlink("a", link);
  for (const std::string& other : {dirs_[0] + "/", dirs_[0] + "/.", folder_.path() + "/b/../a",
                                   link.string(), dirs_[0] + "/segments", folder_.path()}) {
    for (const auto& dirs : {std::vector{dirs_[0], other}, std::vector{other, dirs_[0]}}) {
      EXPECT_EQ(StripedTier::Create(dirs, SmallOptions()).status().code(),
                absl::StatusCode::kInvalidArgument)
          << dirs[0] << " " << dirs[1];
    }
  }
  tier_.reset();
  EXPECT_NE(StripedTier::Create({link.string()}, SmallOptions())
                .status()
                .message()
                .find("is a link: configure the directory"),
            absl::string_view::npos);
  WriteFile(folder_.path() + "/file", "");
  EXPECT_FALSE(StripedTier::Create({folder_.path() + "/file"}, SmallOptions()).ok());
}

}  // namespace
}  // namespace kvtier
