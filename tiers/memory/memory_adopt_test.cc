// SPDX-License-Identifier: Apache-2.0
//
// Blocks that outlive the tier that held them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/memory/slot_index.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

const std::string kBoot = "11111111-2222-3333-4444-555555555555";

// What systemd is to the daemon.
class FakeKeeper final : public SegmentKeeper {
 public:
  ~FakeKeeper() override { Clear(); }
  absl::Status Keep(const std::string& name, int fd) override {
    absl::MutexLock lock(&mutex_);
    const auto answers = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !silent_; };
    if (name.starts_with("kvtier-host-segment")) {
      ++asked_count_;
      mutex_.Await(absl::Condition(&answers));
    }
    if (name.find(refused_) != std::string::npos) return absl::UnavailableError("no keeper");
    fds_.emplace(name, fcntl(fd, F_DUPFD_CLOEXEC, 0));
    return absl::OkStatus();
  }
  absl::Status Forget(const std::string& name) override {
    absl::MutexLock lock(&mutex_);
    if (name.find(refused_) != std::string::npos) return absl::UnavailableError("no keeper");
    const auto [first, last] = fds_.equal_range(name);
    for (auto it = first; it != last; ++it) close(it->second);
    fds_.erase(first, last);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<KeptFd>> TakeKept() override {
    absl::MutexLock lock(&mutex_);
    if (takes_fail) return absl::UnavailableError("no answer");
    std::vector<KeptFd> kept;
    for (const auto& [name, fd] : fds_) kept.push_back({name, fcntl(fd, F_DUPFD_CLOEXEC, 0)});
    return kept;
  }

  // Fails whatever has that in its name.
  void Refuse(const std::string& refused) {
    absl::MutexLock lock(&mutex_);
    refused_ = refused;
  }
  // Answers no Keep of a segment until it is over.
  void BeSilent(bool silent) {
    absl::MutexLock lock(&mutex_);
    silent_ = silent;
  }
  void WaitForKeep() {
    absl::MutexLock lock(&mutex_);
    const auto asked = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return asked_count_ > 0; };
    mutex_.Await(absl::Condition(&asked));
  }
  std::atomic<bool> takes_fail = false;

  void Clear() {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, fd] : fds_) close(fd);
    fds_.clear();
  }
  size_t count() const {
    absl::MutexLock lock(&mutex_);
    return fds_.size();
  }
  // The descriptor of the index, or the first of a segment; the keeper's.
  int Find(const std::string& kind) const {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, fd] : fds_) {
      if (name.starts_with("kvtier-host-" + kind)) return fd;
    }
    ADD_FAILURE() << "no " << kind;
    return -1;
  }
  void Replace(const std::string& kind, int fd) {
    const int old = Find(kind);
    absl::MutexLock lock(&mutex_);
    for (auto& [name, kept] : fds_) {
      if (kept == old) kept = fd;
    }
    close(old);
  }

 private:
  mutable absl::Mutex mutex_;
  static constexpr char kNothing[] = "/";
  std::multimap<std::string, int> fds_ ABSL_GUARDED_BY(mutex_);
  std::string refused_ ABSL_GUARDED_BY(mutex_) = kNothing;
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  int asked_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

Digest Tag(const std::string& tenant) { return FieldHasher().Add(tenant).Finish(); }

class MemoryAdoptTest : public testing::Test {
 protected:
  MemoryAdoptTest() {
    options_.capacity_bytes = 8 * kMiB;
    options_.segment_bytes = kMiB;
    options_.prepare_thread_count = 1;
    options_.keeper = &keeper_;
    options_.owner_tags = {Tag("default"), Tag("other")};
    options_.boot_id = kBoot;
  }

  // Waits for all its memory, which is the keeper's then, too.
  MemoryTier& Start() {
    MemoryTier& started = StartAtOnce();
    while (started.Usage().ready_bytes < options_.capacity_bytes) sched_yield();
    return started;
  }
  // A tier of its own time: those before it are not told to stop, as if they had been killed.
  MemoryTier& StartAtOnce() {
    auto tier = MemoryTier::Create(options_);
    EXPECT_TRUE(tier.ok()) << tier.status();
    tiers_.push_back(std::move(tier).value());
    MemoryTier& started = *tiers_.back();
    found_.clear();
    EXPECT_TRUE(started
                    .Recover([&](const BlockMeta& meta, ReplicaId replica) {
                      EXPECT_TRUE(found_.emplace(meta.key, Found{meta, replica}).second);
                      started.OnCommitted(replica, meta);
                    })
                    .ok());
    return started;
  }

  ReplicaId Fill(MemoryTier& tier, const TestBlock& block, OwnerIdx owner = 0) {
    const auto replica = tier.Reserve(block.meta.payload_bytes, owner);
    EXPECT_TRUE(replica.ok()) << replica.status();
    std::ranges::copy(block.payload.bytes().first(block.meta.payload_bytes),
                      tier.Mapped(*replica).begin());
    return *replica;
  }
  // A committed block.
  ReplicaId Put(MemoryTier& tier, uint64_t seed, uint32_t bytes = 10'000, OwnerIdx owner = 0) {
    const TestBlock block = MakeBlock(seed, bytes);
    const ReplicaId replica = Fill(tier, block, owner);
    tier.OnCommitted(replica, block.meta);
    return replica;
  }
  // As of the last start.
  bool Has(uint64_t seed, uint32_t bytes = 10'000) {
    const TestBlock block = MakeBlock(seed, bytes);
    const auto it = found_.find(block.meta.key);
    if (it == found_.end()) return false;
    EXPECT_EQ(it->second.meta, block.meta);
    EXPECT_TRUE(ReadAndCompare(*tiers_.back(), it->second.replica, block).ok());
    return true;
  }
  // Bytes of a kept file, to be changed.
  std::span<std::byte> Map(const std::string& kind) {
    const int fd = keeper_.Find(kind);
    struct stat status{};
    EXPECT_EQ(fstat(fd, &status), 0);
    const auto bytes = static_cast<size_t>(status.st_size);
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    EXPECT_NE(base, MAP_FAILED);
    return {static_cast<std::byte*>(base), bytes};
  }

  struct Found {
    BlockMeta meta;
    ReplicaId replica;
  };
  FakeKeeper keeper_;
  MemoryTier::Options options_;
  std::vector<std::unique_ptr<MemoryTier>> tiers_;
  std::map<Key, Found> found_;
};

TEST_F(MemoryAdoptTest, TakesOverEveryCommittedBlockTimeAndAgain) {
  MemoryTier& first = Start();
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Put(first, seed, 10'000);
    Put(first, 100 + seed, 30'000, /*owner=*/1);
  }
  tiers_.clear();
  for (int restart = 0; restart < 3; ++restart) {
    MemoryTier& next = Start();
    ASSERT_EQ(found_.size(), 80u);
    EXPECT_EQ(next.adoption().kept_count, 80u);
    EXPECT_EQ(next.adoption().kept_bytes, 40u * 40'000);
    EXPECT_EQ(next.adoption().refused_count(), 0u);
    EXPECT_EQ(next.adoption().refusal, "");
    for (uint64_t seed = 0; seed < 40; ++seed) {
      EXPECT_TRUE(Has(seed, 10'000));
      EXPECT_TRUE(Has(100 + seed, 30'000));
    }
    const auto owner = [&](uint64_t seed, uint32_t bytes) {
      const ReplicaId replica = found_.at(MakeBlock(seed, bytes).meta.key).replica;
      const auto handle = next.ExportSegment(next.Place(replica).segment_idx, false);
      close(handle->fd);
      return handle->owner;
    };
    EXPECT_EQ(owner(1, 10'000), 0u);
    EXPECT_EQ(owner(101, 30'000), 1u);
    // Nothing of the past is left with the keeper: one index and the segments of one tier, those
    // that are coming included.
    EXPECT_EQ(keeper_.count(), 1 + 8u);
    EXPECT_EQ(next.Usage().used_bytes, 40u * (12'288 + 32'768));
    // Every other time it is killed.
    if (restart % 2 == 0) tiers_.clear();
  }
}

// Says yes to a touch when it may.
class WaitingCalls final : public MemoryCalls {
 public:
  int Advise(std::span<std::byte> memory, int advice) override {
    if (advice == MADV_POPULATE_WRITE) may_touch.WaitForNotification();
    return MemoryCalls::Advise(memory, advice);
  }
  absl::Notification may_touch;
};

TEST_F(MemoryAdoptTest, AKillFindsWhatWasCommittedAMomentAgo) {
  MemoryTier& first = Start();
  // All of it: no segment waits to be given to the keeper.
  for (uint64_t seed = 0; seed < 96; ++seed) Put(first, seed, 80 << 10);
  Start();
  EXPECT_EQ(found_.size(), 96u);
  EXPECT_EQ(tiers_.back()->adoption().refusal, "");
}

TEST_F(MemoryAdoptTest, SpareMemoryWaitsForTheKeeperAndReserveDoesNot) {
  keeper_.BeSilent(true);
  MemoryTier& first = StartAtOnce();
  keeper_.WaitForKeep();
  EXPECT_EQ(first.Usage().physical_bytes, 0u) << "a block could be in it";
  for (uint64_t seed = 0; seed < 96; ++seed) Put(first, seed, 80 << 10);
  keeper_.BeSilent(false);
  // Who stops gives what he owes.
  tiers_.clear();
  Start();
  EXPECT_EQ(found_.size(), 96u);
}

TEST_F(MemoryAdoptTest, MemoryInNeedIsKeptThoughNothingGetsReady) {
  WaitingCalls calls;
  options_.calls = &calls;
  MemoryTier& first = StartAtOnce();
  while (first.Usage().physical_bytes == 0) sched_yield();
  for (uint64_t seed = 0; seed < 96; ++seed) Put(first, seed, 80 << 10);
  while (keeper_.count() < 1 + 8) sched_yield();
  EXPECT_EQ(first.Usage().ready_bytes, 0u);
  calls.may_touch.Notify();
  options_.calls = &KernelMemoryCalls();
  Start();
  EXPECT_EQ(found_.size(), 96u);
  tiers_.clear();
}

TEST_F(MemoryAdoptTest, ErasesNoOriginalWhoseCopyIsNotKept) {
  MemoryTier& first = Start();
  for (uint64_t seed = 0; seed < 40; ++seed) Put(first, seed, 80 << 10);
  for (const std::string refused : {"segment", "index"}) {
    keeper_.Refuse(refused);
    MemoryTier& second = Start();
    EXPECT_EQ(found_.size(), 40u) << "served all the same";
    EXPECT_NE(second.adoption().refusal.find("no keeper"), std::string::npos);
    EXPECT_NE(second.prepared().shortfall.find("no keeper"), std::string::npos);
  }
  // The index of the first attempt names memory that nobody has; the blocks are in another.
  keeper_.Refuse("/");
  MemoryTier& third = Start();
  EXPECT_EQ(found_.size(), 40u);
  EXPECT_EQ(third.adoption().damaged_count, 0u);
  EXPECT_EQ(third.adoption().refusal, "");
  EXPECT_EQ(keeper_.count(), 1 + 8u);
}

TEST_F(MemoryAdoptTest, LeavesEverythingToTheNextWhenTheKeeperDoesNotGiveAll) {
  MemoryTier& first = Start();
  for (uint64_t seed = 0; seed < 10; ++seed) Put(first, seed, 80 << 10);
  keeper_.takes_fail = true;
  MemoryTier& second = Start();
  EXPECT_EQ(found_.size(), 0u);
  EXPECT_NE(second.adoption().refusal.find("no answer"), std::string::npos);
  Put(second, 10, 80 << 10);
  keeper_.takes_fail = false;
  Start();
  EXPECT_EQ(found_.size(), 11u);
  EXPECT_EQ(keeper_.count(), 1 + 8u);
}

TEST_F(MemoryAdoptTest, FindsNothingThatWasFreedOrNeverCommitted) {
  MemoryTier& first = Start();
  Put(first, 1);
  const ReplicaId freed = Put(first, 2);
  Fill(first, MakeBlock(3, 10'000));
  // A slot whose next block is not committed yet.
  const ReplicaId reused = Put(first, 4);
  first.Free(reused);
  ASSERT_NE(Fill(first, MakeBlock(5, 10'000)), reused);
  first.Free(freed);
  MemoryTier& second = Start();
  EXPECT_EQ(found_.size(), 1u);
  EXPECT_TRUE(Has(1));
  EXPECT_EQ(second.adoption().refused_count(), 0u);
}

TEST_F(MemoryAdoptTest, ForgetsASegmentThatWentToAnotherOwner) {
  options_.capacity_bytes = kMiB;
  MemoryTier& first = Start();
  first.Free(Put(first, 1));
  Put(first, 2, 20'000, /*owner=*/1);
  tiers_.clear();
  Start();
  EXPECT_EQ(found_.size(), 1u);
  EXPECT_TRUE(Has(2, 20'000));
}

TEST_F(MemoryAdoptTest, NoProcessOfTheOldTimeReachesWhatIsServed) {
  options_.capacity_bytes = kMiB;
  MemoryTier& first = Start();
  Put(first, 1);
  const std::span<std::byte> old = Map("segment");
  MemoryTier& second = Start();
  ASSERT_TRUE(Has(1));
  std::ranges::fill(old, std::byte{0xEE});
  EXPECT_TRUE(Has(1));
  // Nor does the old mapping keep the memory that was given back.
  EXPECT_NE(second.Place(found_.begin()->second.replica).segment_idx, UINT32_MAX);
  munmap(old.data(), old.size());
}

TEST_F(MemoryAdoptTest, GivesTheOldMemoryBack) {
  options_.capacity_bytes = 7 * kMiB;
  MemoryTier& first = Start();
  for (uint64_t seed = 0; seed < 100; ++seed) Put(first, seed, 64 << 10);
  const int old = fcntl(keeper_.Find("segment"), F_DUPFD_CLOEXEC, 0);
  struct stat before{};
  ASSERT_EQ(fstat(old, &before), 0);
  EXPECT_EQ(before.st_blocks, static_cast<blkcnt_t>(kMiB / 512));
  Start();
  EXPECT_EQ(found_.size(), 100u);
  struct stat after{};
  ASSERT_EQ(fstat(old, &after), 0);
  EXPECT_EQ(after.st_blocks, 0);
  close(old);
}

TEST_F(MemoryAdoptTest, RefusesBytesThatChanged) {
  options_.capacity_bytes = kMiB;
  MemoryTier& first = Start();
  Put(first, 1);
  Put(first, 2);
  const std::span<std::byte> segment = Map("segment");
  segment[12'288 + 77] ^= std::byte{1};
  MemoryTier& second = Start();
  EXPECT_TRUE(Has(1));
  EXPECT_FALSE(Has(2));
  EXPECT_EQ(second.adoption().corrupt_count, 1u);
  EXPECT_NE(second.adoption().refusal.find("checksum"), std::string::npos);
  munmap(segment.data(), segment.size());
}

TEST_F(MemoryAdoptTest, RefusesEveryEntryWithAFlippedBit) {
  for (const size_t at : {0u, 4u, 8u, 40u, 72u, 104u, 136u, 140u, 144u, 152u}) {
    tiers_.clear();
    Put(Start(), at);
    const std::span<std::byte> index = Map("index");
    index[4096 + sizeof(SlotIndexFrame) + at] ^= std::byte{0x10};
    MemoryTier& next = Start();
    EXPECT_EQ(found_.size(), 0u) << at;
    EXPECT_EQ(next.adoption().damaged_count, 1u) << at;
    munmap(index.data(), index.size());
  }
}

TEST_F(MemoryAdoptTest, RefusesAnIndexThatIsNotItsOwn) {
  const auto refusal = [&](const std::function<void()>& damage) {
    tiers_.clear();
    Put(Start(), 1);
    damage();
    MemoryTier& next = Start();
    EXPECT_EQ(found_.size(), 0u);
    const std::string reason = next.adoption().refusal;
    // And the next start is clean.
    tiers_.clear();
    EXPECT_EQ(Start().adoption().refusal, "");
    tiers_.clear();
    keeper_.Clear();
    options_.boot_id = kBoot;
    return reason;
  };
  const auto patch = [&](size_t at, std::byte value) {
    const std::span<std::byte> index = Map("index");
    index[at] = value;
    munmap(index.data(), index.size());
  };
  const auto copy = [&](unsigned seals, off_t difference) {
    const std::span<std::byte> index = Map("index");
    const int fd = memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(write(fd, index.data(), index.size()), static_cast<ssize_t>(index.size()));
    EXPECT_EQ(ftruncate(fd, static_cast<off_t>(index.size()) + difference), 0);
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
    munmap(index.data(), index.size());
    keeper_.Replace("index", fd);
    return fd;
  };
  constexpr unsigned kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const auto has = [](const std::string& reason, const std::string& word) {
    return reason.find(word) != std::string::npos ? "" : reason;
  };
  EXPECT_EQ(has(refusal([&] { options_.boot_id[0] = '9'; }), "another boot"), "");
  EXPECT_EQ(has(refusal([&] { patch(0, std::byte{'X'}); }), "no index"), "");
  EXPECT_EQ(has(refusal([&] { patch(8, std::byte{2}); }), "version 2"), "");
  EXPECT_EQ(has(refusal([&] { patch(12, std::byte{161}); }), "version"), "");
  EXPECT_EQ(has(refusal([&] { patch(18, std::byte{1}); }), "damaged"), "");
  EXPECT_EQ(has(refusal([&] { patch(68, std::byte{0}); }), "damaged"), "");
  EXPECT_EQ(has(refusal([&] { copy(0, 0); }), "not sealed"), "");
  EXPECT_EQ(has(refusal([&] { copy(F_SEAL_GROW, 0); }), "not sealed"), "");
  EXPECT_EQ(has(refusal([&] { copy(kSeals, -4096); }), "bytes, not"), "");
  EXPECT_EQ(has(refusal([&] { copy(kSeals, 4096); }), "bytes, not"), "");
  if (geteuid() != 0) GTEST_SKIP() << "giving a file away needs root";
  EXPECT_EQ(has(refusal([&] { ASSERT_EQ(fchown(copy(kSeals, 0), 4242, 0), 0); }), "uid 4242"), "");
}

TEST_F(MemoryAdoptTest, RefusesASegmentThatIsMissingOrOfAnotherUser) {
  options_.capacity_bytes = kMiB;
  Put(Start(), 1);
  keeper_.Replace("segment", memfd_create("empty", MFD_CLOEXEC));
  EXPECT_EQ(Start().adoption().damaged_count, 1u);
  EXPECT_EQ(found_.size(), 0u);
  if (geteuid() != 0) GTEST_SKIP() << "giving a file away needs root";
  tiers_.clear();
  Put(Start(), 1);
  ASSERT_EQ(fchown(keeper_.Find("segment"), 4242, 0), 0);
  EXPECT_EQ(Start().adoption().damaged_count, 1u);
  EXPECT_EQ(found_.size(), 0u);
}

TEST_F(MemoryAdoptTest, KnowsTenantsByTheirNames) {
  options_.owner_tags = {Tag("default"), Tag("a"), Tag("b")};
  MemoryTier& first = Start();
  Put(first, 1, 10'000, 1);
  Put(first, 2, 10'000, 2);
  // No tag: not kept.
  Put(first, 3, 10'000, 7);
  tiers_.clear();
  options_.owner_tags = {Tag("default"), Tag("b")};
  MemoryTier& second = Start();
  EXPECT_EQ(found_.size(), 1u);
  ASSERT_TRUE(Has(2));
  EXPECT_EQ(second.adoption().foreign_count, 1u);
  const ReplicaId replica = found_.begin()->second.replica;
  const auto handle = second.ExportSegment(second.Place(replica).segment_idx, false);
  ASSERT_TRUE(handle.ok());
  EXPECT_EQ(handle->owner, 1u);
  close(handle->fd);
}

TEST_F(MemoryAdoptTest, KeepsWhatFitsIntoOtherSizes) {
  MemoryTier& first = Start();
  for (uint64_t seed = 0; seed < 100; ++seed) Put(first, seed, 64 << 10);
  tiers_.clear();
  options_.capacity_bytes = 4 * kMiB;
  options_.segment_bytes = 2 * kMiB;
  MemoryTier& second = Start();
  EXPECT_EQ(second.adoption().kept_count, 64u);
  EXPECT_EQ(second.adoption().no_room_count, 36u);
  EXPECT_EQ(found_.size(), 64u);
}

}  // namespace
}  // namespace kvtier
