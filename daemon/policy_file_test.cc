// SPDX-License-Identifier: Apache-2.0
#include "daemon/policy_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tiers/memory/memory_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

constexpr uint32_t kBytes = 4096;
constexpr std::chrono::hours kNever(1);

// A store whose policy learns.
class LearningStore {
 public:
  LearningStore()
      : hbm_(Tier(TierId::kHbm)),
        host_(Tier(TierId::kHost)),
        store_(*Store::Open({.core = {}, .eviction = policy::EvictionKind::kHazard},
                            {.hbm = hbm_.get(), .host = host_.get(), .nvme = nullptr})) {}

  Store* get() { return store_.get(); }

  std::string Learned() {
    return store_->Run(
        [](core::StoreCore& core, core::TimeMs, core::Effects*) { return core.SavePolicy(); });
  }

  // Blocks used again and again.
  void Learn() {
    store_->Run([](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      const core::SessionId session = *core.OpenSession(0, now_ms);
      const core::NamespaceIdx ns =
          *core.OpenNamespace(session, {.hash = {}, .layout = {}, .block_bytes = kBytes});
      std::vector<Key> keys;
      for (uint64_t i = 0; i < 8; ++i) keys.push_back(MakeBlock(i + 1, kBytes).meta.key);
      core.Reserve(
          session, ns, std::nullopt, keys, TierId::kHost, now_ms, now_ms, [](const auto&) {},
          effects);
      const std::vector<uint32_t> crc32cs(keys.size(), 0);
      ASSERT_TRUE(core.Commit(session, ns, keys, crc32cs, now_ms, effects).ok());
      for (core::TimeMs later = 0; later < 100'000; later += 1000) {
        core.Acquire(
            session, ns, keys, now_ms + later, now_ms + later, [](const auto&) {}, effects);
      }
      core.EndSession(session, now_ms, effects);
    });
  }

 private:
  static std::unique_ptr<MemoryTier> Tier(TierId id) {
    return *MemoryTier::Create({.id = id, .capacity_bytes = 1 << 20, .segment_bytes = 1 << 20});
  }

  const std::unique_ptr<MemoryTier> hbm_;
  const std::unique_ptr<MemoryTier> host_;
  const std::unique_ptr<Store> store_;
};

class PolicyFileTest : public testing::Test {
 protected:
  std::string Bytes() const {
    std::ifstream file(path_, std::ios::binary);
    std::stringstream bytes;
    bytes << file.rdbuf();
    return bytes.str();
  }

  const TempFolder folder_;
  const std::string path_ = folder_.path() + "/policy";
};

TEST_F(PolicyFileTest, WhatWasLearnedOutlivesTheStore) {
  std::string learned;
  {
    LearningStore store;
    const std::string untaught = store.Learned();
    const PolicyFile file(path_, store.get(), kNever);
    store.Learn();
    learned = store.Learned();
    ASSERT_NE(learned, untaught);
    EXPECT_EQ(Bytes(), "") << "not kept yet";
  }
  EXPECT_EQ(Bytes(), learned);
  struct stat status{};
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);

  LearningStore store;
  const PolicyFile file(path_, store.get(), kNever);
  EXPECT_EQ(store.Learned(), learned);
}

TEST_F(PolicyFileTest, ADamagedFileCostsWhatWasLearned) {
  {
    LearningStore store;
    const PolicyFile file(path_, store.get(), kNever);
    store.Learn();
  }
  const std::string whole = Bytes();
  for (size_t at = 0; at < whole.size(); at += whole.size() / 20 + 1) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x20);
    std::ofstream(path_, std::ios::binary) << (at % 2 == 0 ? damaged : whole.substr(0, at));
    LearningStore store;
    const std::string untaught = store.Learned();
    PolicyFile file(path_, store.get(), kNever);
    EXPECT_EQ(store.Learned(), untaught) << at;
    // And is replaced by what is learned now.
    store.Learn();
    EXPECT_TRUE(file.Keep().ok());
    EXPECT_EQ(Bytes(), store.Learned());
  }
}

TEST_F(PolicyFileTest, AFileThatCannotBeWrittenIsAnErrorAndNothingElse) {
  LearningStore store;
  PolicyFile file(folder_.path() + "/missing/policy", store.get(), kNever);
  store.Learn();
  EXPECT_FALSE(file.Keep().ok());
  std::filesystem::create_directory(folder_.path() + "/missing");
  EXPECT_TRUE(file.Keep().ok());
}

TEST_F(PolicyFileTest, ADirectoryInItsPlaceIsNoFile) {
  std::filesystem::create_directory(path_);
  LearningStore store;
  PolicyFile file(path_, store.get(), kNever);
  store.Learn();
  EXPECT_FALSE(file.Keep().ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
}

}  // namespace
}  // namespace kvtier
