// SPDX-License-Identifier: Apache-2.0
//
// A daemon whose disk fails as it is told to (nvme.fault_injection), and the power that goes off.
//   fault_injection_test KVTIERD
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "client/src/admin_client.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::testing {
namespace {

using std::chrono::milliseconds;

std::string g_kvtierd;

class FaultInjectionTest : public ::testing::Test {
 protected:
  // Blocks of which memory holds a part.
  static constexpr uint32_t kChainCount = 50;
  static constexpr size_t kChainBlocks = 8;

  FaultInjectionTest()
      : daemon_(g_kvtierd, {"--hbm.capacity_bytes=1MiB", "--hbm.segment_bytes=256KiB",
                            "--host.capacity_bytes=1MiB", "--host.segment_bytes=256KiB",
                            "--nvme.capacity_bytes=64MiB", "--nvme.segment_bytes=4MiB"}) {}

  void Start(const std::string& rules) {
    setenv("KVTIER_NVME_FAULT_INJECTION", rules.c_str(), /*overwrite=*/1);
    const absl::Status started = daemon_.Start();
    unsetenv("KVTIER_NVME_FAULT_INJECTION");
    ASSERT_TRUE(started.ok()) << started;
    client_ = *daemon_.Connect();
    ns_ = *client_->RegisterLayout(SmallLayout());
  }
  std::vector<Key> ChainOf(uint32_t chain) const {
    return MakeChain(ns_, 100 + chain, kChainBlocks);
  }
  // Other blocks in each round.
  absl::Status PutAll(uint32_t round = 0) {
    for (uint32_t chain = 0; chain < kChainCount; ++chain) {
      const auto taken = PutChain(client_.get(), ns_, ChainOf(round * kChainCount + chain));
      if (!taken.ok()) return taken.status();
    }
    return absl::OkStatus();
  }
  ReadBack CheckAll() {
    ReadBack sum;
    for (uint32_t chain = 0; chain < kChainCount; ++chain) {
      const auto read = CheckChain(client_.get(), ns_, ChainOf(chain));
      EXPECT_TRUE(read.ok()) << read.status();
      if (!read.ok()) break;
      sum.right += read->right;
      sum.missing += read->missing;
      sum.wrong += read->wrong;
    }
    return sum;
  }
  v1::TierStats Nvme() const {
    const auto tiers = client::AdminClient({.run_dir = daemon_.run_dir()}).GetTiers();
    EXPECT_TRUE(tiers.ok()) << tiers.status();
    for (const v1::TierStats& tier : tiers->tiers()) {
      if (tier.tier() == v1::TIER_NVME) return tier;
    }
    return {};
  }
  absl::Status Flush() const {
    return client::AdminClient({.run_dir = daemon_.run_dir()}).Flush().status();
  }
  bool HasLogged(const std::string& text) const {
    return daemon_.Log().find(text) != std::string::npos;
  }

  DaemonProcess daemon_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
};

TEST_F(FaultInjectionTest, AfterAFailedWriteTheTierDegradesSaysSoAndHeals) {
  // Behind the zeros and the header of the first segment.
  ASSERT_NO_FATAL_FAILURE(Start("write 20 EIO"));
  EXPECT_TRUE(HasLogged("nvme fails as it is told to"));
  ASSERT_TRUE(PutAll().ok());
  EXPECT_TRUE(Eventually(milliseconds(20'000), [&] { return HasLogged("nvme: degraded: "); }));
  EXPECT_TRUE(HasLogged("Input/output error"));
  EXPECT_TRUE(Eventually(milliseconds(20'000), [&] { return !Nvme().degraded(); }));
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return HasLogged("nvme: healthy again"); }));
  EXPECT_EQ(CheckAll().wrong, 0U);
  ASSERT_TRUE(PutAll().ok());
  ASSERT_TRUE(Flush().ok());
  daemon_.Kill9();
  ASSERT_NO_FATAL_FAILURE(Start(""));
  const ReadBack read = CheckAll();
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_EQ(read.right, kChainCount * kChainBlocks);
}

TEST_F(FaultInjectionTest, ACorruptReadIsAMiss) {
  ASSERT_NO_FATAL_FAILURE(Start(""));
  ASSERT_TRUE(PutAll().ok());
  ASSERT_TRUE(Flush().ok());
  daemon_.Kill9();
  ASSERT_NO_FATAL_FAILURE(Start("read 3 corrupt; read 7-9 short"));
  const ReadBack read = CheckAll();
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_GE(read.missing, 4U);
  EXPECT_GE(read.right, (kChainCount - 4) * kChainBlocks);
  EXPECT_EQ(Nvme().corrupt_block_count(), 4U);
}

TEST_F(FaultInjectionTest, AfterAPowerLossNothingIsWrong) {
  // A start alone takes some.
  ASSERT_NO_FATAL_FAILURE(Start("sync 60 power-off"));
  // The daemon ends in the middle of it.
  uint32_t round = 0;
  while (PutAll(round).ok()) ASSERT_LT(++round, 100U) << daemon_.Log();
  const std::filesystem::path dir = daemon_.data_dir() + "/nvme";
  const std::filesystem::path left = dir.string() + ".after-power-loss";
  ASSERT_TRUE(Eventually(milliseconds(20'000), [&] { return std::filesystem::exists(left); }));
  ASSERT_EQ(*daemon_.WaitForEnd(milliseconds(20'000)), 137) << daemon_.Log();
  std::filesystem::remove_all(dir);
  std::filesystem::rename(left, dir);
  ASSERT_NO_FATAL_FAILURE(Start(""));
  EXPECT_EQ(CheckAll().wrong, 0U);
  ASSERT_TRUE(PutAll().ok());
  EXPECT_EQ(CheckAll().right, kChainCount * kChainBlocks);
}

TEST_F(FaultInjectionTest, AnUnknownFaultIsOneLine) {
  setenv("KVTIER_NVME_FAULT_INJECTION", "write 1 EPERM", /*overwrite=*/1);
  const auto status = daemon_.RunToEnd(milliseconds(20'000));
  unsetenv("KVTIER_NVME_FAULT_INJECTION");
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 2);
  EXPECT_TRUE(HasLogged("nvme.fault_injection: no such fault: \"write 1 EPERM\"")) << daemon_.Log();
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: fault_injection_test KVTIERD\n";
    return 2;
  }
  kvtier::testing::g_kvtierd = argv[1];
  return RUN_ALL_TESTS();
}
