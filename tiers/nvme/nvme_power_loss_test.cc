// SPDX-License-Identifier: Apache-2.0
//
// The power goes off at every sync of random lives of a tier, and of the lives that start from what
// was left: what was acknowledged and not freed is there with its bytes, every block that is found
// can be read, and the accounts are exact. $KVTIER_POWER_LOSSES says how many losses are tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/recording_storage.h"
#include "tiers/nvme/spent_file.h"

namespace kvtier {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kSegmentBytes = 64 << 10;
// Eight segments beside the index.
constexpr uint64_t kCapacityBytes = 20 * kSegmentBytes;
constexpr int kKeyCount = 24;
constexpr uint32_t kPayloadBytesMax = 30'000;
constexpr int kInFlightMax = 4;
constexpr int kStepCount = 30;
constexpr int kCheckerCount = 2;
// More than a life writes, and each life is on a day of its own.
constexpr uint64_t kWriteBytesPerDayMax = 64 << 20;
constexpr int kFirstDay = 20'000;

NvmeOptions OptionsOf(const std::string& root, int day) {
  return {.dir = root + "/nvme",
          .capacity_bytes = kCapacityBytes,
          .segment_bytes = kSegmentBytes,
          // Threads that are cheap to start; the order of writes is the same.
          .io_engine = NvmeIoEngine::kPread,
          .queue_depth = 4,
          .write_bytes_per_day_max = kWriteBytesPerDayMax,
          .now = [day] { return absl::FromUnixSeconds(day * int64_t{24 * 60 * 60}); }};
}

// One write of a key; the bytes differ from those of its other versions.
struct Version {
  std::shared_ptr<const TestBlock> block;
  bool is_acknowledged = false;
  bool is_freed = false;
};
// By key, oldest first.
using Ledger = std::map<Key, std::vector<Version>>;

// What the disk holds, and what the world was told, at one moment.
struct Moment {
  nvme::DiskState disk;
  Ledger ledger;
  int day = 0;
  // Written on that day and acknowledged.
  uint64_t written_bytes = 0;
};

// The versions that a tier may find: not older than the last that was acknowledged.
void CheckFound(const Ledger& ledger, const std::map<Key, BlockMeta>& found) {
  for (const auto& [key, versions] : ledger) {
    size_t oldest_idx = 0;
    for (size_t i = 0; i < versions.size(); ++i) {
      if (versions[i].is_acknowledged) oldest_idx = i;
    }
    const auto at = found.find(key);
    if (at == found.end()) {
      ASSERT_TRUE(versions.empty() || !versions[oldest_idx].is_acknowledged ||
                  versions[oldest_idx].is_freed)
          << "an acknowledged block is gone";
      continue;
    }
    const bool is_known =
        std::any_of(versions.begin() + static_cast<ptrdiff_t>(oldest_idx), versions.end(),
                    [&](const Version& version) { return version.block->meta == at->second; });
    ASSERT_TRUE(is_known) << "a version that was overwritten, or that nobody wrote, is back";
  }
  for (const auto& [key, meta] : found) ASSERT_TRUE(ledger.contains(key)) << "nobody's block";
}

const Version& VersionOf(const Ledger& ledger, const BlockMeta& meta) {
  const std::vector<Version>& versions = ledger.at(meta.key);
  return *std::find_if(versions.begin(), versions.end(),
                       [&](const Version& version) { return version.block->meta == meta; });
}

// Nothing that the tier does not know.
void CheckFiles(const NvmeOptions& options, bool is_rebuilt) {
  std::set<std::string> known = {"LOCK", "probe", "index", "segments", "written"};
  if (is_rebuilt) known.insert("index.damaged-1");
  for (const auto& entry : fs::directory_iterator(options.dir)) {
    ASSERT_TRUE(known.contains(entry.path().filename().string())) << entry.path();
  }
  for (const auto& entry : fs::directory_iterator(options.dir + "/segments")) {
    ASSERT_EQ(entry.path().extension(), ".seg") << entry.path();
  }
}

// It is there as a whole, or not.
void CheckSpentFile(const NvmeOptions& options) {
  const std::string path = options.dir + "/written";
  if (!fs::exists(path)) return;
  const std::string bytes = ReadFile(path);
  const auto spent = nvme::ParseSpentFile(std::as_bytes(std::span(bytes)));
  ASSERT_TRUE(spent.ok()) << spent.status();
}

uint64_t SegmentFileCount(const NvmeOptions& options) {
  const fs::directory_iterator files(options.dir + "/segments");
  return static_cast<uint64_t>(std::distance(begin(files), end(files)));
}

void CheckTier(const std::string& root, const Moment& moment) {
  const NvmeOptions options = OptionsOf(root, moment.day);
  const Ledger& ledger = moment.ledger;
  ASSERT_NO_FATAL_FAILURE(CheckSpentFile(options));
  auto tier = NvmeTier::Create(options);
  ASSERT_TRUE(tier.ok()) << tier.status();
  std::map<Key, BlockMeta> found;
  std::map<Key, ReplicaId> replicas;
  const absl::Status recovered = (*tier)->Recover([&](const BlockMeta& meta, ReplicaId replica) {
    EXPECT_TRUE(found.emplace(meta.key, meta).second) << "found twice";
    replicas[meta.key] = replica;
  });
  ASSERT_TRUE(recovered.ok()) << recovered;
  const NvmeStats stats = (*tier)->Stats();
  // Only while the index is made for the first time may it be half there.
  EXPECT_TRUE(!stats.is_rebuilt || ledger.empty()) << "the loss made the index unreadable";
  ASSERT_NO_FATAL_FAILURE(CheckFound(ledger, found));
  ASSERT_GE(stats.written_today_bytes, moment.written_bytes) << "the budget grew";
  uint64_t used_bytes = 0;
  uint64_t live_bytes = 0;
  for (const auto& [key, meta] : found) {
    const TestBlock& block = *VersionOf(ledger, meta).block;
    ASSERT_EQ(ReadAndCompare(**tier, replicas.at(key), block), absl::OkStatus());
    used_bytes += (*tier)->FootprintBytes(meta.payload_bytes);
    live_bytes += nvme::RecordBytes(meta.payload_bytes);
  }
  ASSERT_EQ((*tier)->Usage().used_bytes, used_bytes);
  // A segment may be emptied from the start on: what moves counts twice on its way, and needs a
  // segment, which is counted before its file is there.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  const auto is_settled = [&] {
    const NvmeStats now = (*tier)->Stats();
    return now.live_bytes == live_bytes && now.segment_count == SegmentFileCount(options);
  };
  while (!is_settled()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline)
        << (*tier)->Stats().live_bytes << " bytes instead of " << live_bytes << ", "
        << SegmentFileCount(options) << " segment files, " << (*tier)->Stats().segment_count
        << " counted";
    std::this_thread::yield();
  }
  // Nothing is being replaced then.
  (*tier)->Close();
  ASSERT_NO_FATAL_FAILURE(CheckFiles(options, stats.is_rebuilt));
}

// One use of a tier: random steps in `root`, every sync of which becomes a Moment.
class Life {
 public:
  Life(const std::string& root, int day, Ledger ledger, uint64_t seed)
      : day_(day),
        options_(OptionsOf(root, day)),
        random_(seed),
        next_seed_(seed),
        ledger_(std::move(ledger)),
        storage_(root, [this](const nvme::DiskState& disk)
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(storage_.mutex()) { Remember(disk); }) {
    options_.storage = &storage_;
  }

  void Run() {
    ASSERT_NO_FATAL_FAILURE(Open());
    for (int step = 0; step < kStepCount; ++step) {
      const uint64_t choice = random_() % 40;
      if (choice < 26) {
        ASSERT_NO_FATAL_FAILURE(Put());
      } else if (choice < 34) {
        FreeOne();
      } else if (choice < 39) {
        AwaitWrites(0);
      } else {
        AwaitWrites(0);
        ASSERT_NO_FATAL_FAILURE(Open());
      }
    }
    AwaitWrites(0);
    moved_bytes_ += tier_->Stats().moved_bytes;
    tier_.reset();
  }

  std::vector<Moment> TakeMoments() { return std::move(moments_); }
  uint64_t moved_bytes() const { return moved_bytes_; }

 private:
  void Remember(const nvme::DiskState& disk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(storage_.mutex()) {
    moments_.push_back(
        {.disk = disk, .ledger = ledger_, .day = day_, .written_bytes = written_bytes_});
  }

  void Open() {
    if (tier_ != nullptr) moved_bytes_ += tier_->Stats().moved_bytes;
    tier_.reset();
    auto tier = NvmeTier::Create(options_);
    ASSERT_TRUE(tier.ok()) << tier.status();
    tier_ = std::move(tier).value();
    Ledger found;
    live_.clear();
    const absl::Status recovered = tier_->Recover([&](const BlockMeta& meta, ReplicaId replica) {
      absl::MutexLock lock(&storage_.mutex());
      found[meta.key] = {{.block = VersionOf(ledger_, meta).block, .is_acknowledged = true}};
      live_[meta.key] = replica;
    });
    ASSERT_TRUE(recovered.ok()) << recovered;
    // What is found is there to stay; what is not is gone for ever.
    absl::MutexLock lock(&storage_.mutex());
    ledger_ = std::move(found);
  }

  void Put() {
    AwaitWrites(kInFlightMax - 1);
    const uint64_t seed = next_seed_++;
    const auto payload_bytes = static_cast<uint32_t>(1 + random_() % kPayloadBytesMax);
    auto block = std::make_shared<TestBlock>(MakeBlock(seed, payload_bytes));
    block->meta.key = MakeBlock(random_() % kKeyCount, 1).meta.key;
    const Key key = block->meta.key;
    {
      absl::MutexLock lock(&storage_.mutex());
      if (live_.contains(key) || writing_.contains(key)) return;
    }
    const auto replica = tier_->Reserve(payload_bytes, 1);
    if (!replica.ok()) {
      ASSERT_EQ(replica.status().code(), absl::StatusCode::kResourceExhausted);
      FreeOne();
      return;
    }
    {
      absl::MutexLock lock(&storage_.mutex());
      writing_.insert(key);
      ledger_[key].push_back({.block = block});
    }
    tier_->Write(
        *replica, block->meta, block->payload.bytes(),
        [this, key, replica = *replica](absl::Status status) { EndPut(key, replica, status); });
  }

  void EndPut(const Key& key, ReplicaId replica, const absl::Status& status) {
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    if (!status.ok()) tier_->Free(replica);
    absl::MutexLock lock(&storage_.mutex());
    writing_.erase(key);
    if (!status.ok()) return;
    ledger_[key].back().is_acknowledged = true;
    written_bytes_ += nvme::RecordBytes(ledger_[key].back().block->meta.payload_bytes);
    live_[key] = replica;
  }

  void FreeOne() {
    ReplicaId replica = kNoReplica;
    {
      absl::MutexLock lock(&storage_.mutex());
      if (live_.empty()) return;
      const auto at = std::next(live_.begin(), static_cast<ptrdiff_t>(random_() % live_.size()));
      replica = at->second;
      ledger_[at->first].back().is_freed = true;
      live_.erase(at);
    }
    tier_->Free(replica);
  }

  void AwaitWrites(size_t count_max) {
    const auto is_done = [&] { return writing_.size() <= count_max; };
    absl::MutexLock lock(&storage_.mutex());
    storage_.mutex().Await(absl::Condition(&is_done));
  }

  const int day_;
  NvmeOptions options_;
  std::mt19937_64 random_;
  uint64_t next_seed_;
  uint64_t moved_bytes_ = 0;
  // Guarded by the storage's mutex while the tier is open.
  Ledger ledger_;
  uint64_t written_bytes_ = 0;
  std::map<Key, ReplicaId> live_;
  std::set<Key> writing_;
  std::vector<Moment> moments_;
  nvme::RecordingStorage storage_;
  std::unique_ptr<NvmeTier> tier_;
};

nvme::PowerLoss RandomLoss(std::mt19937_64& random) {
  return static_cast<nvme::PowerLoss>(random() % nvme::kPowerLossCount);
}

// The power goes off at each of these moments.
void CheckMoments(const std::vector<Moment>& moments, uint64_t seed) {
  std::atomic<size_t> next = 0;
  std::vector<std::jthread> checkers;
  for (int i = 0; i < kCheckerCount; ++i) {
    checkers.emplace_back([&] {
      for (size_t idx; (idx = next++) < moments.size();) {
        std::mt19937_64 random(seed + idx);
        const TempFolder folder;
        const nvme::PowerLoss loss = RandomLoss(random);
        moments[idx].disk.WriteAfterLoss(folder.path(), loss, random);
        CheckTier(folder.path(), moments[idx]);
        if (testing::Test::HasFailure()) {
          ADD_FAILURE() << "moment " << idx << ", loss " << static_cast<int>(loss);
          return;
        }
      }
    });
  }
}

TEST(NvmePowerLossTest, LosesNothingAcknowledgedAtAnySync) {
  KeepTestFilesInMemory();
  const char* const count_text = std::getenv("KVTIER_POWER_LOSSES");
  const uint64_t loss_count_min =
      count_text != nullptr ? std::strtoull(count_text, nullptr, 10) : KVTIER_POWER_LOSSES_DEFAULT;
  std::mt19937_64 random(TestSeed());
  uint64_t loss_count = 0;
  int life_count = 0;
  uint64_t moved_bytes = 0;
  auto root = std::make_unique<TempFolder>();
  Ledger ledger;
  while (loss_count < loss_count_min) {
    Life life(root->path(), kFirstDay + life_count, std::move(ledger), random());
    ASSERT_NO_FATAL_FAILURE(life.Run()) << "life " << life_count;
    const std::vector<Moment> moments = life.TakeMoments();
    CheckMoments(moments, random());
    ASSERT_FALSE(testing::Test::HasFailure()) << "life " << life_count;
    loss_count += moments.size();
    moved_bytes += life.moved_bytes();
    ++life_count;
    // The next life starts with what one of the losses left.
    const Moment& moment = moments[random() % moments.size()];
    root = std::make_unique<TempFolder>();
    moment.disk.WriteAfterLoss(root->path(), RandomLoss(random), random);
    ledger = moment.ledger;
  }
  std::printf("%llu power losses in %d lives, %llu bytes moved\n",
              static_cast<unsigned long long>(loss_count), life_count,
              static_cast<unsigned long long>(moved_bytes));
  // A few lives may end before a segment has to be emptied.
  EXPECT_TRUE(moved_bytes > 0 || life_count < 20);
}

}  // namespace
}  // namespace kvtier
