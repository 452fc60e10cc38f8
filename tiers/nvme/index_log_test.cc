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

}  // namespace
}  // namespace kvtier::nvme
