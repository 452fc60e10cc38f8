// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/index_log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "tiers/nvme/block_index.h"
#include "tiers/tier_test_util.h"

namespace kvtier::nvme {
namespace {

namespace fs = std::filesystem;

// A log that RocksDB wrote: three writes, the last of more than a block.
class IndexLogTest : public testing::Test {
 protected:
  IndexLogTest() {
    auto index = BlockIndex::Open({.path = folder_.path() + "/index"});
    EXPECT_TRUE(index.ok()) << index.status();
    for (const uint64_t count : {1, 3, 400}) {
      ends_.push_back(fs::file_size(LogPath()));
      std::vector<IndexEntry> entries;
      for (uint64_t i = 0; i < count; ++i) {
        entries.push_back({.meta = MakeBlock(count * 1000 + i, 100).meta, .at = {}});
      }
      EXPECT_TRUE((*index)->Apply(entries, {}).ok());
    }
    std::ifstream file(LogPath(), std::ios::binary);
    log_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    EXPECT_GT(log_.size(), ends_.back() + (64U << 10));
  }

  std::string LogPath() const {
    for (const auto& entry : fs::directory_iterator(folder_.path() + "/index")) {
      if (entry.path().extension() == ".log") return entry.path().string();
    }
    return "";
  }
  static LogState StateOf(const std::string& log) {
    return ExamineLog(std::as_bytes(std::span(log))).state;
  }

  TempFolder folder_;
  std::string log_;
  std::vector<uint64_t> ends_;  // where each write starts
};

TEST_F(IndexLogTest, KnowsAWholeLog) {
  EXPECT_EQ(StateOf(log_), LogState::kWhole);
  EXPECT_EQ(StateOf(""), LogState::kWhole);
  for (const uint64_t end : ends_) EXPECT_EQ(StateOf(log_.substr(0, end)), LogState::kWhole);
}

TEST_F(IndexLogTest, ALastWriteInPiecesIsTorn) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    std::string torn = log_;
    bool is_changed = false;
    for (uint64_t at = ends_.back(); at < torn.size(); at += 512) {
      if (random() % 2 == 0) continue;
      torn.replace(at, std::min<uint64_t>(512, torn.size() - at), 512, '\0');
      is_changed = true;
    }
    ASSERT_EQ(StateOf(torn.substr(0, log_.size())),
              is_changed ? LogState::kTorn : LogState::kWhole);
    const uint64_t cut = ends_.back() + 1 + random() % (log_.size() - ends_.back() - 1);
    ASSERT_EQ(StateOf(log_.substr(0, cut)), LogState::kTorn) << cut;
  }
}

TEST_F(IndexLogTest, AFlippedByteBeforeTheLastWriteIsDamage) {
  for (uint64_t at = 0; at < ends_.back(); ++at) {
    std::string damaged = log_;
    damaged[at] ^= 1;
    ASSERT_EQ(StateOf(damaged), LogState::kDamaged) << at;
  }
}

TEST_F(IndexLogTest, ATornLogMayBeFollowedOnlyByWhatRocksDbWroteAfterIt) {
  const auto state_of = [&](const std::string& first, const std::string& second) {
    const TempFolder folder;
    std::ofstream(folder.path() + "/000008.log", std::ios::binary) << first;
    std::ofstream(folder.path() + "/000012.log", std::ios::binary) << second;
    return StateOfLogs(folder.path());
  };
  const std::string torn = log_.substr(0, log_.size() - 1);
  EXPECT_EQ(state_of(log_, ""), LogState::kWhole);
  EXPECT_EQ(state_of(torn, ""), LogState::kTorn);
  EXPECT_EQ(state_of("", torn), LogState::kTorn);
  // The second log repeats the first: its numbers do not follow.
  EXPECT_EQ(state_of(torn, log_), LogState::kDamaged);
  // The torn write is made again.
  EXPECT_EQ(state_of(log_.substr(0, ends_.back() + 100), log_.substr(ends_.back())),
            LogState::kTorn);
}

// Of a write of more than a sector, the first or the second half did not reach the disk.
TEST(TornManifestTest, IsCutWhereTheLastWholeWriteEnds) {
  const TempFolder folder;
  const std::string path = folder.path() + "/index";
  ASSERT_TRUE(BlockIndex::Open({.path = path}).ok());
  std::string name;
  std::ifstream(path + "/CURRENT") >> name;
  const uint64_t whole_bytes = fs::file_size(path + "/" + name);
  for (const size_t lost_from : {7U, 500U}) {
    std::string write(1000, 'x');
    write.replace(0, 7, std::string("\x01\x02\x03\x04\xE1\x03\x01", 7));
    write.replace(lost_from, 400, 400, '\0');
    std::ofstream(path + "/" + name, std::ios::binary | std::ios::app) << write;
    ASSERT_EQ(fs::file_size(path + "/" + name), whole_bytes + write.size());
    CutTornManifest(path);
    ASSERT_EQ(fs::file_size(path + "/" + name), whole_bytes);
  }
  std::ofstream(path + "/" + name, std::ios::binary | std::ios::app)
      << std::string("\x01\x02\x03\x04\x01\x00\x01y", 8);
  const auto index = BlockIndex::Open({.path = path});
  EXPECT_TRUE(index.ok()) << index.status();
}

TEST(TornManifestTest, DamageBeforeTheEndIsLeftForRocksDb) {
  const TempFolder folder;
  const std::string path = folder.path() + "/index";
  ASSERT_TRUE(BlockIndex::Open({.path = path}).ok());
  std::string name;
  std::ifstream(path + "/CURRENT") >> name;
  const std::string manifest_path = path + "/" + name;
  const uint64_t whole_bytes = fs::file_size(manifest_path);
  std::fstream(manifest_path, std::ios::binary | std::ios::in | std::ios::out).seekp(20) << '\xFF';
  CutTornManifest(path);
  EXPECT_EQ(fs::file_size(manifest_path), whole_bytes);
  EXPECT_FALSE(BlockIndex::Open({.path = path}).ok());
}

}  // namespace
}  // namespace kvtier::nvme
