// SPDX-License-Identifier: Apache-2.0
//
// Engines killed at every step leave nothing behind. KVTIER_KILL_ROUNDS sets the number of random
// rounds (10), KVTIER_KILL_SEED their seed.
//   client_kill_test KVTIERD CLIENT_VICTIM
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>

#include "client/src/admin_client.h"
#include "tests/integration/client_victim.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kCleanWithin(5000);

std::string g_kvtierd;
std::string g_victim;

uint64_t NumberFrom(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// All that a client can hold of a daemon.
struct Held {
  uint64_t pinned_bytes = 0;
  uint64_t quarantined_bytes = 0;
  uint64_t lease_count = 0;
  uint64_t pending_fill_count = 0;
  uint64_t session_count = 0;

  friend bool operator==(const Held&, const Held&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Held& held) {
    return out << held.pinned_bytes << " bytes pinned, " << held.quarantined_bytes
               << " quarantined, " << held.lease_count << " leases, " << held.pending_fill_count
               << " fills, " << held.session_count << " sessions";
  }
};

class ClientKillTest : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_ = std::make_unique<DaemonProcess>(
        g_kvtierd,
        std::vector<std::string>{"--hbm.capacity_bytes=2MiB", "--hbm.segment_bytes=256KiB",
                                 "--host.capacity_bytes=2MiB", "--host.segment_bytes=256KiB",
                                 "--nvme.capacity_bytes=64MiB", "--nvme.segment_bytes=4MiB"});
    const absl::Status started = daemon_->Start();
    ASSERT_TRUE(started.ok()) << started;
    admin_ = std::make_unique<client::AdminClient>(
        client::AdminClient::Options{.run_dir = daemon_->run_dir()});
    idle_ = Connect();
    client_ = Connect();
    ns_ = *client_->RegisterLayout(SmallLayout());
    const auto idle_ns = idle_->RegisterLayout(SmallLayout());
    shared_ = MakeChain(ns_, kSharedSeed, kVictimChainBlocks);
    ASSERT_EQ(*PutChain(client_.get(), ns_, shared_), shared_.size());
    auto lease = idle_->Acquire(*idle_ns, shared_);
    ASSERT_TRUE(lease.ok()) << lease.status();
    idle_lease_ = *std::move(lease);
    ASSERT_EQ(idle_lease_.ok_prefix_count(), shared_.size());
    baseline_ = HeldNow();
    baseline_fds_ = DescriptorCount();
    ASSERT_EQ(baseline_.lease_count, 1U);
  }

  // It lives through every kill, and is left alone.
  void TearDown() override {
    EXPECT_EQ(idle_->stats().reopen_count, 0U);
    // The daemon has some files that it opens when it needs them; each engine had two sockets.
    EXPECT_TRUE(Eventually(kCleanWithin, [&] { return DescriptorCount() <= baseline_fds_ + 4; }))
        << DescriptorCount() << " descriptors; before: " << baseline_fds_;
    for (size_t i = 0; i < idle_lease_.blocks().size(); ++i) {
      EXPECT_TRUE(HasPattern(shared_[i], idle_lease_.blocks()[i].bytes));
    }
    idle_lease_.Release();
    EXPECT_TRUE(Eventually(kCleanWithin, [&] { return HeldNow().pinned_bytes == 0; }));
  }

  std::unique_ptr<client::Client> Connect() {
    auto client = daemon_->Connect();
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  Held HeldNow() {
    Held held;
    const auto tiers = admin_->GetTiers();
    EXPECT_TRUE(tiers.ok()) << tiers.status();
    for (const v1::TierStats& tier : tiers->tiers()) {
      held.pinned_bytes += tier.pinned_bytes();
      held.quarantined_bytes += tier.quarantined_bytes();
    }
    held.lease_count = tiers->store().lease_count();
    held.pending_fill_count = tiers->store().pending_fill_count();
    held.session_count = admin_->GetStatus()->session_count();
    return held;
  }

  // Sockets, and what was exported over them.
  size_t DescriptorCount() const {
    const std::filesystem::directory_iterator fds("/proc/" + std::to_string(daemon_->pid()) +
                                                  "/fd");
    return static_cast<size_t>(std::distance(begin(fds), end(fds)));
  }

  // One engine lives, is killed while it does `step`, and is gone without a trace.
  void Kill(const std::string& step, milliseconds after) {
    SCOPED_TRACE("killed at " + step + ", " + std::to_string(after.count()) +
                 " ms after its first");
    const uint32_t seed = 1000 * ++victim_count_;
    const std::string ready = daemon_->data_dir() + "/ready-" + std::to_string(seed);
    ChildProcess victim(
        {g_victim, daemon_->run_dir(), SmallLayout().model, std::to_string(seed), step, ready},
        daemon_->log_path());
    ASSERT_TRUE(Eventually(milliseconds(20'000), [&] { return std::filesystem::exists(ready); }))
        << daemon_->Log();
    (void)Eventually(after, [] { return false; });
    victim.Signal(SIGKILL);
    const auto ended = victim.Wait(kCleanWithin);
    ASSERT_TRUE(ended.ok()) << ended.status();
    ASSERT_EQ(*ended, 128 + SIGKILL) << "it ended by itself";
    EXPECT_TRUE(Eventually(kCleanWithin, [&] { return HeldNow() == baseline_; }))
        << HeldNow() << "; before: " << baseline_;
    PutAgain(seed);
  }

  // Whatever the engine was doing with these keys, they are free.
  void PutAgain(uint32_t seed) {
    for (uint32_t i = 0; i < kVictimChains; ++i) {
      const auto keys = MakeChain(ns_, seed + i, kVictimChainBlocks);
      const auto taken = PutChain(client_.get(), ns_, keys);
      ASSERT_TRUE(taken.ok()) << taken.status();
      EXPECT_EQ(*taken, keys.size());
      const auto read = CheckChain(client_.get(), ns_, keys);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(read->right, keys.size());
      EXPECT_TRUE(client_->ReportBad(ns_, keys).ok());
    }
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::AdminClient> admin_;
  std::unique_ptr<client::Client> idle_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
  std::vector<Key> shared_;
  client::Lease idle_lease_;
  Held baseline_;
  size_t baseline_fds_ = 0;
  uint32_t victim_count_ = 0;
};

TEST_F(ClientKillTest, AtEveryStepLeavesNothing) {
  for (const char* step : kVictimSteps) Kill(step, milliseconds(0));
}

TEST_F(ClientKillTest, AtRandomMomentsLeavesNothing) {
  const uint64_t seed = NumberFrom("KVTIER_KILL_SEED", std::random_device()());
  const uint64_t rounds = NumberFrom("KVTIER_KILL_ROUNDS", 10);
  SCOPED_TRACE("KVTIER_KILL_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (uint64_t round = 0; round < rounds && !HasFailure(); ++round) {
    const char* const step = kVictimSteps[random() % std::size(kVictimSteps)];
    Kill(step, milliseconds(random() % 30));
  }
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 3) {
    std::cerr << "usage: client_kill_test KVTIERD CLIENT_VICTIM\n";
    return 2;
  }
  kvtier::testing::g_kvtierd = argv[1];
  kvtier::testing::g_victim = argv[2];
  return RUN_ALL_TESTS();
}
