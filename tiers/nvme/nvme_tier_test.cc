// SPDX-License-Identifier: Apache-2.0
//
// What survives a restart, damage on disk, and churn. Faults of a running disk: nvme_fault_test.cc.
#include "tiers/nvme/nvme_tier.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "absl/synchronization/blocking_counter.h"
#include "proto/base/crc32c.h"
#include "tiers/nvme/block_index.h"
#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/record.h"

namespace kvtier {
namespace {

namespace fs = std::filesystem;

TEST_F(NvmeTierTest, FindsEverythingCommittedAfterReopening) {
  Open();
  for (const uint32_t payload_bytes : {1u, 4095u, 4096u, 4097u, 300000u, 900000u}) {
    ASSERT_EQ(Put(payload_bytes), absl::OkStatus());
  }
  PutMany(20, 50000);
  FreeHeld(10);
  FreeHeld(11);
  const uint64_t used_bytes = tier_->Usage().used_bytes;
  for (int round = 0; round < 3; ++round) {
    Open();
    EXPECT_EQ(tier_->Usage().used_bytes, used_bytes);
    EXPECT_EQ(tier_->Stats().recovered_count, held_.size());
    EXPECT_EQ(tier_->Stats().dropped_count, 0u);
    EXPECT_FALSE(tier_->Stats().is_rebuilt);
    ExpectAllReadable();
  }
}

TEST_F(NvmeTierTest, RefusesEverythingBeforeRecoverAndAfterClose) {
  auto tier = NvmeTier::Create(options_);
  ASSERT_TRUE(tier.ok()) << tier.status();
  EXPECT_EQ((*tier)->Reserve(100, 1).status().code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE((*tier)->Recover([](const BlockMeta&, ReplicaId) {}).ok());
  const auto replica = (*tier)->Reserve(100, 1);
  ASSERT_TRUE(replica.ok());
  (*tier)->Close();
  const TestBlock block = MakeBlock(1, 100);
  EXPECT_EQ(WriteAndWait(**tier, *replica, block.meta, block.payload.bytes()).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ((*tier)->Reserve(100, 1).status().code(), absl::StatusCode::kUnavailable);
  (*tier)->Close();
}

TEST_F(NvmeTierTest, CloseFinishesWhatIsQueued) {
  Open();
  constexpr int kCount = 40;
  absl::BlockingCounter pending(kCount);
  std::atomic<int> ok_count = 0;
  for (int i = 0; i < kCount; ++i) {
    const uint64_t seed = next_seed_++;
    TestBlock block = MakeBlock(seed, 60000);
    const auto replica = tier_->Reserve(60000, 1);
    ASSERT_TRUE(replica.ok());
    Held& held = held_.emplace(seed, Held{std::move(block), *replica}).first->second;
    tier_->Write(*replica, held.block.meta, held.block.payload.bytes(), [&](absl::Status status) {
      if (status.ok()) ++ok_count;
      pending.DecrementCount();
    });
  }
  tier_->Close();
  pending.Wait();
  EXPECT_EQ(ok_count, kCount);
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeTierTest, AFlippedByteOnDiskIsDataLoss) {
  Open();
  PutMany(3, 9000);
  const TestBlock& block = held_.at(2).block;
  std::string path;
  const uint64_t record_bytes = FindRecord(block.meta, path);
  for (const uint64_t offset_bytes : {0u, 20u, 40u, 100u, 165u, 170u, 4095u, 4096u, 13095u}) {
    FlipByte(path, record_bytes + offset_bytes);
    EXPECT_EQ(ReadAndCompare(*tier_, held_.at(2).replica, block).code(),
              absl::StatusCode::kDataLoss)
        << offset_bytes;
    FlipByte(path, record_bytes + offset_bytes);
    EXPECT_EQ(ReadAndCompare(*tier_, held_.at(2).replica, block), absl::OkStatus());
  }
  EXPECT_FALSE(tier_->Health().degraded);
}

TEST_F(NvmeTierTest, ATruncatedSegmentLosesOnlyWhatWasCutOff) {
  Open();
  PutMany(8, 50000);
  std::string path;
  const uint64_t cut_bytes = FindRecord(held_.at(5).block.meta, path) + 4096 + 100;
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(cut_bytes)), 0);
  EXPECT_EQ(ReadAndCompare(*tier_, held_.at(5).replica, held_.at(5).block).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadAndCompare(*tier_, held_.at(4).replica, held_.at(4).block), absl::OkStatus());
  Open(/*is_exact=*/false);
  EXPECT_EQ(held_.size(), 4u);
  EXPECT_EQ(tier_->Stats().dropped_count, 4u);
  ExpectAllReadable();
  // The file is made whole before it is used again.
  while (Put(200000).ok()) {
  }
  EXPECT_FALSE(tier_->Health().degraded);
  ExpectAllReadable();
}

TEST_F(NvmeTierTest, AnOlderRecordOfTheSameBlockIsNeverServed) {
  Open();
  ASSERT_EQ(Put(5000), absl::OkStatus());
  TestBlock block = MakeBlock(1, 5000);
  std::string path;
  const uint64_t old_bytes = FindRecord(block.meta, path);
  const std::string old_record = ReadFile(path).substr(old_bytes, 3 * 4096);
  FreeHeld(1);
  const auto replica = tier_->Reserve(5000, 1);
  ASSERT_TRUE(replica.ok());
  ASSERT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
  // A write that the disk lost would leave this: an intact record of the same key and bytes.
  std::string bytes = ReadFile(path);
  const size_t new_bytes = bytes.rfind(block.meta.key.AsBytes()) - 64;
  ASSERT_NE(new_bytes, old_bytes);
  bytes.replace(new_bytes, old_record.size(), old_record);
  WriteFile(path, bytes);
  EXPECT_EQ(ReadAndCompare(*tier_, *replica, block).code(), absl::StatusCode::kDataLoss);
}

TEST_F(NvmeTierTest, DropsEntriesOfSegmentsThatWereActivatedAgain) {
  Open();
  PutMany(2, 5000);
  Close();
  {
    auto index = nvme::BlockIndex::Open({.path = options_.dir + "/index"});
    ASSERT_TRUE(index.ok()) << index.status();
    const auto entry_at = [](uint64_t seed, uint32_t segment_idx, uint64_t sequence,
                             uint64_t offset_bytes) {
      return nvme::IndexEntry{.meta = MakeBlock(seed, 5000).meta,
                              .at = {.segment_idx = segment_idx,
                                     .offset_bytes = offset_bytes,
                                     .generation = nvme::GenerationOf(sequence, offset_bytes)}};
    };
    const std::vector<nvme::IndexEntry> bad = {
        entry_at(101, 0, 999, 4096),    // another activation
        entry_at(102, 77, 1, 4096),     // no such segment
        entry_at(103, 0, 1, 1 << 20),   // behind the end
        entry_at(104, 0, 1, 0),         // the segment's header
        entry_at(105, 0, 1, 2 * 4096),  // inside another record
    };
    ASSERT_TRUE((*index)->Apply(bad, {}).ok());
  }
  Open();
  EXPECT_EQ(tier_->Stats().dropped_count, 5u);
  ExpectAllReadable();
  Open();
  EXPECT_EQ(tier_->Stats().dropped_count, 0u) << "they come back";
}

TEST_F(NvmeTierTest, AKeyWrittenAgainCountsOnce) {
  Open();
  const TestBlock block = MakeBlock(500, 5000);
  ReplicaId replicas[2];
  for (ReplicaId& replica : replicas) {
    const auto reserved = tier_->Reserve(5000, 1);
    ASSERT_TRUE(reserved.ok());
    replica = *reserved;
    ASSERT_EQ(WriteAndWait(*tier_, replica, block.meta, block.payload.bytes()), absl::OkStatus());
  }
  tier_->Free(replicas[0]);
  EXPECT_EQ(ReadAndCompare(*tier_, replicas[1], block), absl::OkStatus());
  Close();
  held_.emplace(500, Held{MakeBlock(500, 5000), kNoReplica});
  Open();
  EXPECT_EQ(tier_->Usage().used_bytes, tier_->FootprintBytes(5000));
  ExpectAllReadable();
  FreeHeld(500);
  Open();
}

class NvmeDamagedIndexTest : public NvmeTierTest {
 protected:
  // Blocks, some of them freed or written again, moved and in recycled segments; an index with
  // table files; closed.
  void Fill() {
    Open();
    PutMany(12, 100000);
    for (int round = 0; round < 40; ++round) {
      FreeHeld(held_.begin()->first);
      ASSERT_EQ(Put(100000), absl::OkStatus());
    }
    Open();
    Close();
  }
  // Everything is found again, with its bytes; freed blocks may be.
  void ExpectRebuilt() {
    const size_t held_count = held_.size();
    Open(/*is_exact=*/false);
    ASSERT_NE(tier_, nullptr);
    EXPECT_TRUE(tier_->Stats().is_rebuilt);
    EXPECT_EQ(held_.size(), held_count);
    EXPECT_LE(tier_->Usage().used_bytes, tier_->Usage().capacity_bytes);
    ExpectAllReadable();
    Open();
    EXPECT_FALSE(tier_->Stats().is_rebuilt);
    ExpectAllReadable();
  }
  std::vector<std::string> IndexFiles(const std::string& part) const {
    std::vector<std::string> paths;
    for (const auto& entry : fs::directory_iterator(options_.dir + "/index")) {
      if (entry.path().filename().string().find(part) != std::string::npos) {
        paths.push_back(entry.path().string());
      }
    }
    return paths;
  }
};

TEST_F(NvmeDamagedIndexTest, EmptyCurrentIsRebuilt) {
  Fill();
  WriteFile(options_.dir + "/index/CURRENT", "");
  ExpectRebuilt();
  EXPECT_TRUE(fs::exists(options_.dir + "/index.damaged-1"));
}

TEST_F(NvmeDamagedIndexTest, KeepsTheLastDamagedIndexOnly) {
  Fill();
  const std::string aside = options_.dir + "/index.damaged-";
  for (int i = 1; i <= 3; ++i) {
    SCOPED_TRACE(i);
    WriteFile(options_.dir + "/index/CURRENT", "");
    Open(/*is_exact=*/false);
    ASSERT_TRUE(tier_->Stats().is_rebuilt);
    EXPECT_TRUE(fs::exists(aside + std::to_string(i)));
    EXPECT_FALSE(fs::exists(aside + std::to_string(i - 1)));
    Close();
  }
  // It was kept, and then became more than there is room for.
  WriteFile(aside + "3/large", std::string(1 << 20, 'x'));
  Open(/*is_exact=*/false);
  EXPECT_FALSE(fs::exists(aside + "3"));
  ExpectAllReadable();
}

TEST_F(NvmeDamagedIndexTest, ALargeFileOfGarbageForTheIdentityIsNotRead) {
  Fill();
  const std::string identity = options_.dir + "/index/IDENTITY";
  WriteFile(identity, std::string(8 << 20, '\xa5'));
  Open();
  EXPECT_FALSE(tier_->Stats().is_rebuilt);
  EXPECT_LT(fs::file_size(identity), 4096U);
  EXPECT_LT(DiskBytes(), options_.capacity_bytes);
  ExpectAllReadable();
  Close();
  WriteFile(options_.dir + "/index/CURRENT", std::string(8 << 20, '\xa5'));
  Open(/*is_exact=*/false);
  EXPECT_TRUE(tier_->Stats().is_rebuilt);
  ExpectAllReadable();
}

TEST_F(NvmeDamagedIndexTest, MissingCurrentIsRebuilt) {
  Fill();
  fs::remove(options_.dir + "/index/CURRENT");
  ExpectRebuilt();
}

TEST_F(NvmeDamagedIndexTest, MissingTableIsRebuilt) {
  Fill();
  const auto tables = IndexFiles(".sst");
  ASSERT_FALSE(tables.empty());
  for (const std::string& table : tables) fs::remove(table);
  ExpectRebuilt();
}

TEST_F(NvmeDamagedIndexTest, CutManifestIsRebuilt) {
  Fill();
  const auto manifests = IndexFiles("MANIFEST");
  ASSERT_FALSE(manifests.empty());
  for (const std::string& manifest : manifests) WriteFile(manifest, "");
  ExpectRebuilt();
}

TEST_F(NvmeDamagedIndexTest, FlippedTableByteIsRebuilt) {
  Fill();
  for (const std::string& table : IndexFiles(".sst")) FlipByte(table, 10);
  ExpectRebuilt();
}

TEST_F(NvmeDamagedIndexTest, FlippedLogByteIsRebuilt) {
  Open();
  PutMany(60, 100000);
  Close();
  bool flipped = false;
  for (const std::string& log : IndexFiles(".log")) {
    const uint64_t log_bytes = fs::file_size(log);
    if (log_bytes < 2000) continue;
    FlipByte(log, log_bytes / 2);
    flipped = true;
  }
  ASSERT_TRUE(flipped);
  ExpectRebuilt();
}

TEST_F(NvmeTierTest, AnEmptyDirectoryTakesAnotherSegmentSize) {
  options_.segment_bytes = 2 << 20;
  Open();
  Close();
  options_.segment_bytes = 1 << 20;
  Open();
  EXPECT_EQ(tier_->Stats().segment_bytes, 1U << 20);
  PutMany(4, 100000);
  Open();
  EXPECT_EQ(tier_->Stats().segment_bytes, 1U << 20);
  ExpectAllReadable();
}

// What a link points to is not ours.
TEST_F(NvmeTierTest, LinksAreNeverFollowed) {
  Open();
  PutMany(4, 100000);
  Close();
  const std::string outside = options_.dir + "-outside";
  WriteFile(outside, "precious");
  const std::string segment = options_.dir + "/segments/000000.seg";
  ASSERT_TRUE(fs::exists(segment));
  fs::remove(segment);
  fs::create_symlink(outside, segment);
  held_.clear();
  Open(/*is_exact=*/false);
  ASSERT_NE(tier_, nullptr);
  PutMany(4, 100000);
  ExpectAllReadable();
  Close();
  EXPECT_EQ(fs::file_size(outside), 8U);
  EXPECT_TRUE(fs::is_symlink(segment + ".foreign"));
  fs::remove(outside);
}

TEST_F(NvmeDamagedIndexTest, MissingIndexIsRebuilt) {
  Fill();
  fs::remove_all(options_.dir + "/index");
  ExpectRebuilt();
}

TEST_F(NvmeDamagedIndexTest, RebuildsWithoutSegmentHeaders) {
  Fill();
  fs::remove_all(options_.dir + "/index");
  for (const std::string& path : SegmentPaths()) FlipByte(path, 9);
  ExpectRebuilt();
}

TEST_F(NvmeDamagedIndexTest, RebuildSkipsDamagedRecordsOnly) {
  Fill();
  const uint64_t seed = std::next(held_.begin(), 5)->first;
  std::string path;
  const uint64_t record_bytes = FindRecord(held_.at(seed).block.meta, path);
  FlipByte(path, record_bytes + 4096 + 77);
  // An older copy that was not overwritten yet would be served rightly: look for this one only.
  fs::remove_all(options_.dir + "/index");
  const size_t held_count = held_.size();
  Open(/*is_exact=*/false);
  EXPECT_GE(held_.size(), held_count - 1);
  ExpectAllReadable();
}

TEST_F(NvmeTierTest, RebuildIsNotFooledByPayloadsThatLookLikeRecords) {
  Open();
  // A tenant writes a record of somebody else's key inside its payload, with everything right that
  // it can know or guess.
  TestBlock forged = MakeBlock(900, 100);
  TestBlock carrier = MakeBlock(901, 4 * 4096);
  const std::span<std::byte> payload = carrier.payload.bytes();
  nvme::EncodeRecordHeader(
      {.meta = forged.meta, .generation = nvme::GenerationOf(1, 3 * 4096), .nonce = 0},
      std::span<std::byte, 4096>(payload.data() + 4096, 4096));
  std::memcpy(payload.data() + 2 * 4096, forged.payload.bytes().data(), 100);
  carrier.meta.crc32c = Crc32c(payload);
  const auto replica = tier_->Reserve(carrier.meta.payload_bytes, 1);
  ASSERT_TRUE(replica.ok());
  ASSERT_EQ(WriteAndWait(*tier_, *replica, carrier.meta, payload), absl::OkStatus());
  ASSERT_EQ(Put(3000), absl::OkStatus());
  Close();
  std::string path;
  FlipByte(path, FindRecord(carrier.meta, path) + 30);
  fs::remove_all(options_.dir + "/index");
  Open();
  EXPECT_EQ(unexpected_count_, 0) << "the forged record was taken for one";
  ExpectAllReadable();
}

TEST_F(NvmeTierTest, RefusesANewerIndexFormat) {
  Open();
  Close();
  {
    auto index = nvme::BlockIndex::Open({.path = options_.dir + "/index"});
    ASSERT_TRUE(index.ok()) << index.status();
    ASSERT_TRUE((*index)->MarkComplete(kTestSegmentBytes, nvme::kFormatVersion + 1).ok());
  }
  const absl::Status status = NvmeTier::Create(options_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.ToString().find("newer"), std::string::npos) << status;
}

TEST_F(NvmeTierTest, RefusesANewerSegmentFormat) {
  Open();
  PutMany(1, 100);
  Close();
  const std::string path = SegmentPath(0);
  std::string bytes = ReadFile(path);
  bytes[8] = nvme::kFormatVersion + 1;
  const auto page = std::as_bytes(std::span(bytes).first(4096));
  const uint32_t crc = Crc32c(page.subspan(48), Crc32c(page.first(44)));
  std::memcpy(&bytes[44], &crc, sizeof(crc));
  WriteFile(path, bytes);
  const absl::Status status = NvmeTier::Create(options_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(ReadFile(path), bytes) << "a refused directory is left as it is";
}

TEST_F(NvmeTierTest, RefusesASecondOwnerAndNamesTheFirst) {
  Open();
  PutMany(1, 100);
  const absl::Status status = NvmeTier::Create(options_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.ToString().find(std::to_string(getpid())), std::string::npos) << status;
  ExpectAllReadable();
}

TEST_F(NvmeTierTest, RefusesBadOptions) {
  const auto code_with = [&](auto change) {
    NvmeOptions options = options_;
    change(options);
    return NvmeTier::Create(options).status().code();
  };
  EXPECT_EQ(code_with([](NvmeOptions& options) { options.dir = ""; }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_with([](NvmeOptions& options) { options.segment_bytes = 4096; }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_with([](NvmeOptions& options) { options.segment_bytes += 1; }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_with([](NvmeOptions& options) { options.queue_depth = 0; }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_with([](NvmeOptions& options) { options.capacity_bytes = 3 << 20; }),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code_with([](NvmeOptions& options) { options.capacity_bytes = 1ULL << 50; }),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(NvmeTierTest, KeepsItsSegmentSizeAndShrinksWithItsCapacity) {
  Open();
  while (Put(100000).ok()) {
  }
  const uint64_t capacity_bytes = tier_->Usage().capacity_bytes;
  options_.segment_bytes = 2 * kTestSegmentBytes;
  options_.capacity_bytes = 10 * kTestSegmentBytes;
  Open(/*is_exact=*/false);
  EXPECT_EQ(tier_->Stats().segment_bytes, kTestSegmentBytes);
  EXPECT_LT(tier_->Usage().capacity_bytes, capacity_bytes);
  EXPECT_LE(tier_->Usage().used_bytes, tier_->Usage().capacity_bytes);
  EXPECT_GE(held_.size(), 30u);
  EXPECT_LE(DiskBytes(), options_.capacity_bytes + kTestSegmentBytes);
  ExpectAllReadable();
  for (int round = 0; round < 30; ++round) {
    FreeHeld(held_.begin()->first);
    ASSERT_EQ(Put(100000), absl::OkStatus());
  }
  ExpectAllReadable();
}

// Ten times the capacity of random sizes through a full tier.
TEST_F(NvmeTierTest, KeepsItsCapAndEveryLiveBlockUnderChurn) {
  std::mt19937_64 random(TestSeed());
  options_.capacity_bytes = 12 * kTestSegmentBytes;
  Open();
  uint64_t written_bytes = 0;
  while (written_bytes < 10 * options_.capacity_bytes) {
    const auto payload_bytes = static_cast<uint32_t>(1 + random() % 300000);
    const absl::Status status = Put(payload_bytes);
    if (status.ok()) {
      written_bytes += payload_bytes;
      continue;
    }
    ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    for (int i = 0; i < 3 && !held_.empty(); ++i) {
      FreeHeld(std::next(held_.begin(), static_cast<ptrdiff_t>(random() % held_.size()))->first);
    }
    ASSERT_LE(DiskBytes(), options_.capacity_bytes + kTestSegmentBytes);
  }
  const NvmeStats stats = tier_->Stats();
  std::printf(
      "moved %.2f bytes a byte written; live %.2f of the capacity\n",
      static_cast<double>(stats.moved_bytes) / static_cast<double>(written_bytes),
      static_cast<double>(stats.live_bytes) / static_cast<double>(tier_->Usage().capacity_bytes));
  EXPECT_GT(stats.moved_bytes, 0u);
  EXPECT_GT(stats.live_bytes, tier_->Usage().capacity_bytes * 8 / 10);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeTierTest, ReclaimsUnderChurnOfOneSize) {
  std::mt19937_64 random(TestSeed());
  Open();
  for (int round = 0; round < 1000; ++round) {
    const absl::Status status = Put(30000);
    if (status.ok()) continue;
    // Equal blocks: what Reserve grants, Write can always place.
    ASSERT_FALSE(tier_->Reserve(30000, 1).ok()) << status;
    FreeHeld(std::next(held_.begin(), static_cast<ptrdiff_t>(random() % held_.size()))->first);
  }
  ExpectAllReadable();
}

}  // namespace
}  // namespace kvtier
